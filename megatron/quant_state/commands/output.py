# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Where a command's words go: a file, or streams whose reader may have gone away."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from megatron.quant_state.errors import InputError, Location

__all__ = ["check_writable", "discard", "say", "write_result"]


def check_writable(path: str) -> None:
    """Say that a file cannot be written before the work is done, not after.

    A file that exists keeps its content, and none is left where there was none.

    Raises:
        InputError: with the system's reason.
    """
    existed = os.path.lexists(path)
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise _cannot_be_written(path, error) from error
    if not existed:
        os.remove(path)


def write_result(text: str, out: str | None) -> None:
    """Write a result to the file ``out`` in UTF-8, or to stdout where that is None.

    A reader of stdout that went away (``| head``) is no error, and does not change the exit code.

    Raises:
        InputError: it cannot be written.
    """
    if out is not None:
        try:
            Path(out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise _cannot_be_written(out, error) from error
        return
    # A terminal in another encoding shows a question mark for what it has not.
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        raise _cannot_be_written("stdout", error) from error


def say(text: str) -> None:
    """A line on stderr; nothing where nobody reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Let a stream end nowhere from now on: Python would complain once more when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _cannot_be_written(path: str, error: OSError) -> InputError:
    return InputError(f"cannot be written: {error.strerror}", Location(path))
