# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Quantization written down plainly, in numpy, from the definition of the formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Scaling = Callable[[Values], Values]


def _grid(exponent_bits: int, mantissa_bits: int, largest: float) -> Values:
    """The non-negative values of a format, ascending; index parity is mantissa parity."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            if exponent == 0:
                values.append(fraction * 2.0 ** (1 - bias))
            else:
                values.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array([value for value in values if value <= largest], dtype=np.float32)


E4M3 = _grid(4, 3, 448.0)
E5M2 = _grid(5, 2, 57344.0)
E2M1 = _grid(2, 1, 6.0)


def nearest(values: Values, grid: Values) -> Values:
    """Nearest value of the grid, ties to the even code, saturating."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), float(grid[-1]))
    above = np.searchsorted(grid, magnitude).clip(1, len(grid) - 1)
    low, high = grid[above - 1].astype(np.float64), grid[above].astype(np.float64)
    to_low, to_high = magnitude - low, high - magnitude
    even_is_low = (above - 1) % 2 == 0
    take_low = (to_low < to_high) | ((to_low == to_high) & even_is_low)
    return (np.where(take_low, low, high) * np.sign(values)).astype(np.float32)


def _blocks(shape: tuple[int, ...], rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    for top in range(0, shape[0], rows):
        for left in range(0, shape[1], columns):
            yield slice(top, top + rows), slice(left, left + columns)


def by_blocks(values: Values, rows: int, columns: int, scaling: Scaling) -> Values:
    """Quantize each block of a matrix on its own; the last ones may be smaller."""
    out = np.empty_like(values)
    for block in _blocks(values.shape, rows, columns):
        out[block] = scaling(values[block])
    return out


def fp8(grid: Values, *, power_of_two: bool) -> Scaling:
    """A scale that maps the largest magnitude to the format's largest value."""

    def scaling(block: Values) -> Values:
        amax = np.abs(block).max()
        scale = np.float32(1.0) if amax == 0 else np.float32(grid[-1]) / np.float32(amax)
        if power_of_two:
            # The largest power of two that is not above the quotient.
            scale = np.float32(2.0 ** (math.frexp(float(scale))[1] - 1))
        return nearest(block * scale, grid) * (np.float32(1.0) / scale)

    return scaling


def mx(grid: Values) -> Scaling:
    """The smallest power of two whose quotient fits the format."""

    def scaling(block: Values) -> Values:
        ratio = np.abs(block).max() * np.float32(1.0 / float(grid[-1]))
        exponent = -127 if ratio == 0 else max(-127, math.ceil(math.log2(float(ratio))))
        return nearest(block * np.float32(2.0**-exponent), grid) * np.float32(2.0**exponent)

    return scaling


def nvfp4(values: Values, rows: int, columns: int) -> Values:
    """e2m1 values under e4m3 scales of blocks under one fp32 scale of the tensor."""
    amax = np.abs(values).max()
    encode = np.float32(1.0) if amax == 0 else np.float32(6.0 * 448.0) / np.float32(amax)

    def scaling(block: Values) -> Values:
        stored = nearest(np.abs(block).max()[None] / np.float32(6.0) * encode, E4M3)[0]
        if stored == 0:
            return np.zeros_like(block)
        return nearest(block * (encode / stored), E2M1) * (stored / encode)

    return by_blocks(values, rows, columns, scaling)
