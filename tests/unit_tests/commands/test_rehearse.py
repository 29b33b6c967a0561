# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``quant-state rehearse``: options, what is written where, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.quant_state import commands
from megatron.quant_state.commands import output
from megatron.quant_state.errors import InputError
from megatron.quant_state.model import ModelDescription
from megatron.quant_state.package_info import __version__
from tests.unit_tests.reporters.rehearsals import LOST, rehearsal, run

EXACT = rehearsal(run(*LOST))
WRONG = rehearsal(run(*LOST), run(("a.weight", 1, 0.5)))
ROOT = Path(__file__).parents[3]


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, int]]]:
    """Makes each rehearsal end with a result, or with an error; the list says what was asked."""

    def use(result: Any) -> list[tuple[Any, int]]:
        asked: list[tuple[Any, int]] = []

        def fake(description: ModelDescription, steps: int, progress: Any, *, engine: str) -> Any:
            assert engine == "reference"
            asked.append((description, steps))
            for name in ("truth", "quant_state"):
                for step in range(steps + 1):
                    progress(name, step)
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setattr("megatron.quant_state.rehearse.rehearse", fake)
        return asked

    return use


@pytest.fixture
def never(rehearsed: Callable[[Any], Any]) -> None:
    """No model may be trained: the input has to be refused before."""
    rehearsed(AssertionError("trained"))


def one_message(capsys: pytest.CaptureFixture[str]) -> str:
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("quant-state: error: ")
    assert streams.err.count("\n") == 1
    return streams.err.removeprefix("quant-state: error: ").rstrip("\n")


