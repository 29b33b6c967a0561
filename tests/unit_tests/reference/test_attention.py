# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Attention on the reference engine: its values, and when a recipe makes it an FP8 call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch  # First: it loads libraries that Transformer Engine links to.

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from transformer_engine import reference

from tests.unit_tests.reference.engine import random, recipe_of, recipes, te

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 16, 2, 4, 2, 16


@pytest.fixture(autouse=True)
def _recording() -> Iterator[None]:
    reference.record_calls(True)
    yield
    reference.record_calls(False)


def inputs() -> list[torch.Tensor]:
    return [
        random(LENGTH, BATCH, heads, WIDTH, seed=seed, dtype=torch.float32).requires_grad_()
        for seed, heads in enumerate((HEADS, GROUPS, GROUPS))
    ]


def attention() -> Any:
    return te.DotProductAttention(HEADS, WIDTH, num_gqa_groups=GROUPS, attn_mask_type="causal")


def test_it_is_torchs_attention() -> None:
    query, key, value = inputs()
    out = attention()(query, key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(part.permute(1, 2, 0, 3) for part in (query, key, value)), is_causal=True, enable_gqa=True
    )
    expected = expected.permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(out, expected)
    assert reference.calls == []


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        (lambda: recipes.DelayedScaling(fp8_dpa=True), "delayed"),
        (lambda: recipes.DelayedScaling(fp8_dpa=True, fp8_mha=True), "delayed"),
        (lambda: recipes.Float8CurrentScaling(fp8_dpa=True), "tensorwise"),
        (lambda: recipes.DelayedScaling(), None),
        (lambda: recipes.Float8CurrentScaling(), None),
        (lambda: recipes.Float8BlockScaling(), None),
    ],
)
def test_the_recipe_decides_its_precision(recipe: Any, precision: str | None) -> None:
    module = attention()
    plain = module(*inputs())
    with te.autocast(enabled=True, recipe=recipe()):
        out = module(*inputs())
    assert [call.precision for call in reference.calls] == ([precision] if precision else [])
    assert torch.equal(out, plain) is (precision is None)
    torch.testing.assert_close(out, plain, rtol=0.3, atol=0.3)


def test_outside_autocast_it_is_unquantized() -> None:
    module = attention()
    plain = module(*inputs())
    with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling(fp8_dpa=True)):
        module(*inputs())
    reference.record_calls(True)
    assert torch.equal(module(*inputs()), plain)
    assert reference.calls == []


@pytest.mark.parametrize(
    ("asks", "precisions"), [(True, ["tensorwise", "bf16"]), (False, [])], ids=["asks", "does not"]
)
def test_a_replay_outside_autocast_is_recorded_as_unquantized(
    asks: bool, precisions: list[str]
) -> None:
    module = attention()
    recipe = recipes.Float8CurrentScaling(fp8_dpa=asks)
    with te.autocast(enabled=True, recipe=recipe):
        out = torch.utils.checkpoint.checkpoint(module, *inputs(), use_reentrant=True)
    out.sum().backward()
    assert [call.precision for call in reference.calls] == precisions
    assert [call.in_backward for call in reference.calls] == [False, True][: len(precisions)]


def test_its_gradient_is_rounded_too() -> None:
    gradients = []
    for recipe in (None, recipes.Float8CurrentScaling(fp8_dpa=True)):
        parts = inputs()
        with te.autocast(enabled=recipe is not None, recipe=recipe or recipe_of("tensorwise")):
            attention()(*parts).pow(2).sum().backward()
        gradients.append(parts[2].grad)
    assert not torch.equal(*gradients)
    torch.testing.assert_close(*gradients, rtol=0.5, atol=1.0)


def test_blockwise_refuses_fp8_attention() -> None:
    with pytest.raises(Exception, match="attention is not supported for Float8BlockScaling"):
        recipes.Float8BlockScaling(fp8_dpa=True)
