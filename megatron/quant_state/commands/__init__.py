# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The command line: one module a subcommand, with ``add_parser`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType

from megatron.quant_state.commands.output import discard, say
from megatron.quant_state.errors import QuantStateError
from megatron.quant_state.package_info import PACKAGE_NAME, __version__

__all__ = ["EXIT_BAD_INPUT", "EXIT_FAILED", "EXIT_OK", "main"]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130

#: Modules of this package, in the order of the help text.
SUBCOMMANDS = ("plan", "lint", "rehearse")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``quant-state``.

    A subcommand's module has ``add_parser(subparsers)``, which returns nothing, and
    ``run(args) -> int``, the exit code.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Returns:
        int: 0 done; 1 done, and the answer is that something is wrong; 2 bad input, or no answer
        for another reason, with one message on stderr; 130 interrupted.

    Raises:
        SystemExit: terminated by a signal, with 128 and the signal's number.
    """
    try:
        with _unwinding_when_terminated():
            return _run(argv)
    except KeyboardInterrupt:
        say("quant-state: interrupted")
        return _EXIT_INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    words, launch_flags = _split(list(sys.argv[1:] if argv is None else argv))
    try:
        args = _parser().parse_args(words)
        args.launch_flags = launch_flags
    except SystemExit as stop:  # argparse's own: --help, --version, or a bad option
        return stop.code if isinstance(stop.code, int) else EXIT_BAD_INPUT
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except QuantStateError as error:
        say(f"quant-state: error: {error}")
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # The reader went away, e.g. `| head`.
        discard(sys.stdout)
        return EXIT_OK
    return code


def _split(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Our own words, and the launch script's flags that follow `--` in their MODEL's place."""
    takes = words[:1] in [[m.__name__.rpartition(".")[2]] for m in _subcommands() if _takes(m)]
    if not takes or "--" not in words:
        return words, None
    at = words.index("--")
    return [*words[:at], "launch flags"], words[at + 1 :]


def _takes(module: ModuleType) -> bool:
    return getattr(module, "TAKES_LAUNCH_FLAGS", False) is True


@contextmanager
def _unwinding_when_terminated() -> Iterator[None]:
    """Signals that end a process at once raise SystemExit, so that a command's processes end too.

    One that is ignored (``nohup``) or handled already, and threads but the first, stay as they are.
    """

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    changed = []
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, stop)
                changed.append(number)
    except ValueError:  # not the main thread
        pass
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


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
