# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The command line: one module a subcommand, with ``add_parser`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from megatron.quant_state.errors import QuantStateError
from megatron.quant_state.package_info import PACKAGE_NAME, __version__

__all__ = ["EXIT_BAD_INPUT", "EXIT_FAILED", "EXIT_OK", "main"]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130

#: Modules of this package, in the order of the help text.
SUBCOMMANDS = ("rehearse",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``quant-state``.

    A subcommand's module has ``add_parser(subparsers)``, which returns nothing, and
    ``run(args) -> int``, the exit code.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Returns:
        int: 0 done; 1 done, and the answer is that something is wrong; 2 bad input, with one
        message on stderr; 130 interrupted.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse's own: --help, --version, or a bad option
        return stop.code if isinstance(stop.code, int) else EXIT_BAD_INPUT
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except QuantStateError as error:
        print(f"quant-state: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # The reader went away, e.g. `| head`. Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        print("quant-state: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quant-state",
        description="Right gradients and plain answers for quantized training with Megatron-Core.",
    )
    parser.add_argument("--version", action="version", version=f"{PACKAGE_NAME} {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in _subcommands():
        before = set(subparsers.choices)
        module.add_parser(subparsers)
        for name in set(subparsers.choices) - before:
            subparsers.choices[name].set_defaults(run=module.run)
    return parser


def _subcommands() -> list[ModuleType]:
    # Only when a parser is built, so that importing this package stays cheap.
    return [importlib.import_module(f"{__name__}.{name}") for name in SUBCOMMANDS]
