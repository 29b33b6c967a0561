# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Blockwise FP8: a scale for every 128 values of a direction, or for every 128 x 128 tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, Quantizer
from transformer_engine.pytorch.tensor import _rounding as rounding


class Float8BlockwiseQTensor(QuantizedTensor):
    """Blockwise FP8 that PyTorch sees as a tensor."""


class Float8BlockQuantizer(Quantizer):
    """Scales of blocks, powers of two by default.

    With ``block_scaling_dim=1`` a row-wise block is 1 x 128 and a column-wise one 128 x 1, each
    direction rounded from the unquantized values. With 2 both directions are the same tiles. A
    width that is no multiple of 128 leaves a smaller block at the end.
    """

    tensor_class = Float8BlockwiseQTensor
    recipe_kind = "blockwise"

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype
        self.block_len = 128
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim
        # Tiles transpose, runs do not.
        self.columnwise_from_rowwise = block_scaling_dim == 2

    def round(
        self, values: torch.Tensor, peers: Sequence[Quantizer] | None, lengths: Sequence[int] | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See ``Quantizer.round``."""
        rows, columns = values.shape
        if not values.numel():
            return values, values
        row_blocks = rounding.block_lengths(rows, lengths, self.block_len)
        if self.block_scaling_dim == 2:
            runs = rounding.block_amax_rows(values, self.block_len)
            tiles = rounding.amax_over_rows(runs, row_blocks)
            scale = rounding.spread_over_rows(self._scale(tiles), row_blocks)
            rounded = self._apply(values, rounding.spread_rows(scale, columns, self.block_len))
            return (
                rounded if self.rowwise_usage else None,
                rounded if self.columnwise_usage else None,
            )
        rowwise = columnwise = None
        if self.rowwise_usage:
            scale = self._scale(rounding.block_amax_rows(values, self.block_len))
            rowwise = self._apply(values, rounding.spread_rows(scale, columns, self.block_len))
        if self.columnwise_usage:
            scale = self._scale(rounding.amax_over_rows(values.abs(), row_blocks))
            columnwise = self._apply(values, rounding.spread_over_rows(scale, row_blocks))
        return rowwise, columnwise

    def _scale(self, amax: torch.Tensor) -> torch.Tensor:
        return rounding.scale_from_amax(
            amax,
            rounding.FP8_MAX[self.dtype],
            power_of_two=self.force_pow_2_scales,
            epsilon=self.amax_epsilon,
        )

    def _apply(self, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return rounding.round_trip(values * scale, self.dtype).mul_(1 / scale)
