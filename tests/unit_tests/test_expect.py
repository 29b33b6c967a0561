# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Expectation files, fingerprints and the comparison of two plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from megatron.quant_state import commands
from megatron.quant_state.errors import InputError
from megatron.quant_state.expect import (
    check_expectations,
    check_same,
    decisions,
    fingerprint,
    read_expectations,
    read_plan,
)
from megatron.quant_state.findings import Finding
from megatron.quant_state.reporters import plan_json
from tests.unit_tests.planning import BF16_CONFIG, DENSE, Planner

QKV_BF16 = BF16_CONFIG + (
    'matchers:\n  qkv: {enabled: true, type: glob, pattern: "*.linear_qkv", config: bf16}\n'
)
PP2 = "pipeline_model_parallel_size=2"
Breaches = Callable[..., list[Finding]]


@pytest.fixture
def breaches(planner: Planner, tmp_path: Path) -> Breaches:
    def check(text: str, *overrides: str, recipe: str = QKV_BF16) -> list[Finding]:
        path = tmp_path / "expect.yaml"
        path.write_text(text)
        return check_expectations(
            planner(*overrides, recipe=recipe)[0], read_expectations(str(path))
        )

    return check


@pytest.mark.parametrize(
    "text",
    [
        '"*.linear_qkv": bf16\n',
        '"*.linear_qkv": bf16\n"*": tensorwise\n',
        '"*.linear_qkv": bf16\n"*": fp8\nonly: true\n',
        '"*": [fp8, bf16]\n',
        '"decoder.layers.3.self_attention.linear_qkv": bf16\n',
    ],
)
def test_what_holds(breaches: Breaches, text: str) -> None:
    assert breaches(text) == []
    assert breaches(text, PP2) == []


def test_a_breach_names_pattern_line_and_modules(breaches: Breaches) -> None:
    found = breaches('"*.linear_fc1": bf16\n"*": fp8\n')
    assert [(item.code, item.location and item.location.line) for item in found] == [
        ("QS301", 1),
        ("QS301", 2),
    ]
    first, second = found
    assert "4 of 4 modules run in tensorwise" in first.message
    assert first.modules == tuple(f"decoder.layers.{i}.mlp.linear_fc1" for i in range(4))
    assert "4 of 12 modules run in bf16" in second.message


def test_layer_numbers_are_the_models(breaches: Breaches) -> None:
    text = '"decoder.layers.3.*": bf16\n'
    modules = breaches(text, PP2)[0].modules
    assert {name.split(".")[2] for name in modules} == {"3"}


def test_evaluation_must_hold_too(breaches: Breaches) -> None:
    recipe = QKV_BF16.replace(
        "training_recipe: {}",
        "training_recipe: {}, evaluation_recipe: {fp8_quantization_recipe: blockwise}",
    )
    found = breaches('"*.linear_qkv": bf16\n', recipe=recipe)
    assert [item.code for item in found] == ["QS301"]
    assert "in evaluation" in found[0].message
    assert "blockwise" in found[0].message


def test_a_pattern_that_matches_nothing_is_a_breach(breaches: Breaches) -> None:
    assert [item.code for item in breaches('"*.in_proj": bf16\n')] == ["QS302"]


def test_a_pattern_that_is_never_asked_is_a_breach(breaches: Breaches) -> None:
    # Wrong for linear_fc1, which would be told if it came first.
    found = breaches('"*.linear_fc?": fp8\n"*.linear_fc1": bf16\n')
    assert [(item.code, item.location.line) for item in found if item.location] == [("QS302", 2)]
    assert "never asked, because earlier patterns" in found[0].message
    # One module is enough to be asked about.
    assert breaches('"*.linear_fc1": fp8\n"*.linear_fc?": fp8\n') == []


