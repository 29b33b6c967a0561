# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The command line's frame: subcommands, exit codes, one message for bad input."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.quant_state import commands
from megatron.quant_state.errors import UnsupportedVersionError
from megatron.quant_state.model import load_model
from megatron.quant_state.package_info import __version__

Run = Callable[[argparse.Namespace], int]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Makes `show MODEL [--set F=V]` the only subcommand, with the given `run`."""

    def install(run: Run) -> None:
        def add_parser(subparsers: Any) -> None:
            parser = subparsers.add_parser("show", help="show a model")
            parser.add_argument("model")
            parser.add_argument("--set", action="append", default=[], dest="overrides")

        module = types.ModuleType("megatron.quant_state.commands.show")
        module.add_parser, module.run = add_parser, run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(commands, "SUBCOMMANDS", ("show",))

    return install


def show(args: argparse.Namespace) -> int:
    print(load_model(args.model, args.overrides).vocab_size)
    return 0


def test_a_subcommand_runs_and_its_code_is_the_exit_code(
    use: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(show)
    assert commands.main(["show", "deepseek-v3", "--set", "vocab_size=7"]) == 0
    assert capsys.readouterr().out == "7\n"
    use(lambda args: 1)
    assert commands.main(["show", "deepseek-v3"]) == 1


def test_version_and_help(use: Callable[[Run], None], capsys: pytest.CaptureFixture[str]) -> None:
    use(show)
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-quant-state {__version__}\n"
    assert commands.main(["--help"]) == 0
    assert "show a model" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["shwo"], ["show"], ["show", "m", "--st", "x=1"]])
def test_bad_options_exit_2(
    use: Callable[[Run], None], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    use(show)
    assert commands.main(argv) == 2
    assert "usage: quant-state" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (None, [], "no model 'nothing': Expected a YAML file or one of deepseek-v3, "),
        ("a: [1\n", [], ":2:1: malformed YAML: while parsing a flow sequence"),
        ("vocabsize: 3\n", [], "'transformer_config' is missing"),
        ("", [], ": the file is empty"),
        ("extends: deepseek-v3\n", ["vocab_size=x"], "--set vocab_size=x: vocab_size: expected an"),
        (
            "extends: deepseek-v3\nvocab_size: x\n",
            [],
            ':2:1: vocab_size: expected an integer, found "x"',
        ),
        ("extends: deepseek-v3\nrecipe: gone\n", [], ":2:1: no such file"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    use: Callable[[Run], None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str | None,
    overrides: list[str],
    message: str,
) -> None:
    use(show)
    name = "nothing"
    if text is not None:
        name = str(tmp_path / "m.yaml")
        Path(name).write_text(text)
    options = [part for override in overrides for part in ("--set", override)]
    assert commands.main(["show", name, *options]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("quant-state: error: ")
    assert streams.err.count("\n") == 1
    assert message in streams.err


def test_an_unsupported_megatron_exits_2(
    use: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise UnsupportedVersionError("no TELinear")

    use(run)
    assert commands.main(["show", "m"]) == 2
    assert capsys.readouterr().err == "quant-state: error: no TELinear\n"


def test_an_interrupt_is_no_traceback(
    use: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    use(run)
    assert commands.main(["show", "m"]) == 130
    assert capsys.readouterr().err == "quant-state: interrupted\n"


def test_our_own_faults_keep_their_traceback(use: Callable[[Run], None]) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    use(run)
    with pytest.raises(ZeroDivisionError):
        commands.main(["show", "m"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys, types\n"
        "from megatron.quant_state import commands\n"
        "module = types.ModuleType('megatron.quant_state.commands.show')\n"
        "module.add_parser = lambda subparsers: subparsers.add_parser('show')\n"
        "module.run = lambda args: print('x' * 1_000_000) or 0\n"
        "sys.modules[module.__name__] = module\n"
        "commands.SUBCOMMANDS = ('show',)\n"
        "sys.exit(commands.main(['show']))\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (run.returncode, run.stderr) == (0, "")
