# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What every report says: rows of wrong gradients, the summary, the verdict's sentence."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from megatron.quant_state.reporters.rehearsal import (
    WrongRow,
    summary_rows,
    verdict_sentence,
    wrong_rows,
)
from tests.unit_tests.reporters.rehearsals import LOST, rehearsal, run


def test_rows_are_folded_and_the_worst_comes_first() -> None:
    assert wrong_rows(run(*LOST), 2) == [
        WrongRow("decoder.layers.0.mlp.linear_fc2.weight", 1, (None, 0.75)),
        WrongRow("decoder.layers.[3-60].mlp.experts.linear_fc1.weight[0-7]", 464, (0.5, 0.5)),
        WrongRow("mtp.layers.0.eh_proj.weight", 1, (0.25, 0.125)),
    ]


def test_a_row_shows_the_largest_error_of_its_parameters() -> None:
    found = run(("l.0.w", 1, 0.25), ("l.1.w", 1, 0.5), ("l.2.w", 3, 0.125))
    assert wrong_rows(found, 3) == [WrongRow("l.[0-2].w", 3, (0.5, None, 0.125))]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_nan_is_worse_than_infinity_in_any_order(order: tuple[int, ...]) -> None:
    items = [("a", 1, 0.0), ("b", 1, math.inf), ("c", 1, math.nan), ("d", 1, 2.0)]
    rows = wrong_rows(run(*(items[index] for index in order)), 1)
    assert [row.name for row in rows] == ["c", "b", "d", "a"]


@pytest.mark.parametrize("errors", list(permutations([0.5, math.nan, math.inf])))
def test_nan_is_what_a_folded_row_shows(errors: tuple[float, ...]) -> None:
    items = [(f"l.{index}.w", 1, error) for index, error in enumerate(errors)]
    (row,) = wrong_rows(run(*items), 1)
    assert row.errors[0] is not None
    assert math.isnan(row.errors[0])


def test_an_error_of_zero_is_shown_as_an_error() -> None:
    assert wrong_rows(run(("a", 2, 0.0)), 2) == [WrongRow("a", 1, (None, 0.0))]


def test_summary() -> None:
    release = run(*LOST, weight_quantizations=20, stale_reads=7, losses=(1 / 3, 0.25))
    assert summary_rows(rehearsal(release)) == [
        ("wrong main_grads, step 1", "465 of 1692", "0 of 1692"),
        ("wrong main_grads, step 2", "466 of 1692", "0 of 1692"),
        ("weight quantizations (least)", "20 (40)", "40 (40)"),
        ("stale reads", "7", "0"),
        ("modules replayed in another precision", "0", "0"),
        ("loss", "0.333333 0.250000", "4.500000 4.250000"),
        ("seconds a step", "1.50", "1.50"),
    ]


def test_verdict_sentence() -> None:
    exact = "exact: all 1692 main_grads of all 2 steps equal the truth bit for bit with quant_state"
    assert verdict_sentence(rehearsal()) == f"{exact} installed; so does the release"
    lost = verdict_sentence(rehearsal(run(*LOST)))
    assert lost == f"{exact} installed; the release gets 466 wrong"
    wrong = verdict_sentence(rehearsal(run(*LOST), run(("a", 1, 0.5), ("a", 2, 0.5))))
    assert wrong == "wrong: 1 of 1692 main_grads differ with quant_state installed"
    unchecked = verdict_sentence(rehearsal(truth_is_checked=False))
    assert unchecked.startswith("wrong: the truth itself differs from a run without any weight")
