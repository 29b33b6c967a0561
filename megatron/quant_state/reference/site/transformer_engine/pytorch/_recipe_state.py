# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Per-module state of a recipe, and the quantizers it makes; the delayed scale update."""

from __future__ import annotations

import os
from typing import Any

import torch

from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    NVFP4BlockScaling,
    Recipe,
    recipe_name,
)
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

_FORWARD_SLOTS = ("input", "weight", "output")
_BACKWARD_SLOTS = ("grad_output", "grad_input")
_FP32_MAX = torch.finfo(torch.float32).max


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """FP8 dtype of a recipe for tensors of the forward or the backward pass."""
    if fp8_recipe.fp8_format == Format.E4M3:
        return torch.float8_e4m3fn
    if fp8_recipe.fp8_format == Format.HYBRID and fprop_tensor:
        return torch.float8_e4m3fn
    return torch.float8_e5m2


def get_fp8_max(fp8_recipe: Any, fprop_tensor: bool = True) -> float:
    """Largest value of ``get_fp8_torch_dtype``."""
    dtype = get_fp8_torch_dtype(fp8_recipe, fprop_tensor)
    return float(torch.finfo(dtype).max)


class RecipeState:
    """Quantizers of one direction of one module, and what they share.

    ``scale`` [slots] and ``amax_history`` [length, slots], fp32, exist for delayed scaling only;
    the quantizers hold views of them.
    """

    def __init__(self, recipe: Recipe, *, mode: str, num_quantizers: int) -> None:
        self.recipe = recipe
        self.mode = mode
        self.num_quantizers = num_quantizers
        self.kind = recipe_name(recipe)

    @staticmethod
    def create(
        recipe: Recipe, *, mode: str, num_quantizers: int = 1, device: Any = None, roles: Any = None
    ) -> RecipeState:
        """State of a recipe; ``mode`` is ``forward`` or ``backward``."""
        cls = DelayedScalingRecipeState if recipe.delayed() else RecipeState
        return cls(recipe, mode=mode, num_quantizers=num_quantizers)

    def make_quantizers(self) -> list[Quantizer]:
        """A quantizer a slot: input, weight, output for each GEMM; grad_output, grad_input."""
        names = _FORWARD_SLOTS if self.mode == "forward" else _BACKWARD_SLOTS
        return [
            self._make(names[index % len(names)], index) for index in range(self.num_quantizers)
        ]

    def _make(self, slot: str, index: int) -> Quantizer:
        recipe = self.recipe
        dtype = get_fp8_torch_dtype(recipe, self.mode == "forward")
        if isinstance(recipe, NVFP4BlockScaling):
            tiles = slot == "weight" and not recipe.disable_2d_quantization
            return NVFP4Quantizer(with_2d_quantization=tiles)
        if isinstance(recipe, Float8CurrentScaling):
            parameters = _parameters(recipe, slot)
            return Float8CurrentScalingQuantizer(
                dtype,
                force_pow_2_scales=parameters.power_2_scale or recipe.use_power_2_scales,
                amax_epsilon=parameters.amax_epsilon,
            )
        if isinstance(recipe, Float8BlockScaling):
            parameters = _parameters(recipe, slot)
            dimension = {
                "weight": recipe.w_block_scaling_dim,
                "grad_output": recipe.grad_block_scaling_dim,
                "grad_input": recipe.grad_block_scaling_dim,
            }.get(slot, recipe.x_block_scaling_dim)
            return Float8BlockQuantizer(
                dtype,
                amax_epsilon=parameters.amax_epsilon,
                force_pow_2_scales=parameters.power_2_scale and not recipe.use_f32_scales,
                block_scaling_dim=dimension,
            )
        return MXFP8Quantizer(dtype)


class DelayedScalingRecipeState(RecipeState):
    """Scales and the history of amaxes, which persist from step to step."""

    def __init__(self, recipe: Recipe, *, mode: str, num_quantizers: int) -> None:
        super().__init__(recipe, mode=mode, num_quantizers=num_quantizers)
        assert isinstance(recipe, DelayedScaling)
        self.scale = torch.ones(num_quantizers)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers)

    def _make(self, slot: str, index: int) -> Quantizer:
        return Float8Quantizer(
            self.scale[index],
            self.amax_history[0][index].reshape(1),
            get_fp8_torch_dtype(self.recipe, self.mode == "forward"),
        )


def _parameters(recipe: Any, slot: str) -> Any:
    if slot == "weight":
        return recipe.fp8_quant_fwd_weight
    if slot in _BACKWARD_SLOTS:
        return recipe.fp8_quant_bwd_grad
    return recipe.fp8_quant_fwd_inp


def has_delayed_scaling_state(fp8_meta: dict[str, Any]) -> bool:
    """Whether a module's metadata holds scales that persist."""
    recipe = fp8_meta.get("recipe")
    return recipe is not None and recipe.delayed()


def update_amax_and_scale(
    amax_history: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
) -> None:
    """Take the step's amaxes into the history and compute the next scales, both in place.

    The history's row 0 holds the running step. The amax is the largest of the history, or row 0 for
    ``most_recent``; rows then move up by one, and row 0 starts from zero. A scale is
    ``fp8_max / amax / 2**margin``; it stays as it was where the amax is zero or not finite.

    TE's fused update leaves a slot alone, history and scale, that recorded nothing in this step: a
    weight whose cached copy was reused. The unfused one (algorithms of one's own, or
    NVTE_UNFUSED_FP8_UPDATE=1) moves its rows like all others. Source: Transformer Engine 2.20.2,
    ``reduce_and_update_fp8_tensors``, measured on an H200.

    Args:
        amax_history: [length, slots], fp32, changed in place.
        scale: [slots], fp32, changed in place.
        fp8_max: Largest value of the format.
        recipe: Algorithms and margin.

    Raises:
        RuntimeError: The two have not the same number of slots.
    """
    if amax_history.shape[1] != scale.numel():
        raise RuntimeError(
            f"Expected {amax_history.shape[1]} elements, Found {scale.numel()}: the history is "
            "another tensor's"
        )
    unfused = (
        bool(int(os.getenv("NVTE_UNFUSED_FP8_UPDATE", "0")))
        or callable(recipe.amax_compute_algo)
        or callable(recipe.scaling_factor_compute_algo)
    )
    moves = torch.ones_like(amax_history[0], dtype=torch.bool)
    if not unfused:
        moves = amax_history[0] != 0
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(amax_history)
    elif recipe.amax_compute_algo == "most_recent":
        amax = amax_history[0].clone()
    else:
        amax = amax_history.amax(dim=0)
    if amax_history.shape[0] > 1:
        amax_history.copy_(torch.where(moves, torch.roll(amax_history, -1, 0), amax_history))
    amax_history[0].zero_()
    if recipe.scaling_factor_compute_algo is not None:
        scale.copy_(recipe.scaling_factor_compute_algo(amax, scale, fp8_max, recipe))
        return
    # ``float / tensor`` multiplies by a reciprocal, which rounds twice.
    quotient = torch.full_like(amax, fp8_max).div_(amax)
    new = quotient.div_(2.0**recipe.margin).clamp_(max=_FP32_MAX)
    scale.copy_(torch.where(moves & (amax > 0) & torch.isfinite(amax), new, scale))
