# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Real Megatron wrappers on the reference engine: built small, run a step, read out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

import torch
from megatron.core.extensions import transformer_engine as wrappers
from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig, RecipeConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine import reference
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import fp8_autocast
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_model_init

HIDDEN = 32
TOKENS = 64
M_SPLITS = [32, 32]

KINDS = ("TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear")
RECIPES = {
    "delayed": recipes.DelayedScaling,
    "tensorwise": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
}
#: ``recipe``: quant_recipe alone, with fp8 and fp4 unset; ``fp8_param``: weights are quantized.
PRECISIONS = ("bf16", "tensorwise", "blockwise", "delayed", "recipe", "fp8_param")


def config_of(precision: str, **fields: Any) -> TransformerConfig:
    """The config of a model that runs in a precision."""
    if precision == "recipe":
        fields["quant_recipe"] = RecipeConfig([], {})
    elif precision != "bf16":
        fields["fp8"] = "hybrid"
        fields["fp8_recipe"] = "tensorwise" if precision == "fp8_param" else precision
        fields["fp8_param"] = precision == "fp8_param"
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
        **fields,
    )


def rule(
    training: dict[str, Any], evaluation: dict[str, Any] | None = None, **common: Any
) -> QuantizationConfig:
    """What a matched rule hands to a wrapper; the recipes are Megatron's own fields."""
    config: dict[str, Any] = {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": {**common, **training},
    }
    if evaluation is not None:
        config["evaluation_recipe"] = {**common, **evaluation}
    return QuantizationConfig(config, MatchContext("a", None), "a")


def quantizing_rule() -> QuantizationConfig:
    """Tensorwise wherever the module runs."""
    return rule({"fp8_quantization_recipe": "tensorwise"}, override_nonquantized_autocast=True)


def initialize(weight: torch.Tensor) -> torch.Tensor:
    """A function of the module, so that a model can be pickled."""
    return torch.nn.init.normal_(weight, std=0.1)


def wrapper_of(kind: str, config: TransformerConfig) -> Any:
    """One wrapper, [hidden, hidden] a weight."""
    common: dict[str, Any] = {
        "config": config,
        "init_method": initialize,
        "bias": False,
        "skip_bias_add": False,
    }
    if kind == "TEGroupedLinear":
        common |= {"parallel_mode": "column", "is_expert": True}
        return wrappers.TEGroupedLinear(len(M_SPLITS), HIDDEN, HIDDEN, **common)
    if kind == "TELinear":
        common |= {"parallel_mode": "duplicated", "skip_weight_param_allocation": False}
    else:
        common |= {"gather_output": False, "is_expert": False}
    return getattr(wrappers, kind)(HIDDEN, HIDDEN, **common)


def model_of(kind: str, precision: str, *, seed: int = 1, **fields: Any) -> Any:
    """A MegatronModule whose ``layer`` is one wrapper, with ``main_grad`` zero as DDP's is."""
    config = config_of(precision, **fields)
    torch.manual_seed(seed)
    parameters = precision == "fp8_param"
    recipe = RECIPES["tensorwise"]() if parameters else None
    with fp8_model_init(enabled=parameters, recipe=recipe):
        layer = wrapper_of(kind, config)
    if precision == "recipe":
        layer.finish_init(quantizing_rule())
    model = MegatronModule(config)
    model.layer = layer
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    return model


def autocast(precision: str) -> AbstractContextManager[Any]:
    """What surrounds the wrappers in a forward."""
    if precision in ("bf16", "recipe"):
        return nullcontext()
    name = "tensorwise" if precision == "fp8_param" else precision
    return fp8_autocast(enabled=True, fp8_recipe=RECIPES[name]())


def weights_of(model: Any) -> dict[str, Any]:
    """The linear's own weights by name, without those of a fused norm."""
    return {
        name: weight for name, weight in model.layer.named_parameters() if name.startswith("weight")
    }


