# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``Fp8Padding``: rows of zeros after each expert's tokens, up to the alignment."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    get_align_size_for_quantization,
)


def padded_splits(m_splits: list[int], align_size: int) -> list[int]:
    """Each size rounded up to the alignment."""
    return [-(-size // align_size) * align_size for size in m_splits]


class Fp8Padding(torch.nn.Module):
    """Pad; without an alignment, the recipe of the first call decides it for good."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """[M, K] to [padded M, K], with the padded sizes."""
        if len(m_splits) != self.num_gemms:
            raise AssertionError("Number of splits should match number of GEMMs.")
        if self.align_size is None:
            self.align_size = get_align_size_for_quantization(
                FP8GlobalStateManager.get_fp8_recipe()
            )
        padded = padded_splits(m_splits, self.align_size)
        if padded == m_splits:
            return inp, m_splits
        parts = []
        for part, size in zip(inp.reshape(-1, inp.shape[-1]).split(m_splits), padded, strict=True):
            parts.append(part)
            parts.append(part.new_zeros(size - len(part), inp.shape[-1]))
        return torch.cat(parts), padded
