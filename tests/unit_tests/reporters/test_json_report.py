# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The rehearsal's JSON: its keys, and numbers that JSON does not have."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from megatron.quant_state.reporters.json_report import REHEARSAL_SCHEMA, render_rehearsal
from megatron.quant_state.twin import Change
from tests.unit_tests.reporters.rehearsals import LOST, rehearsal, run


def no_constant(text: str) -> Any:
    raise AssertionError(f"{text} is not JSON")


def parse(text: str) -> Any:
    assert text.endswith("}\n")
    return json.loads(text, parse_constant=no_constant)


def test_the_whole_document() -> None:
    release = run(("a.weight", 1, 0.5), ("b.weight", 2, 0.25), stale_reads=4)
    assert parse(render_rehearsal(rehearsal(release))) == {
        "schema": "quant-state/rehearsal/1",
        "model": "some-model",
        "steps": 2,
        "num_microbatches": 2,
        "versions": {"torch": "2.11.0", "megatron-core": "0.19.2"},
        "twin": [
            {"field": "hidden_size", "full": 7168, "twin": 64, "reason": "width decides nothing"}
        ],
        "truth_is_checked": True,
        "runs": {
            "release": {
                "parameters": 1692,
                "wrong": [
                    {"name": "a.weight", "step": 1, "relative_error": 0.5},
                    {"name": "b.weight", "step": 2, "relative_error": 0.25},
                ],
                "weight_quantizations": 40,
                "weight_quantizations_least": 40,
                "stale_reads": 4,
                "losses": [4.5, 4.25],
                "seconds_per_step": 1.5,
                "replays_in_another_precision": [],
            },
            "quant_state": {
                "parameters": 1692,
                "wrong": [],
                "weight_quantizations": 40,
                "weight_quantizations_least": 40,
                "stale_reads": 0,
                "losses": [4.5, 4.25],
                "seconds_per_step": 1.5,
                "replays_in_another_precision": [],
            },
        },
        "verdict": "exact",
    }
    assert REHEARSAL_SCHEMA == "quant-state/rehearsal/1"


def test_every_wrong_gradient_is_there_unfolded_in_its_order() -> None:
    found = parse(render_rehearsal(rehearsal(run(*LOST))))["runs"]["release"]["wrong"]
    assert [(item["name"], item["step"], item["relative_error"]) for item in found] == list(LOST)


@pytest.mark.parametrize(
    ("value", "text"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")]
)
def test_numbers_that_are_not_finite_are_text(value: float, text: str) -> None:
    quant_state = run(("a", 1, value), losses=(value, 1.0), seconds_per_step=value)
    changes = (Change("init_method_std", value, (1, value), "why"),)
    found = parse(render_rehearsal(rehearsal(quant_state=quant_state, changes=changes)))
    assert found["verdict"] == "wrong"
    values = found["runs"]["quant_state"]
    assert values["wrong"] == [{"name": "a", "step": 1, "relative_error": text}]
    assert values["losses"] == [text, 1.0]
    assert values["seconds_per_step"] == text
    assert (found["twin"][0]["full"], found["twin"][0]["twin"]) == (text, [1, text])


@pytest.mark.parametrize(
    ("checked", "wrong", "verdict"),
    [
        (True, (), "exact"),
        (None, (), "exact"),
        (False, (), "wrong"),
        (True, (("a", 1, 0.0),), "wrong"),
        (None, (("a", 1, 0.0),), "wrong"),
    ],
)
def test_verdict(checked: bool | None, wrong: Any, verdict: str) -> None:
    found = parse(render_rehearsal(rehearsal(run(*LOST), run(*wrong), truth_is_checked=checked)))
    assert (found["truth_is_checked"], found["verdict"]) == (checked, verdict)


def test_the_same_bytes_twice() -> None:
    assert render_rehearsal(rehearsal(run(*LOST))) == render_rehearsal(rehearsal(run(*LOST)))