def random(*shape: int, seed: int) -> torch.Tensor:
    """Normal values of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """One call of a wrapper, whatever its kind."""
    arguments = (M_SPLITS,) if isinstance(layer, wrappers.TEGroupedLinear) else ()
    out: torch.Tensor = layer(x, *arguments)[0]
    return out


def microbatch(model: Any, precision: str, calls: int, seed: int) -> torch.Tensor:
    """Forward and backward; the layer's output is its next input, as in a repeated layer."""
    x = random(TOKENS, HIDDEN, seed=seed).requires_grad_()
    with autocast(precision):
        for _ in range(calls):
            x = call(model.layer, x)
    (x * random(TOKENS, HIDDEN, seed=seed + 1000)).sum().backward()
    return x.detach()


def change_weights(model: Any, seed: int) -> None:
    """An optimizer step that no gradient decides, so that every run has the same weights."""
    with torch.no_grad():
        for index, weight in enumerate(weights_of(model).values()):
            weight.add_(0.1 * random(HIDDEN, HIDDEN, seed=seed + index))


def main_grads(model: Any) -> list[torch.Tensor]:
    """Copies of the linear's main_grads."""
    return [weight.main_grad.clone() for weight in weights_of(model).values()]


def scales(model: Any) -> list[torch.Tensor]:
    """What delayed scaling keeps from step to step; empty for every other recipe."""
    states = [model.layer.fp8_meta.get(key) for key in ("scaling_fwd", "scaling_bwd")]
    return [
        getattr(state, name).clone()
        for state in states
        for name in ("scale", "amax_history")
        if hasattr(state, name)
    ]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


@contextmanager
def never_overwriting() -> Iterator[None]:
    """The engine's switch, for the run that is the truth."""
    reference.never_overwrite(True)
    try:
        yield
    finally:
        reference.never_overwrite(False)


def arm_by_hand(model: Any) -> None:
    """What the release means to do, in every version: without ``set_is_first_microbatch``."""
    model.layer.is_first_microbatch = True


def train(
    model: Any,
    precision: str,
    calls: int,
    *,
    steps: int = 2,
    start: float = 0.0,
    arm: Callable[[Any], None] = lambda model: model.set_is_first_microbatch(),
) -> list[dict[str, Any]]:
    """Steps of two microbatches: what each left in main_grad, its outputs, and what was counted."""
    results = []
    for step in range(steps):
        for parameter in model.parameters():
            parameter.main_grad.fill_(start)
        arm(model)
        reference.counters.reset()
        outputs = [microbatch(model, precision, calls, 10 * step + index) for index in range(2)]
        counters = reference.counters
        results.append(
            {
                "main_grads": main_grads(model),
                "outputs": outputs,
                "scales": scales(model),
                "quantizations": counters.weight_quantizations,
                "least": len(counters.weights_used),
                "stale_reads": counters.stale_reads + counters.empty_reads,
            }
        )
        change_weights(model, seed=100 + 10 * step)
    return results


def truth(kind: str, precision: str, calls: int, **options: Any) -> list[dict[str, Any]]:
    """The release's own cache, from the same weights, never overwriting."""
    with never_overwriting():
        return train(model_of(kind, precision), precision, calls, arm=arm_by_hand, **options)


@contextmanager
def fresh_engine() -> Iterator[None]:
    """Fresh process-wide state of the engine and of Megatron's parallelism, before and after."""
    from megatron.quant_state.build import initialize_single_process

    def reset() -> None:
        FP8GlobalStateManager.reset()
        reference.never_overwrite(False)
        reference.record_calls(False)
        reference.calls.clear()
        reference.counters.reset()

    initialize_single_process()
    threads = torch.get_num_threads()
    # Products this small take longer on several threads, most of all beside other processes.
    torch.set_num_threads(1)
    reset()
    yield
    reset()
    torch.set_num_threads(threads)
