# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What tests of real kernels share: the device, fresh state, and the release with nothing lost.

The bodies run on Transformer Engine on a GPU, and on the reference engine on a CPU as well, where
that helps to write them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

# Deterministic kernels of cuBLAS; read when its handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_REFERENCE = importlib.util.find_spec("transformer_engine.reference") is not None
if DEVICE == "cpu" and not IS_REFERENCE:
    pytest.skip("Transformer Engine runs on a GPU only", allow_module_level=True)


def _stand_in_for_apex() -> None:
    """The fused weight gradient of Megatron's own linears, where there is no APEX."""
    name = "fused_weight_gradient_mlp_cuda"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return

    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> None:
        x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        out.add_(grad.float().t() @ x.float())

    module = ModuleType(name)
    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # type: ignore[attr-defined]
    sys.modules[name] = module


_stand_in_for_apex()

from megatron.core.extensions import transformer_engine as wrappers
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

WRAPPERS = (
    wrappers.TELinear,
    wrappers.TELayerNormColumnParallelLinear,
    wrappers.TEGroupedLinear,
)
#: Where the tests of real kernels lie.
HERE = Path(__file__).parent


@contextmanager
def fresh_state() -> Iterator[None]:
    """Fresh process-wide state of TE, deterministic kernels of torch, and both put back."""

    def reset() -> None:
        FP8GlobalStateManager.reset()
        distributed.activation_recompute_forward._is_first_fp8_module.clear()
        distributed.activation_recompute_forward().__exit__(None, None, None)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling what was allocated with NaN would write into TE's buffers as well.
    torch.utils.deterministic.fill_uninitialized_memory = False
    reset()
    try:
        yield
    finally:
        reset()
        torch.use_deterministic_algorithms(before)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values of a seed, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def linears(model: Any) -> dict[str, Any]:
    """Megatron's TE linears of a model, by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, WRAPPERS)
    }


def change_weights(model: Any, seed: int, size: float = 0.05) -> None:
    """An optimizer step that no gradient decides, so that every run has the same weights."""
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            now = weight.dequantize() if hasattr(weight, "dequantize") else weight
            noise = size * random(*weight.shape, seed=1000 * seed + index)
            weight.copy_((now.float() + noise).to(weight.dtype))


@contextmanager
def overwriting_undone() -> Iterator[None]:
    """The release whose overwrite loses nothing: the truth for every recipe, delayed included.

    TE has no switch for that. What stands in ``main_grad`` right before the weight gradient of an
    armed call overwrites it is kept, and added again right after. Two fp32 additions of the same
    values as an accumulating GEMM does.
    """
    raw = {kind: kind.__dict__["forward"] for kind in WRAPPERS}
    try:
        for kind, forward in raw.items():
            kind.forward = _undoing(forward)
        yield
    finally:
        for kind, forward in raw.items():
            kind.forward = forward


def _undoing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        overwrites = self.is_first_microbatch and not self.disable_parameter_transpose_cache
        out = forward(self, *args, **kwargs)
        if overwrites and out[0].grad_fn is not None:
            _undo(self, out[0].grad_fn)
        return out

    return wrapper


def _undo(module: Any, node: Any) -> None:
    while not isinstance(node, torch.autograd.function.BackwardCFunction):
        node = node.next_functions[0][0]
    weights = [
        parameter
        for name, parameter in module._parameters.items()
        if name.startswith("weight") and hasattr(parameter, "main_grad")
    ]
    kept: list[torch.Tensor] = []

    def before(_: Any) -> None:
        kept.extend(weight.main_grad.clone() for weight in weights)

    def after(*_: Any) -> None:
        for weight, lost in zip(weights, kept, strict=True):
            weight.main_grad.add_(lost)

    node.register_prehook(before)
    node.register_hook(after)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Byte for byte: -0.0 differs from 0.0, and a NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not the same bytes."""
    assert left.keys() == right.keys()
    return [name for name in left if not same_bytes(left[name], right[name])]
