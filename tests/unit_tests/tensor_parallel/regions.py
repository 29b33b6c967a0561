# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What tests of recompute share: one device and dtype, real Megatron linears, ways to run them.

Nothing here belongs to one engine: on the CPU ``transformer_engine`` is the reference engine, on a
GPU it is Transformer Engine, and the test bodies are the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch  # First: it loads libraries that Transformer Engine links to.

pytest.importorskip(
    "transformer_engine.pytorch",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

import transformer_engine.pytorch as te
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine as wrappers
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import distributed, fp8_autocast
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_model_init

IS_REFERENCE = importlib.util.find_spec("transformer_engine.reference") is not None
DEVICE = "cuda" if torch.cuda.is_available() and not IS_REFERENCE else "cpu"
if DEVICE == "cpu" and not IS_REFERENCE:
    pytest.skip("Transformer Engine runs on a GPU only", allow_module_level=True)
# Products in bf16 are slow on a CPU; kernels in FP8 want bf16 and sizes that blocks divide.
DTYPE = torch.float32 if IS_REFERENCE else torch.bfloat16
HIDDEN = 32 if IS_REFERENCE else 256
TOKENS = 32 if IS_REFERENCE else 128
RECIPES: dict[str, Callable[[], Any]] = {
    "tensorwise": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
    "delayed": recipes.DelayedScaling,
}
KINDS = ("TELinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear")


@dataclass(frozen=True)
class Precision:
    """A recipe by Megatron's word for it, None for BF16, and whether parameters are quantized."""

    recipe: str | None
    fp8_param: bool = False

    def __str__(self) -> str:
        return f"{self.recipe or 'bf16'}{'+fp8_param' if self.fp8_param else ''}"

    def autocast(self) -> AbstractContextManager[Any]:
        """What Megatron's ``get_fp8_context`` puts around a layer."""
        if self.recipe is None:
            return nullcontext()
        return fp8_autocast(enabled=True, fp8_recipe=RECIPES[self.recipe]())


PRECISIONS = [Precision(name, fp8_param) for name in RECIPES for fp8_param in (False, True)]
QUANTIZED = [Precision(name) for name in RECIPES]


def random(*shape: int, seed: int) -> torch.Tensor:
    """Normal values of a seed, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


class Layers(MegatronModule):  # type: ignore[misc]
    """TE linears of Megatron, [hidden, hidden] a weight, one after the other."""

    def __init__(self, precision: Precision, kinds: tuple[str, ...], seed: int = 1) -> None:
        fields: dict[str, Any] = {}
        if precision.recipe is not None:
            fields = {"fp8": "hybrid", "fp8_recipe": precision.recipe}
            fields["fp8_param"] = precision.fp8_param
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            add_bias_linear=False,
            params_dtype=DTYPE,
            bf16=DTYPE is torch.bfloat16,
            use_cpu_initialization=IS_REFERENCE,
            gradient_accumulation_fusion=True,
            **fields,
        )
        super().__init__(config)
        torch.manual_seed(seed)
        recipe = RECIPES[precision.recipe]() if precision.recipe is not None else None
        with fp8_model_init(enabled=precision.fp8_param, recipe=recipe):
            self.linears = torch.nn.ModuleList(_linear(kind, config) for kind in kinds)
        for linear in self.linears:
            # Megatron quantizes what torch.empty left before it fills the weight on the CPU.
            if precision.recipe == "delayed" and precision.fp8_param:
                linear.fp8_meta["scaling_fwd"].amax_history.zero_()
        for index, parameter in enumerate(self.parameters()):
            if parameter.dim() == 2:
                with torch.no_grad():
                    parameter.copy_(0.1 * random(HIDDEN, HIDDEN, seed=50 + index))
            parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)

    def run(self, x: torch.Tensor, *numbers: int) -> torch.Tensor:
        """The linears of the numbers, all of them without numbers."""
        for linear in [self.linears[n] for n in numbers] if numbers else self.linears:
            arguments = ([TOKENS // 2] * 2,) if isinstance(linear, wrappers.TEGroupedLinear) else ()
            x = linear(x, *arguments)[0]
        return x

    def change_weights(self, seed: int) -> None:
        """An optimizer step that no gradient decides, so that every run has the same weights."""
        with torch.no_grad():
            for index, weight in enumerate(self.parameters()):
                now = weight.dequantize() if hasattr(weight, "dequantize") else weight
                noise = random(*weight.shape, seed=1000 + 10 * seed + index)
                weight.copy_(now + 0.1 * noise)

    def scales(self) -> dict[str, torch.Tensor]:
        """What delayed scaling keeps from step to step; empty for every other recipe."""
        return {
            f"linear {number} {key} {name}": getattr(linear.fp8_meta[key], name).clone()
            for number, linear in enumerate(self.linears)
            for key in ("scaling_fwd", "scaling_bwd")
            for name in ("scale", "amax_history")
            if isinstance(getattr(linear.fp8_meta.get(key), name, None), torch.Tensor)
        }

    def main_grads(self) -> dict[str, torch.Tensor]:
        """Copies."""
        named = self.named_parameters()
        return {f"main_grad of {name}": weight.main_grad.clone() for name, weight in named}


def _linear(kind: str, config: TransformerConfig) -> Any:
    common: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.zeros_,
        "bias": False,
        "skip_bias_add": False,
    }
    if kind == "TEGroupedLinear":
        return wrappers.TEGroupedLinear(
            2, HIDDEN, HIDDEN, parallel_mode="column", is_expert=True, **common
        )
    if kind == "TELinear":
        common |= {"parallel_mode": "duplicated", "skip_weight_param_allocation": False}
    else:
        common |= {"gather_output": False, "is_expert": False}
    return getattr(wrappers, kind)(HIDDEN, HIDDEN, **common)


Function = Callable[[torch.Tensor], torch.Tensor]
#: How a function of one tensor runs: as it is, or as a region.
Way = Callable[[Function, torch.Tensor], torch.Tensor]


def plain(function: Function, x: torch.Tensor) -> torch.Tensor:
    """No recompute."""
    return function(x)


def checkpoint(function: Function, x: torch.Tensor) -> torch.Tensor:
    """Megatron's region."""
    out: torch.Tensor = tensor_parallel.checkpoint(function, False, x)
    return out


def te_checkpoint(function: Function, x: torch.Tensor) -> torch.Tensor:
    """TE's own region, as Megatron opens it for a whole layer."""
    out: torch.Tensor = te.checkpoint(function, x, distribute_saved_activations=False)
    return out


def checkpoint_without_output(function: Function, x: torch.Tensor) -> torch.Tensor:
    """Megatron's region whose output is thrown away too; a product that saves it comes behind."""
    region = CheckpointWithoutOutput(fp8=True)
    out = region.checkpoint(function, x)
    product = out * out
    region.discard_output_and_register_recompute(product)
    return product


def without_output_plain(function: Function, x: torch.Tensor) -> torch.Tensor:
    """The same computation without recompute."""
    out = function(x)
    return out * out


def train(
    precision: Precision,
    forward: Callable[[Layers, torch.Tensor], torch.Tensor],
    *,
    kinds: tuple[str, ...] = ("TELayerNormColumnParallelLinear", "TELinear"),
    steps: int = 3,
    microbatches: int = 2,
) -> list[dict[str, torch.Tensor]]:
    """Train; for each step all that recompute must not change, by name."""
    layers = Layers(precision, kinds)
    results = []
    for step in range(steps):
        for parameter in layers.parameters():
            parameter.main_grad.zero_()
        layers.set_is_first_microbatch()
        found: dict[str, torch.Tensor] = {}
        for index in range(microbatches):
            seed = 10 * step + index
            # Sizes move, so that delayed scales do.
            x = ((1 + seed % 5) * random(TOKENS, HIDDEN, seed=seed)).requires_grad_()
            with precision.autocast():
                out = forward(layers, x)
            (out * random(TOKENS, HIDDEN, seed=seed + 500)).sum().backward()
            found[f"output {index}"] = out.detach()
            found[f"input gradient {index}"] = x.grad
        results.append({**found, **layers.main_grads(), **layers.scales()})
        layers.change_weights(step)
    return results


def check_same(found: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> None:
    """Bit for bit, all names of all steps."""
    assert len(found) == len(right)
    for step, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        assert ours.keys() == theirs.keys()
        wrong = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        assert not wrong, f"step {step}: different {', '.join(wrong)}"


def phase() -> tuple[bool, bool]:
    """Whether TE is inside a region whatever is quantized, and whether in a replay."""
    names = ("_IN_ACTIVATION_RECOMPUTE_REGION", "_FP8_ACTIVATION_RECOMPUTE_ENABLED")
    (inside,) = (getattr(distributed, name) for name in names if hasattr(distributed, name))
    return bool(inside), bool(distributed.in_fp8_activation_recompute_phase())


def te_state() -> dict[str, Any]:
    """All of TE's process-wide state that a region may leave changed."""
    manager = FP8GlobalStateManager
    state = getattr(manager, "quantization_state", manager)
    depth = "autocast_depth" if hasattr(state, "autocast_depth") else "AUTOCAST_DEPTH"
    return {
        "autocast": manager.get_autocast_state(),
        "depth": getattr(state, depth),
        "phase": phase(),
        "firsts": list(distributed.activation_recompute_forward._is_first_fp8_module),
        "stashed": [len(queue) for queue in state.fp8_tensors_recompute_buffer if queue],
    }


def is_first() -> bool:
    """The first-module flag, read without taking it."""
    return bool(FP8GlobalStateManager.get_autocast_state()[4])


@contextmanager
def fresh_state() -> Iterator[None]:
    """Fresh process-wide state of TE and of Megatron's parallelism, before and after."""
    from megatron.quant_state.build import initialize_single_process

    def reset() -> None:
        FP8GlobalStateManager.reset()
        distributed.activation_recompute_forward._is_first_fp8_module.clear()
        distributed.activation_recompute_forward().__exit__(None, None, None)

    initialize_single_process()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reset()
    yield
    reset()
    torch.set_num_threads(threads)


def truth(run: Callable[[], Any]) -> Any:
    """What a run without recompute gives, with the layer, so that no repeat overwrites anything."""
    from megatron.quant_state import install

    with install():
        return run()


@contextmanager
def installed_or_failing(layer: str, match: str) -> Iterator[None]:
    """The body with the layer; or, as its negative control, without it and failing as foreseen.

    A replay of quantized parameters in BF16 does not even get to a wrong gradient.
    """
    from megatron.quant_state import install

    if layer == "installed":
        with install():
            yield
        return
    try:
        yield
    except (AssertionError, AttributeError) as error:
        text = str(error)
        assert match in text or "no attribute 'main_grad'" in text, text
        return
    pytest.fail(f"the release passes, where it was to fail with: {match}")
