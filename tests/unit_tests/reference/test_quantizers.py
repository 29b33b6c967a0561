# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The reference engine's own quantizers: each direction, and segments of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch  # First: it loads libraries that Transformer Engine links to.

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

from tests.unit_tests.reference import formats
from tests.unit_tests.reference.formats import E4M3, E5M2, Values, by_blocks, fp8, mx, nvfp4

POWER = fp8(E4M3, power_of_two=True)
TENSOR = fp8(E4M3, power_of_two=False)
Quantize = Callable[[Values], Values]

#: A quantizer, and what each direction is to give.
CASES: dict[str, tuple[Callable[[], Any], Quantize, Quantize]] = {
    "blockwise runs": (
        lambda: Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1),
        lambda x: by_blocks(x, 1, 128, POWER),
        lambda x: by_blocks(x, 128, 1, POWER),
    ),
    "blockwise tiles": (
        lambda: Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=2),
        lambda x: by_blocks(x, 128, 128, POWER),
        lambda x: by_blocks(x, 128, 128, POWER),
    ),
    "blockwise fp32 scales": (
        lambda: Float8BlockQuantizer(
            torch.float8_e4m3fn, block_scaling_dim=1, force_pow_2_scales=False
        ),
        lambda x: by_blocks(x, 1, 128, TENSOR),
        lambda x: by_blocks(x, 128, 1, TENSOR),
    ),
    "tensorwise e5m2": (
        lambda: Float8CurrentScalingQuantizer(torch.float8_e5m2),
        fp8(E5M2, power_of_two=False),
        fp8(E5M2, power_of_two=False),
    ),
    "mxfp8": (
        lambda: MXFP8Quantizer(torch.float8_e4m3fn),
        lambda x: by_blocks(x, 1, 32, mx(E4M3)),
        lambda x: by_blocks(x, 32, 1, mx(E4M3)),
    ),
    "nvfp4": (
        NVFP4Quantizer,
        lambda x: nvfp4(x, 1, 16),
        lambda x: nvfp4(x, 16, 1),
    ),
    "nvfp4 tiles": (
        lambda: NVFP4Quantizer(with_2d_quantization=True),
        lambda x: nvfp4(x, 16, 16),
        lambda x: nvfp4(x, 16, 16),
    ),
}


def values(rows: int, columns: int, seed: int = 0) -> Values:
    generator = np.random.default_rng(seed)
    spread = 10.0 ** generator.uniform(-5, 3, size=(rows, 1))
    drawn: Values = (generator.normal(size=(rows, columns)) * spread).astype(np.float32)
    drawn[0] = 0.0
    return drawn


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("shape", [(160, 192), (32, 64), (256, 256)], ids=str)
def test_both_directions_exact(case: str, shape: tuple[int, int]) -> None:
    make, rowwise, columnwise = CASES[case]
    drawn = values(*shape)
    quantized = make().quantize(torch.from_numpy(drawn))
    for found, expected in (
        (quantized._rowwise, rowwise(drawn)),
        (quantized._columnwise, columnwise(drawn)),
    ):
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=0)
        assert not np.array_equal(expected, drawn)


@pytest.mark.parametrize("case", list(CASES))
def test_segments_are_rounded_as_if_alone(case: str) -> None:
    lengths = [32, 0, 160, 64]
    drawn = torch.from_numpy(values(sum(lengths), 128))
    quantizers = [CASES[case][0]() for _ in lengths]
    together = quantizers[0].round(drawn, quantizers, lengths)
    for found, name in zip(together, ("_rowwise", "_columnwise"), strict=True):
        assert found is not None
        for part, alone in zip(found.split(lengths), drawn.split(lengths), strict=True):
            if len(alone):
                expected = getattr(CASES[case][0]().quantize(alone.contiguous()), name)
                assert torch.equal(part, expected)


@pytest.mark.parametrize("case", ["mxfp8", "nvfp4"])
def test_shapes_that_the_format_cannot_hold_are_refused(case: str) -> None:
    with pytest.raises(ValueError, match="divisible by"):
        CASES[case][0]().quantize(torch.ones(32, 40))


@pytest.mark.parametrize(
    ("dtype", "grid"), [(torch.float8_e4m3fn, E4M3), (torch.float8_e5m2, E5M2)]
)
def test_the_plain_grid_is_torchs(dtype: torch.dtype, grid: Values) -> None:
    """The two independent sources of the formats agree, over every bf16 value in range."""
    codes = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = codes[torch.isfinite(codes) & (codes <= float(grid[-1]))]
    expected = codes.to(dtype).float()
    assert torch.equal(torch.from_numpy(formats.nearest(codes.numpy(), grid)), expected)


def test_usages_decide_which_directions_are_made() -> None:
    quantizer = MXFP8Quantizer(torch.float8_e4m3fn)
    quantizer.set_usage(columnwise=False)
    made = quantizer.quantize(torch.ones(32, 32))
    assert made.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(RuntimeError, match="column-wise"):
        made.update_usage(columnwise_usage=True)
    tiles = Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=2)
    tiles.set_usage(columnwise=False)
    made = tiles.quantize(torch.ones(32, 32))
    made.update_usage(columnwise_usage=True)
    assert made.get_usages() == {"rowwise": True, "columnwise": True}
