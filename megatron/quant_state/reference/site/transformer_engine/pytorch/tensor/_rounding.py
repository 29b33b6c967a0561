# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Rounding to FP8 and FP4 on the CPU: pure functions from fp32 values to fp32 values.

Shapes: ``values`` is [M, K] fp32, contiguous, and never changed. What is returned is what the
hardware would read back: the codes times their scales, as fp32. A tensor may be made of `segments`
along M (the experts of a grouped linear), each scaled on its own; ``lengths`` are their row counts
and ``None`` means one segment. Blocks never cross a segment.

Models: TE 2.20, ``common/recipe/recipe_common.cuh`` and the cast kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_FP32_MAX = torch.finfo(torch.float32).max

# torch's own conversion of an FP8 tensor back to fp32 costs 3 ns an element, a table 1 ns.
_TABLES = {
    dtype: torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32) for dtype in FP8_MAX
}


def to_codes(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Saturate and round to the nearest, ties to even; NaN stays NaN. ``scaled`` is overwritten."""
    limit = FP8_MAX[dtype]
    return scaled.clamp_(-limit, limit).to(dtype)


def from_codes(codes: torch.Tensor) -> torch.Tensor:
    """Exact fp32 values of FP8 codes."""
    index = codes.view(torch.uint8).to(torch.int32).view(-1)
    return torch.index_select(_TABLES[codes.dtype], 0, index).view(codes.shape)


def round_trip(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values after a cast to FP8 and back. ``scaled`` is overwritten."""
    return from_codes(to_codes(scaled, dtype))


def scale_from_amax(
    amax: torch.Tensor,
    fp8_max: float,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Scale that maps ``amax`` to the largest FP8 value, elementwise.

    An amax of zero, infinity or NaN gives 1, one so small that the quotient overflows gives the
    largest fp32 value; powers of two are rounded down.
    """
    if epsilon:
        amax = amax.clamp(min=epsilon)
    usable = (amax > 0) & (amax <= _FP32_MAX)
    # ``float / tensor`` multiplies by a reciprocal, which rounds twice.
    quotient = torch.full_like(amax, fp8_max).div_(amax)
    scale = torch.where(usable, quotient.clamp_(max=_FP32_MAX), 1.0)
    if power_of_two:
        # The exponent bits alone: the mantissa of a power of two is zero.
        scale = (scale.view(torch.int32) & -8388608).view(torch.float32)
    return scale


def block_amax_rows(values: torch.Tensor, block: int) -> torch.Tensor:
    """Largest magnitude of each 1 x ``block`` run: [M, ceil(K / block)]."""
    rows, columns = values.shape
    magnitude = values.abs()
    if columns <= block:
        return magnitude.amax(dim=1, keepdim=True) if columns else values.new_zeros(rows, 0)
    if columns % block:
        magnitude = torch.nn.functional.pad(magnitude, (0, -columns % block))
    return magnitude.view(rows, -1, block).amax(dim=2)


def spread_rows(per_block: torch.Tensor, columns: int, block: int) -> torch.Tensor:
    """Undo the reduction of ``block_amax_rows``: a value an element, or one that broadcasts."""
    if per_block.shape[1] == 1:
        return per_block
    return per_block.repeat_interleave(block, dim=1)[:, :columns]


def block_lengths(rows: int, lengths: Sequence[int] | None, block: int | None) -> list[int]:
    """Row counts of the blocks along M, in order; empty segments have none.

    Args:
        rows: M.
        lengths: Row counts of the segments.
        block: Rows of a block; None makes each segment one block.
    """
    result: list[int] = []
    for length in lengths if lengths is not None else (rows,):
        if block is None:
            if length:
                result.append(length)
            continue
        result.extend([block] * (length // block))
        if length % block:
            result.append(length % block)
    return result


def amax_over_rows(magnitude: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Largest value of each block of rows: [len(blocks), K]."""
    if len(blocks) == 1:
        return magnitude.amax(dim=0, keepdim=True)
    if not blocks:
        return magnitude.new_zeros(0, magnitude.shape[1])
    return torch.stack([part.amax(dim=0) for part in magnitude.split(list(blocks))])


def spread_over_rows(per_block: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Undo the reduction of ``amax_over_rows``."""
    if len(blocks) <= 1:
        return per_block
    repeats = torch.tensor(list(blocks))
    return per_block.repeat_interleave(repeats, dim=0, output_size=sum(blocks))


def segment_amax(values: torch.Tensor, lengths: Sequence[int] | None) -> torch.Tensor:
    """Largest magnitude of each segment, zero for an empty one: [number of segments]."""
    if lengths is None:
        return values.abs().amax().view(1) if values.numel() else values.new_zeros(1)
    per_row = values.abs().amax(dim=1) if values.numel() else values.new_zeros(values.shape[0])
    zero = values.new_zeros(())
    return torch.stack(
        [part.amax() if part.numel() else zero for part in per_row.split(list(lengths))]
    )


def spread_segments(per_segment: torch.Tensor, lengths: Sequence[int] | None) -> torch.Tensor:
    """A value for each row, [M, 1], or one that broadcasts."""
    if lengths is None:
        return per_segment
    repeats = torch.tensor(list(lengths))
    return per_segment.repeat_interleave(repeats, output_size=sum(lengths)).unsqueeze(1)
