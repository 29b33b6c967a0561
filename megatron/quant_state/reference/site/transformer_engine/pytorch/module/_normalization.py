# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""LayerNorm and RMSNorm as functions, and the modules of a norm alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def normalize(
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    kind: str,
) -> torch.Tensor:
    """Normalize the last dimension in fp32 and return the input's dtype.

    Args:
        inp: [..., K].
        weight: [K]; one less than the factor if ``zero_centered_gamma``.
        bias: [K] for LayerNorm, None for RMSNorm.
        eps: Added to the variance.
        zero_centered_gamma: Whether the stored weight is an offset from one.
        kind: ``LayerNorm`` or ``RMSNorm``.
    """
    factor = weight.to(torch.float32)
    if zero_centered_gamma:
        factor = factor + 1.0
    values = inp.to(torch.float32)
    if kind == "RMSNorm":
        out = F.rms_norm(values, (inp.shape[-1],), factor, eps)
    else:
        offset = None if bias is None else bias.to(torch.float32)
        out = F.layer_norm(values, (inp.shape[-1],), factor, offset, eps)
    return out.to(inp.dtype)


class _Norm(torch.nn.Module):
    kind = ""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        if size is None:
            raise RuntimeError("normalized_shape is not given")
        size = (size,) if isinstance(size, int) else tuple(size)
        if len(size) != 1:
            raise NotImplementedError(f"the reference engine normalizes one dimension, not {size}")
        dtype = dtype or params_dtype or torch.get_default_dtype()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.empty(*size, device=device, dtype=dtype))
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.empty(*size, device=device, dtype=dtype))
        if sequence_parallel is not None:
            for param in self.parameters():
                param.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = sequence_parallel
        self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Set the factor to one and the offset to zero."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.kind == "LayerNorm":
            torch.nn.init.zeros_(self.bias)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., K]."""
        bias = self.bias if self.kind == "LayerNorm" else None
        return normalize(inp, self.weight, bias, self.eps, self.zero_centered_gamma, self.kind)


class LayerNorm(_Norm):
    """Layer normalization."""

    kind = "LayerNorm"


class RMSNorm(_Norm):
    """Root mean square normalization."""

    kind = "RMSNorm"
