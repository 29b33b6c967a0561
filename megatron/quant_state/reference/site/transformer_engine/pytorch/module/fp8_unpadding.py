# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``Fp8Unpadding``: take the rows away that ``Fp8Padding`` added."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.module.fp8_padding import padded_splits
from transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    get_align_size_for_quantization,
)


class Fp8Unpadding(torch.nn.Module):
    """Unpad; without an alignment, the recipe of the first call decides it for good."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """[padded M, K] to [M, K]; ``m_splits`` are the sizes without padding."""
        if len(m_splits) != self.num_gemms:
            raise AssertionError("Number of splits should match number of GEMMs.")
        if self.align_size is None:
            self.align_size = get_align_size_for_quantization(
                FP8GlobalStateManager.get_fp8_recipe()
            )
        padded = padded_splits(m_splits, self.align_size)
        if padded == m_splits:
            return inp
        parts = inp.reshape(-1, inp.shape[-1]).split(padded)
        return torch.cat([part[:size] for part, size in zip(parts, m_splits, strict=True)])
