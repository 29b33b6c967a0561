# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""NVFP4: e2m1 values, an e4m3 scale for every 16 of them, one fp32 scale a tensor.

Rounding is to the nearest, ties to even. **Left out**: stochastic rounding of gradients, the random
Hadamard transform of inputs and gradients, row-scaled activations and "4 over 6". TE's default
recipe turns the first two on, so gradients differ from TE's by more than the order of a sum; which
weight is quantized when, and what overwrites what, does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, Quantizer
from transformer_engine.pytorch.tensor import _rounding as rounding

BLOCK = 16
_FP4_MAX = 6.0
_E4M3_MAX = 448.0
_FP32_MAX = torch.finfo(torch.float32).max


class NVFP4Tensor(QuantizedTensor):
    """NVFP4 that PyTorch sees as a tensor."""


def round_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with the sign, saturating; ties to even."""
    magnitude = scaled.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    rounded = torch.round(magnitude / step).mul_(step).clamp_(max=_FP4_MAX)
    return torch.copysign(rounded, scaled)


class NVFP4Quantizer(Quantizer):
    """1 x 16 blocks in each direction, or 16 x 16 tiles (weights)."""

    tensor_class = NVFP4Tensor
    recipe_kind = "nvfp4"

    def __init__(
        self,
        fp4_dtype: object = "e2m1",
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp4_dtype
        self.with_2d_quantization = with_2d_quantization
        # Unlike TE, which quantizes tiles twice: the same values come out.
        self.columnwise_from_rowwise = with_2d_quantization

    def check_shape(self, shape: Sequence[int]) -> None:
        """Both dimensions must be divisible by 16, as TE's quantizer demands."""
        if shape[-1] % BLOCK or math.prod(shape[:-1]) % BLOCK:
            raise ValueError(
                f"NVFP4 requires tensor dims that are divisible by {BLOCK}, got shape {list(shape)}"
            )

    def round(
        self, values: torch.Tensor, peers: Sequence[Quantizer] | None, lengths: Sequence[int] | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See ``Quantizer.round``."""
        if not values.numel():
            return values, values
        columns = values.shape[1]
        global_scale = rounding.scale_from_amax(
            rounding.segment_amax(values, lengths), _FP4_MAX * _E4M3_MAX
        )
        encode = rounding.spread_segments(global_scale, lengths)
        blocks = rounding.block_lengths(values.shape[0], lengths, BLOCK)
        rowwise = columnwise = None
        if self.rowwise_usage or self.with_2d_quantization:
            amax = rounding.block_amax_rows(values, BLOCK)
            if self.with_2d_quantization:
                tiles = rounding.amax_over_rows(amax, blocks)
                amax = rounding.spread_over_rows(tiles, blocks)
            rowwise = _quantize(values, rounding.spread_rows(amax, columns, BLOCK), encode)
        if self.with_2d_quantization:
            return (
                rowwise if self.rowwise_usage else None,
                rowwise if self.columnwise_usage else None,
            )
        if self.columnwise_usage:
            amax = rounding.amax_over_rows(values.abs(), blocks)
            columnwise = _quantize(values, rounding.spread_over_rows(amax, blocks), encode)
        return rowwise, columnwise


def _quantize(values: torch.Tensor, amax: torch.Tensor, encode: torch.Tensor) -> torch.Tensor:
    """Round with the block's e4m3 scale; ``amax`` and ``encode`` broadcast to the values."""
    stored = rounding.round_trip(amax.div(_FP4_MAX) * encode, torch.float8_e4m3fn)
    scale = torch.where(stored > 0, (encode / stored).clamp(max=_FP32_MAX), 0.0)
    return round_e2m1(values * scale) * (stored / encode)
