# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``quant-state plan`` and ``lint`` as programs: exit codes, streams, the same output twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from megatron.quant_state import commands
from megatron.quant_state import plan as plan_module
from megatron.quant_state.workers import run_workers
from tests.unit_tests.planning import BF16_CONFIG, DENSE, Planner

CASES = Path(__file__).parent.parent / "cases"
DEAD = BF16_CONFIG + (
    'matchers:\n  gone: {enabled: true, type: glob, pattern: "*.in_proj", config: bf16}\n'
)


@pytest.fixture
def dense(planner: Planner) -> str:
    return planner.file(DENSE, "model.yaml")


def test_a_clean_plan_exits_0(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["plan", dense]) == 0
    streams = capsys.readouterr()
    row = next(line for line in streams.out.splitlines() if "linear_qkv" in line)
    assert row.split() == [
        *("decoder.layers.[0-3].self_attention.linear_qkv", "4", "TELayerNormColumnParallelLinear"),
        *("none", "bf16", "tensorwise", "tensorwise", "1", "T", "/", "F", "788.5", "K"),
    ]
    assert streams.out.endswith("\nno findings\n")
    assert streams.err.startswith("plan: starting\n")
    assert "twin: step 2 done" in streams.err


def test_a_dead_pattern_exits_1(
    dense: str, planner: Planner, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planner.file(DEAD, "dead.yaml")
    assert commands.main(["plan", dense, "--recipe", path]) == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith(path))
    column = DEAD.splitlines()[3].index("pattern") + 1
    assert line.startswith(f"{path}:4:{column}: error QS201: rule 'gone'")


def test_warnings_alone_exit_0(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["plan", dense, "--set", "num_layers_at_end_in_bf16=1"]) == 0
    assert "warning QS255" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["table", "json"])
def test_malformed_yaml_is_a_finding(
    dense: str, planner: Planner, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    path = planner.file("configs: [\n", "malformed.yaml")
    assert commands.main(["plan", dense, "--recipe", path, "--format", output]) == 1
    assert "QS101" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--recipe", "gone.yaml"],
        ["--set", "num_layer=3"],
        ["--set", "pipeline_model_parallel_size=3"],
        ["--frmat", "json"],
        ["--stage", "1"],
        ["--stage", "pp=7"],
        ["--out", "/nowhere/plan.json"],
    ],
)
def test_bad_input_exits_2(
    dense: str, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert commands.main(["plan", dense, *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "error: " in streams.err


def test_one_stage(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = ["--set", "pipeline_model_parallel_size=2", "--format", "json"]
    assert commands.main(["plan", dense, *pipeline]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert commands.main(["plan", dense, *pipeline, "--stage", "pp=1"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["modules"] == [m for m in whole["modules"] if m["pp_rank"] == 1]
    assert one["totals"] == whole["totals"]


def test_rehearse_refuses_what_lint_calls_an_error(
    dense: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(CASES / "not_enabled.yaml")
    assert commands.main(["lint", path]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert commands.main(["rehearse", dense, "--recipe", path]) == 2
    assert capsys.readouterr().err.startswith(f"quant-state: error: {line}. ")


def lint_in_a_process(path: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "megatron.quant_state", "lint", str(path)]
    return subprocess.run(
        arguments, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options
    )


def test_lint_on_a_stdout_that_lacks_characters(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    text = (CASES / "not_enabled.yaml").read_text()
    path.write_text(text.replace("keep_attention_output", "größe"), encoding="utf-8")
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = lint_in_a_process(path, stdout=subprocess.PIPE, env=env)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "rule 'gr??e' never applies" in ended.stdout


def test_lint_keeps_its_exit_code_without_a_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = lint_in_a_process(CASES / "not_enabled.yaml", stdout=writing)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_lint_on_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        ended = lint_in_a_process(CASES / "not_enabled.yaml", stdout=full)
    said = "quant-state: error: stdout: cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, said)


def test_processes_of_its_own_give_the_same_plan_twice(
    dense: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["plan", dense, "--set", "pipeline_model_parallel_size=2", "--format", "json"]
    assert commands.main(arguments) == 0
    here = capsys.readouterr().out
    monkeypatch.setattr(plan_module, "run_workers", run_workers)
    printed: list[Any] = []
    for _ in range(2):
        assert commands.main(arguments) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == here
    assert commands.main(["plan", dense, "--set", "pipeline_model_parallel_size=3"]) == 2
    assert "pipeline_model_parallel_size" in capsys.readouterr().err
