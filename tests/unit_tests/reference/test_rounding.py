# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Values of the cached weights against plain numpy, bit for bit, for every recipe."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit_tests.reference import formats
from tests.unit_tests.reference.engine import (
    FEATURES,
    TOKENS,
    Layer,
    quantized,
    random,
    recipe_of,
    te,
    torch,
)


def awkward_weight() -> torch.Tensor:
    """[128, 128], bf16: wide range, ties, subnormals of the formats, zeros, a block of zeros."""
    weight = random(FEATURES, FEATURES, seed=8).float().cpu()
    weight *= torch.logspace(-6, 2, FEATURES)[:, None]
    weight[:, :4] = torch.tensor([0.0, -0.0, 1.0625, -17.0])
    weight[32:64, 32:64] = 0.0
    return weight.bfloat16()


EXPECTED = {
    "tensorwise": lambda w: formats.fp8(formats.E4M3, power_of_two=False)(w),
    "blockwise": lambda w: formats.by_blocks(
        w, 128, 128, formats.fp8(formats.E4M3, power_of_two=True)
    ),
    # In the first region every scale is one.
    "delayed": lambda w: formats.nearest(w, formats.E4M3),
    "mxfp8": lambda w: formats.by_blocks(w, 1, 32, formats.mx(formats.E4M3)),
    "nvfp4": lambda w: formats.nvfp4(w, 16, 16),
}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_cached_weight_exact(name: str) -> None:
    layer = Layer()
    weight = awkward_weight()
    with torch.no_grad():
        layer.module.weight.copy_(weight)
    with quantized(name):
        layer(random(TOKENS, FEATURES).requires_grad_(), True)
    found = layer.workspaces["weight"].dequantize().cpu()
    expected = torch.from_numpy(EXPECTED[name](weight.float().numpy())).bfloat16()
    assert torch.equal(found, expected)
    assert not torch.equal(found, weight)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_a_quantized_parameter_exact(name: str) -> None:
    with te.quantized_model_init(enabled=True, recipe=recipe_of(name)):
        layer = Layer()
    weight = awkward_weight()
    with torch.no_grad():
        layer.module.weight.copy_(weight)
    expected = torch.from_numpy(EXPECTED[name](weight.float().numpy())).bfloat16()
    assert torch.equal(layer.module.weight.dequantize().cpu(), expected)


def test_a_product_is_that_of_rounded_operands() -> None:
    """Blockwise: 1 x 128 runs of the input, 128 x 128 tiles of the weight."""
    layer, inp = Layer(), random(TOKENS, FEATURES) * 3
    with quantized("blockwise"):
        out = layer(inp, None)
    scaling = formats.fp8(formats.E4M3, power_of_two=True)
    rows = formats.by_blocks(inp.float().cpu().numpy(), 1, 128, scaling)
    weight = layer.module.weight.detach().float().cpu().numpy()
    product = rows @ formats.by_blocks(weight, 128, 128, scaling).T
    torch.testing.assert_close(
        out.float().cpu(), torch.from_numpy(product).bfloat16().float(), rtol=1e-2, atol=1e-2
    )
    unrounded = inp.float().cpu().numpy() @ weight.T
    assert np.abs(product - unrounded).max() > 0.05
