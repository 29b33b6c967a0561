# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Names that differ only in layer and expert numbers become one."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.quant_state.reporters.folding import fold_names
from tests.unit_tests.reporters.rehearsals import EXPERTS


def counts(names: list[str]) -> list[tuple[str, int]]:
    return [(folded, len(members)) for folded, members in fold_names(names)]


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], []),
        (["decoder.final_layernorm.weight"], [("decoder.final_layernorm.weight", 1)]),
        (
            [f"decoder.layers.{n}.mlp.experts.linear_fc1" for n in range(3, 61)],
            [("decoder.layers.[3-60].mlp.experts.linear_fc1", 58)],
        ),
        (EXPERTS, [("decoder.layers.[3-60].mlp.experts.linear_fc1.weight[0-7]", 58 * 8)]),
        # Gaps, single numbers and two in a row.
        ([f"l.{n}.w" for n in (0, 2, 3, 7)], [("l.[0,2-3,7].w", 4)]),
        # Order is that of numbers, not of text, whatever order they come in.
        ([f"l.{n}.w" for n in (10, 9, 2, 1)], [("l.[1-2,9-10].w", 4)]),
        # The digits of a module's name count nothing.
        (["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"], 2),
        # An unquantized copy of a name with numbers is another name.
        (["l.0.weight", "l.1.weight", "l.0.bias"], [("l.[0-1].weight", 2), ("l.0.bias", 1)]),
        (["e.weight0", "e.weight1", "e.bias0"], [("e.weight[0-1]", 2), ("e.bias0", 1)]),
        # Layers 0 and 1 hold both experts, layer 2 one: no bracket may say what is not there.
        (
            ["l.0.weight0", "l.0.weight1", "l.1.weight0", "l.1.weight1", "l.2.weight1"],
            [("l.[0-1].weight[0-1]", 4), ("l.2.weight1", 1)],
        ),
    ],
)
def test_folded(names: list[str], folded: list[tuple[str, int]] | int) -> None:
    if isinstance(folded, int):
        assert counts(names) == [(name, 1) for name in names]
    else:
        assert counts(names) == folded


def expand(folded: str) -> set[str]:
    """What a reader takes a folded name for."""
    parts = re.split(r"\[([\d,-]+)\]", folded)
    choices: list[list[str]] = []
    for index, part in enumerate(parts):
        if index % 2 == 0:
            choices.append([part])
            continue
        numbers: list[str] = []
        for block in part.split(","):
            first, _, last = block.partition("-")
            numbers += map(str, range(int(first), int(last or first) + 1))
        choices.append(numbers)
    return {"".join(choice) for choice in itertools.product(*choices)}


NAMES = st.builds(
    lambda stack, layer, block, expert: f"{stack}.layers.{layer}.{block}.7.fc1.weight{expert}",
    st.sampled_from(["decoder", "mtp"]),
    st.integers(0, 12),
    st.integers(0, 2),
    st.integers(0, 3),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(NAMES, unique=True, max_size=40))
def test_folded_names_stand_for_exactly_their_names(names: list[str]) -> None:
    rows = fold_names(names)
    for folded, members in rows:
        assert expand(folded) == set(members)
        assert len(members) == len(set(members))
    assert sorted(name for _, members in rows for name in members) == sorted(names)
    assert len({folded for folded, _ in rows}) == len(rows)


@given(st.lists(NAMES, unique=True, min_size=1, max_size=20))
def test_the_order_of_names_changes_no_row(names: list[str]) -> None:
    rows = {folded: set(members) for folded, members in fold_names(names)}
    assert {folded: set(members) for folded, members in fold_names(sorted(names))} == rows
