# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""MXFP8: a power-of-two scale for every 32 values, each direction on its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, Quantizer
from transformer_engine.pytorch.tensor import _rounding as rounding

BLOCK = 32


class MXFP8Tensor(QuantizedTensor):
    """MXFP8 that PyTorch sees as a tensor."""


class MXFP8Quantizer(Quantizer):
    """e8m0 scales, rounded up so that the largest value of a block fits."""

    tensor_class = MXFP8Tensor
    recipe_kind = "mxfp8"

    def __init__(self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype

    def check_shape(self, shape: Sequence[int]) -> None:
        """Both dimensions must be divisible by 32, as TE's quantizer demands."""
        if shape[-1] % BLOCK or math.prod(shape[:-1]) % BLOCK:
            raise ValueError(
                f"MXFP8 requires tensor dims that are divisible by {BLOCK}, got shape {list(shape)}"
            )

    def round(
        self, values: torch.Tensor, peers: Sequence[Quantizer] | None, lengths: Sequence[int] | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See ``Quantizer.round``."""
        rowwise = columnwise = None
        if not values.numel():
            return values, values
        if self.rowwise_usage:
            exponent = self._exponent(rounding.block_amax_rows(values, BLOCK))
            rowwise = self._apply(values, rounding.spread_rows(exponent, values.shape[1], BLOCK))
        if self.columnwise_usage:
            blocks = rounding.block_lengths(values.shape[0], lengths, BLOCK)
            exponent = self._exponent(rounding.amax_over_rows(values.abs(), blocks))
            columnwise = self._apply(values, rounding.spread_over_rows(exponent, blocks))
        return rowwise, columnwise

    def _exponent(self, amax: torch.Tensor) -> torch.Tensor:
        """Biased exponent of the block's scale, the e8m0 code, as int32."""
        # The kernels multiply by the reciprocal of the largest value; the quotient differs.
        ratio = amax * torch.tensor(1.0 / rounding.FP8_MAX[self.dtype], dtype=torch.float32)
        bits = ratio.view(torch.int32)
        exponent = (bits >> 23) & 0xFF
        mantissa = bits & 0x7FFFFF
        subnormal_down = (exponent == 0) & (mantissa <= 0x400000)
        exponent = exponent + ((mantissa > 0) & (exponent < 254) & ~subnormal_down).to(torch.int32)
        exponent = torch.where(torch.isinf(amax), 254, exponent)
        return torch.where(torch.isnan(amax), 255, exponent)

    def _apply(self, values: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        up = _power_of_two(254 - exponent)
        down = _power_of_two(exponent)
        # The code 255 is NaN: nothing of such a block survives.
        down = torch.where(exponent == 255, float("nan"), down)
        scaled = values * up
        return rounding.round_trip(scaled, self.dtype).mul_(down)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2 ** (exponent - 127), exactly, for biased exponents from 0 (a subnormal) to 254."""
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return bits.to(torch.int32).view(torch.float32)
