# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Per-tensor FP8: delayed scaling and current scaling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, Quantizer
from transformer_engine.pytorch.tensor import _rounding as rounding

_Pair = tuple["torch.Tensor | None", "torch.Tensor | None"]


class Float8Tensor(QuantizedTensor):
    """Per-tensor FP8 that PyTorch sees as a tensor."""


class _PerTensor(Quantizer):
    tensor_class = Float8Tensor
    columnwise_from_rowwise = True

    def __init__(self, dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def _both(self, values: torch.Tensor, scale: torch.Tensor) -> _Pair:
        rounded = rounding.round_trip(values * scale, self.dtype).mul_(1 / scale)
        # Hopper's FP8 products read a transposed copy of the same codes.
        return (
            rounded if self.rowwise_usage else None,
            rounded if self.columnwise_usage else None,
        )


class Float8Quantizer(_PerTensor):
    """Delayed scaling: the scale is given, the amax is recorded for later steps.

    ``scale`` (a scalar) and ``amax`` ([1]) are views of the module's state, fp32. The amax only
    grows until the update at the end of the autocast region sets it back to zero.
    """

    recipe_kind = "delayed"

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax

    def round(
        self, values: torch.Tensor, peers: Sequence[Quantizer] | None, lengths: Sequence[int] | None
    ) -> _Pair:
        """See ``Quantizer.round``. Records the amax of each segment in its own quantizer."""
        amax = rounding.segment_amax(values, lengths)
        if peers is None:
            torch.maximum(self.amax, amax, out=self.amax)
            return self._both(values, self.scale)
        for index, quantizer in enumerate(peers):
            assert isinstance(quantizer, Float8Quantizer)
            torch.maximum(quantizer.amax, amax[index : index + 1], out=quantizer.amax)
        scales = torch.stack([quantizer.scale for quantizer in peers])  # type: ignore[attr-defined]
        return self._both(values, rounding.spread_segments(scales, lengths))

    def is_requantization_safe(self) -> bool:
        """Never: scales move."""
        return False

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Record the amax and round nothing."""
        self.amax.copy_(tensor.detach().abs().amax())


class Float8CurrentScalingQuantizer(_PerTensor):
    """Current scaling: the scale comes from the tensor itself, kept nowhere."""

    recipe_kind = "tensorwise"

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    def round(
        self, values: torch.Tensor, peers: Sequence[Quantizer] | None, lengths: Sequence[int] | None
    ) -> _Pair:
        """See ``Quantizer.round``."""
        scale = rounding.scale_from_amax(
            rounding.segment_amax(values, lengths),
            rounding.FP8_MAX[self.dtype],
            power_of_two=self.force_pow_2_scales,
            epsilon=self.amax_epsilon,
        )
        return self._both(values, rounding.spread_segments(scale, lengths))