# --- options ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: MODEL"),
        (["qwen3-30b-a3b", "more"], "unrecognized arguments: more"),
        (["qwen3-30b-a3b", "--stesp", "3"], "unrecognized arguments: --stesp 3"),
        (
            ["qwen3-30b-a3b", "--steps", "0"],
            "--steps: expected a whole number of at least 1, found '0'",
        ),
        (["qwen3-30b-a3b", "--steps", "-1"], "expected a whole number of at least 1, found '-1'"),
        (["qwen3-30b-a3b", "--steps", "2.5"], "expected a whole number of at least 1, found '2.5'"),
        (["qwen3-30b-a3b", "--steps", "many"], "of at least 1, found 'many'"),
        (["qwen3-30b-a3b", "--microbatches", "0"], "--microbatches: expected a whole number of"),
        (["qwen3-30b-a3b", "--format", "xml"], "--format: invalid choice: 'xml'"),
        (["qwen3-30b-a3b", "--set"], "--set: expected one argument"),
        (["qwen3-30b-a3b", "--out"], "--out: expected one argument"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert commands.main(["rehearse", *options]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("usage: quant-state")
    assert message in streams.err


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["deepsek-v3"], "no model 'deepsek-v3': did you mean 'deepseek-v3'? Expected a YAML file"),
        (["gone.yaml"], "gone.yaml: no such file; check the path"),
        (["qwen3-30b-a3b", "--set", "num_layers"], "--set num_layers: expected FIELD=VALUE"),
        (["qwen3-30b-a3b", "--set", "=3"], "--set =3: expected FIELD=VALUE"),
        (["qwen3-30b-a3b", "--set", "fp8="], "--set fp8=: no value for fp8; write fp8=null"),
        (["qwen3-30b-a3b", "--set", "a.b=3"], "--set a.b=3: unknown field 'a.b'"),
        (
            ["qwen3-30b-a3b", "--set", "recompute_modules=[a"],
            "--set recompute_modules=[a: malformed YAML",
        ),
        (
            ["qwen3-30b-a3b", "--recipe", "gone.yaml"],
            "--recipe gone.yaml: no such file 'gone.yaml'; check the path",
        ),
        (["qwen3-30b-a3b", "--recipe", "."], "--recipe .: expected a file, found a directory '.'"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert commands.main(["rehearse", *options]) == 2
    assert one_message(capsys).startswith(message)


def test_options_reach_the_rehearsal(
    rehearsed: Callable[[Any], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "configs:\n  bf16: {transformer_engine_config_type: TEQuantizationParams, "
        "training_recipe: {}}\nmatchers:\n"
        "  all: {enabled: true, type: glob, pattern: '*', config: bf16}\n"
    )
    asked = rehearsed(EXACT)
    options = ["--set", "num_layers=4", "--set", "num_layers=5", "--recipe", str(recipe)]
    options += ["--steps", "7", "--microbatches", "6"]
    assert commands.main(["rehearse", "qwen3-30b-a3b", *options]) == 0
    ((description, steps),) = asked
    assert steps == 7
    assert description.name == "qwen3-30b-a3b"
    assert description.num_microbatches == 6
    assert description.recipe == str(recipe)
    assert description.transformer_config["num_layers"] == 5
    assert commands.main(["rehearse", "qwen3-30b-a3b"]) == 0
    description, steps = asked[-1]
    assert (steps, description.num_microbatches, description.recipe) == (3, 2, None)
    assert description.transformer_config["num_layers"] == 48
    assert "exact: all 1692 main_grads" in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["--help"]) == 0
    assert "rehearse" in capsys.readouterr().out
    assert commands.main(["rehearse", "--help"]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    for option in ("--recipe FILE", "--set FIELD=VALUE", "--steps N", "--microbatches N", "--out"):
        assert option in words
    assert "--format {table,json,html}" in words
    assert "a YAML file, or one of deepseek-v3, deepseek-v3-mtp2, qwen3-30b-a3b" in words
    assert "optimizer steps (default 3)" in words
    assert "exit code: 0 with quant_state the gradients are exact" in words
    assert "1 otherwise; 2 bad input, or no answer" in words
    assert "quant-state rehearse deepseek-v3-mtp2\n" in text


def test_version_of_the_command() -> None:
    command = [sys.executable, "-m", "megatron.quant_state", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"megatron-quant-state {__version__}\n"


# --- results ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("result", "code"), [(EXACT, 0), (WRONG, 1)])
@pytest.mark.parametrize("form", ["table", "json", "html"])
@pytest.mark.parametrize("to_file", [False, True])
def test_formats_and_exit_codes(
    rehearsed: Callable[[Any], Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    result: Any,
    code: int,
    form: str,
    to_file: bool,
) -> None:
    rehearsed(result)
    out = tmp_path / "result"
    out.write_text("an older and much longer result\n" * 1000)
    options = ["--format", form, *(["--out", str(out)] if to_file else [])]
    assert commands.main(["rehearse", "qwen3-30b-a3b", *options]) == code
    streams = capsys.readouterr()
    assert (streams.out == "") is to_file
    text = out.read_text(encoding="utf-8") if to_file else streams.out
    verdict = "wrong" if code else "exact"
    if form == "json":
        assert json.loads(text)["verdict"] == verdict
    elif form == "html":
        assert text.startswith("<!DOCTYPE html>")
        assert f"<title>Rehearsal of some-model: {verdict}</title>" in text
        assert text.endswith("</html>\n")
    else:
        assert text.splitlines()[-1].startswith(f"{verdict}: ")
    assert text.endswith("\n")
    assert "older" not in text


def test_progress_goes_to_stderr_a_line_for_the_start_and_the_end_of_a_run(
    rehearsed: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsed(EXACT)
    assert commands.main(["rehearse", "qwen3-30b-a3b", "--steps", "4", "--format", "json"]) == 0
    streams = capsys.readouterr()
    json.loads(streams.out)
    first, *lines = streams.err.splitlines()
    assert first == "rehearse: starting"
    assert all(re.fullmatch(r"\[ *\d+\.\d s\] [a-z_]+: .*", line) for line in lines)
    assert [line.partition("] ")[2] for line in lines] == [
        "truth: built",
        "truth: trained 4 steps",
        "quant_state: built",
        "quant_state: trained 4 steps",
    ]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_bars_that_go_away(
    rehearsed: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, out = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rehearsed(EXACT)
    assert commands.main(["rehearse", "qwen3-30b-a3b"]) == 0
    shown = terminal.getvalue()
    assert "truth" in shown
    assert "quant_state" in shown
    assert "3/3" in shown
    # Up, and erased: nothing stays above the result.
    assert shown.rstrip("\n").endswith(("\x1b[2K", "\x1b[?25h"))
    assert "\x1b[1;32mexact: " in out.getvalue()


@pytest.mark.parametrize(
    ("place", "reason"),
    [("gone/result.json", "No such file or directory"), (".", "Is a directory")],
)
@pytest.mark.usefixtures("never")
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str, reason: str
) -> None:
    out = str(tmp_path / place)
    assert commands.main(["rehearse", "qwen3-30b-a3b", "--out", out]) == 2
    assert one_message(capsys) == f"{out}: cannot be written: {reason}"


@pytest.mark.usefixtures("never")
def test_an_output_in_a_folder_without_write_permission(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    # Root may write anywhere, so the system's answer is made up.
    monkeypatch.setattr(output, "open", refuse, raising=False)
    out = str(tmp_path / "result.json")
    assert commands.main(["rehearse", "qwen3-30b-a3b", "--out", out]) == 2
    assert one_message(capsys) == f"{out}: cannot be written: Permission denied"


@pytest.mark.usefixtures("never")
def test_an_empty_name_of_an_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["rehearse", "qwen3-30b-a3b", "--out", ""]) == 2
    assert "cannot be written: No such file or directory" in one_message(capsys)


@pytest.mark.parametrize("before", [None, "an older result"])
def test_a_refused_model_leaves_the_output_as_it_was(
    rehearsed: Callable[[Any], Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    before: str | None,
) -> None:
    out = tmp_path / "result.json"
    if before is not None:
        out.write_text(before)
    rehearsed(InputError("refused by Megatron"))
    assert commands.main(["rehearse", "qwen3-30b-a3b", "--out", str(out)]) == 2
    assert capsys.readouterr().err.endswith("quant-state: error: refused by Megatron\n")
    assert (out.read_text() if out.exists() else None) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_message(
    rehearsed: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsed(EXACT)
    assert commands.main(["rehearse", "qwen3-30b-a3b", "--out", "/dev/full"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "quant-state: error: /dev/full: cannot be written: No space left on device"


# --- readers that went away ---------------------------------------------------------------------

COMMAND = """\
import sys
from megatron.quant_state import commands, rehearse
from tests.unit_tests.commands.test_rehearse import EXACT, WRONG

def fake(description, steps, progress, *, engine):
    progress("truth", 0)
    return {result}

rehearse.rehearse = fake
sys.exit(commands.main(["rehearse", "qwen3-30b-a3b", *sys.argv[1:]]))
"""


def command(result: str, *options: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-c", COMMAND.format(result=result)]
    return subprocess.run([*code, *options], cwd=ROOT, text=True, encoding="utf-8", **popen)


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(("result", "code"), [("EXACT", 0), ("WRONG", 1)])
def test_stdout_without_a_reader_changes_no_exit_code(result: str, code: int) -> None:
    writing = closed_pipe()
    ended = command(result, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert ended.returncode == code
    assert [line.partition("] ")[2] for line in ended.stderr.splitlines()] == ["", "truth: built"]


@pytest.mark.parametrize(("result", "code"), [("EXACT", 0), ("WRONG", 1)])
def test_stderr_without_a_reader_does_not_end_the_work(result: str, code: int) -> None:
    writing = closed_pipe()
    ended = command(result, "--format", "json", stdout=subprocess.PIPE, stderr=writing)
    os.close(writing)
    assert ended.returncode == code
    assert json.loads(ended.stdout)["verdict"] == result.lower()


def test_neither_stream_has_a_reader(tmp_path: Path) -> None:
    writing = closed_pipe()
    out = tmp_path / "result.json"
    options = ("--format", "json", "--out", str(out))
    ended = command("WRONG", *options, stdout=writing, stderr=writing)
    assert ended.returncode == 1
    assert json.loads(out.read_text())["verdict"] == "wrong"
    assert command("WRONG", stdout=writing, stderr=writing).returncode == 1
    # Bad input stays bad input, and is not taken for a wrong gradient.
    bad = command("WRONG", "--set", "x", stdout=writing, stderr=writing)
    assert bad.returncode == 2
    os.close(writing)


def test_a_stdout_that_lacks_characters() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = command("EXACT", capture_output=True, env=env)
    assert ended.returncode == 0
    assert "exact: all 1692 main_grads" in ended.stdout
    assert "Traceback" not in ended.stderr