def test_only(breaches: Breaches) -> None:
    found = breaches('"*.linear_fc?": fp8\nonly: true\n')
    assert [item.code for item in found] == ["QS303"]
    assert {name.rsplit(".", 1)[1] for name in found[0].modules} == {"linear_proj"}
    assert breaches('"*.linear_fc?": fp8\n') == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping"),
        ("- a\n", "expected a mapping"),
        ('"*": bf17\n', "did you mean 'bf16'"),
        ('"*": [bf16, 8]\n', "no precision '8'"),
        ('"*": []\n', "an empty list"),
        ("only: yes please\n", "true or false"),
        ("1: bf16\n", "put it in quotes"),
        ('"*": bf16\n"*": fp8\n', "duplicate key"),
        ("a: [\n", "malformed YAML"),
    ],
)
def test_faulty_expectations_are_bad_input(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "expect.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"expect\.yaml") as caught:
        read_expectations(str(path))
    assert message in str(caught.value)


def test_the_fingerprint_is_that_of_the_decisions(planner: Planner) -> None:
    plain = fingerprint(planner()[0])
    assert plain == fingerprint(planner(PP2)[0])
    assert plain == fingerprint(planner("hidden_size=2560", "num_attention_heads=80")[0])
    others = [
        fingerprint(planner(recipe=QKV_BF16)[0]),
        fingerprint(planner("fp8_recipe=blockwise")[0]),
        fingerprint(planner("num_layers=5")[0]),
        fingerprint(planner("disable_parameter_transpose_cache=true")[0]),
    ]
    assert len({plain, *others}) == 5
    renamed = QKV_BF16.replace("qkv:", "other_name:")
    assert fingerprint(planner(recipe=renamed)[0]) == others[0]


def test_a_lost_recipe_is_named(planner: Planner, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_json.render_plan(planner(recipe=QKV_BF16)[0], ()))
    before = read_plan(str(path))
    assert before == decisions(planner(recipe=QKV_BF16)[0])
    assert check_same(planner(recipe=QKV_BF16)[0], str(path), before) == []
    found = check_same(planner()[0], str(path), before)
    assert [item.code for item in found] == ["QS311", "QS311"]
    messages = [item.message for item in found]
    assert messages == [
        "4 modules: evaluation was bf16 and is tensorwise",
        "4 modules: training was bf16 and is tensorwise",
    ]
    assert all(name.endswith("linear_qkv") for name in found[0].modules)


def test_other_modules_are_named(planner: Planner, tmp_path: Path) -> None:
    found = check_same(planner("num_layers=5")[0], "plan.json", decisions(planner()[0]))
    assert [item.code for item in found] == ["QS312"]
    assert all(name.startswith("decoder.layers.4.") for name in found[0].modules)
    found = check_same(planner()[0], "plan.json", decisions(planner("num_layers=5")[0]))
    assert "only the other plan has" in found[0].message


def test_the_command(planner: Planner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, recipe = planner.file(DENSE, "m.yaml"), planner.file(QKV_BF16, "r.yaml")
    saved, expected = tmp_path / "plan.json", tmp_path / "expect.yaml"
    expected.write_text('"*.linear_qkv": bf16\n"*": fp8\n')
    write = ["plan", model, "--recipe", recipe, "--format", "json", "--out", str(saved)]
    assert commands.main(write) == 0
    assert len(json.loads(saved.read_text())["fingerprint"]) == 64
    both = ["--expect", str(expected), "--same-as", str(saved)]
    assert commands.main(["plan", model, "--recipe", recipe, *both]) == 0
    capsys.readouterr()
    assert commands.main(["plan", model, *both]) == 1
    out = capsys.readouterr().out
    assert f"{expected}:1:1: error QS301" in out
    assert f"{saved}: error QS311" in out


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "[" * 100_000, '{"schema": "quant-state/plan/1", "modules": [1]}']
)
def test_what_is_no_plan_is_bad_input(
    planner: Planner, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    model = planner.file(DENSE, "m.yaml")
    assert commands.main(["plan", model, "--same-as", str(path)]) == 2
    assert f"error: {path}: " in capsys.readouterr().err


def test_a_plan_of_one_stage_cannot_be_compared_with(planner: Planner, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_json.render_plan(planner(PP2)[0], (), stage="pp1"))
    with pytest.raises(InputError, match="without --stage"):
        read_plan(str(path))
