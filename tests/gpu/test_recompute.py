# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A region under ``tensor_parallel.checkpoint`` gives the gradients that it gives without."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine as wrappers
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import fp8_autocast
from transformer_engine.pytorch.fp8 import fp8_model_init

from megatron.quant_state import install
from tests.gpu import gpt
from tests.gpu.gpt import DEVICE, REAL, probe, same_bits, torch

HIDDEN = 256 if REAL else 32
DTYPE = torch.bfloat16 if REAL else torch.float32
RECIPES: dict[str, Any] = {
    "tensorwise": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
    "delayed": recipes.DelayedScaling,
}


def layers_of(precision: str, parameters: bool) -> list[Any]:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        add_bias_linear=False,
        use_cpu_initialization=not REAL,
        params_dtype=DTYPE,
        gradient_accumulation_fusion=True,
        fp8="hybrid" if precision != "blockwise" else "e4m3",
        fp8_recipe=precision,
    )
    torch.manual_seed(3)
    made = []
    with fp8_model_init(enabled=parameters, recipe=RECIPES[precision]()):
        for kind in ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear"):
            layer = getattr(wrappers, kind)(
                HIDDEN,
                HIDDEN,
                config=config,
                init_method=functools.partial(torch.nn.init.normal_, std=0.1),
                bias=False,
                skip_bias_add=False,
                gather_output=False,
                is_expert=False,
            )
            made.append(layer)
    for seed, layer in enumerate(made):
        # Megatron's own random state has moved since the last model.
        values = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            layer.weight.copy_((0.1 * values).to(DTYPE).to(DEVICE))
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)
    return made


def random(seed: int) -> torch.Tensor:
    values = torch.randn(128, 1, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return values.to(DTYPE).to(DEVICE)


def gradients(
    precision: str, *, checkpointed: bool, installed: bool, parameters: bool = False
) -> list[torch.Tensor]:
    """Two regions a microbatch, two microbatches: outputs, input gradients and main_grads."""
    gpt.reset()
    # Without the layer the replay would find the flag False, which is not what is looked at.
    probe.never_overwrite(True)
    found = []
    with install() if installed else nullcontext():
        layers = layers_of(precision, parameters)

        def region(value: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                value = layer(value)[0]
            return value

        for seed in (1, 2):
            x = random(seed).requires_grad_()
            with fp8_autocast(enabled=True, fp8_recipe=RECIPES[precision]()):
                out = x
                for _ in range(2):
                    if checkpointed:
                        out = tensor_parallel.checkpoint(region, False, out)
                    else:
                        out = region(out)
            out.backward(random(seed + 10))
            assert x.grad is not None
            found += [out.detach(), x.grad]
    weights = [p for layer in layers for n, p in layer.named_parameters() if n == "weight"]
    return [value.float() for value in found] + [weight.main_grad for weight in weights]


@pytest.mark.parametrize("parameters", [False, True], ids=["bf16-weights", "fp8_param"])
@pytest.mark.parametrize("precision", RECIPES)
def test_a_recomputed_region_exact(precision: str, parameters: bool) -> None:
    gpt.initialize()
    options: dict[str, Any] = {"parameters": parameters, "installed": True}
    right = gradients(precision, checkpointed=False, **options)
    found = gradients(precision, checkpointed=True, **options)
    differing = {
        index: (gpt.relative_error(a, b), int((a != b).sum()), a.numel())
        for index, (a, b) in enumerate(zip(found, right, strict=True))
        if not same_bits(a, b)
    }
    assert differing == {}
    options["installed"] = False
    if parameters:
        with pytest.raises(AttributeError, match="main_grad"):
            gradients(precision, checkpointed=True, **options)
        return
    release = gradients(precision, checkpointed=True, **options)
    for lost, expected in zip(release[-2:], right[-2:], strict=True):
        assert gpt.relative_error(lost, expected) > 0.01
