# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What the contract tests share: one device, the recipes, and one layer of each kind.

Nothing here belongs to one engine: on the CPU ``transformer_engine`` is the reference engine, on a
GPU it is Transformer Engine, and the test bodies are the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch  # First: it loads libraries that Transformer Engine links to.

pytest.importorskip(
    "transformer_engine.pytorch",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and importlib.util.find_spec("transformer_engine.reference") is None:
    pytest.skip("Transformer Engine needs a GPU to run", allow_module_level=True)
#: Recipes that a GPU of today's fleet (Hopper) runs too; ``bf16`` means no autocast.
NAMES = ("delayed", "tensorwise", "blockwise")
BLACKWELL = ("mxfp8", "nvfp4")
KINDS = ("Linear", "LayerNormLinear", "GroupedLinear")
FEATURES = 128
TOKENS = 64


def recipe_of(name: str) -> Any:
    """A recipe by Megatron's word for it; skips where the device has no such format."""
    make, available = {
        "delayed": (recipes.DelayedScaling, "is_fp8_available"),
        "tensorwise": (recipes.Float8CurrentScaling, "is_fp8_available"),
        "blockwise": (recipes.Float8BlockScaling, "is_fp8_block_scaling_available"),
        "mxfp8": (recipes.MXFP8BlockScaling, "is_mxfp8_available"),
        "nvfp4": (recipes.NVFP4BlockScaling, "is_nvfp4_available"),
    }[name]
    found, reason = getattr(FP8GlobalStateManager, available)()
    if not found:
        pytest.skip(reason)
    return make()


@contextmanager
def quantized(name: str) -> Iterator[None]:
    """An autocast region of a recipe; ``bf16`` opens none."""
    if name == "bf16":
        yield
        return
    with te.autocast(enabled=True, recipe=recipe_of(name)):
        yield


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


class Layer:
    """A linear module of any kind behind one way to call it."""

    def __init__(self, kind: str = "Linear", *, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        options = {"bias": False, "params_dtype": torch.bfloat16, "device": DEVICE, **options}
        options.setdefault("fuse_wgrad_accumulation", True)
        self.grouped = kind == "GroupedLinear"
        sizes = (2, FEATURES, FEATURES) if self.grouped else (FEATURES, FEATURES)
        self.module = getattr(te, kind)(*sizes, **options)
        self.names = ("weight0", "weight1") if self.grouped else ("weight",)
        self.splits = [TOKENS // 2, TOKENS // 2]
        with torch.no_grad():
            for index, weight in enumerate(self.weights):
                weight.copy_(random(FEATURES, FEATURES, seed=100 + seed + index) * 0.1)
        self.fill(0.0)

    @property
    def weights(self) -> list[Any]:
        return [getattr(self.module, name) for name in self.names]

    @property
    def workspaces(self) -> dict[str, Any]:
        found: dict[str, Any] = self.module._fp8_workspaces
        return found

    @property
    def main_grads(self) -> torch.Tensor:
        """A copy, [weights, out, in]."""
        return torch.stack([weight.main_grad.clone() for weight in self.weights])

    def fill(self, value: float) -> None:
        """Give every weight a main_grad, fp32, of one value."""
        for weight in self.weights:
            weight.main_grad = torch.full((FEATURES, FEATURES), value, device=DEVICE)

    def change_weights(self) -> None:
        """As an optimizer step would, in place."""
        with torch.no_grad():
            for weight in self.weights:
                weight.copy_(random(FEATURES, FEATURES, seed=77) * 0.3)

    def __call__(self, inp: torch.Tensor, flag: bool | None) -> Any:
        if self.grouped:
            return self.module(inp, self.splits, is_first_microbatch=flag)
        return self.module(inp, is_first_microbatch=flag)

    def step(self, name: str, *flags: bool | None) -> None:
        """Calls with the flags, in one microbatch, then one backward. Inputs differ by call."""
        with quantized(name):
            outs = [
                self(random(TOKENS, FEATURES, seed=10 + index).requires_grad_(), flag)
                for index, flag in enumerate(flags)
            ]
        gradients = [random(TOKENS, FEATURES, seed=20 + index) for index in range(len(outs))]
        torch.autograd.backward(outs, gradients)
