# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The package's exceptions: each subclasses the builtin it is a kind of."""

from __future__ import annotations

from dataclasses import dataclass


class QuantStateError(Exception):
    """Base of every exception that this package raises on purpose."""


class UnsupportedVersionError(QuantStateError, RuntimeError):
    """Megatron-Core or Transformer Engine does not have the shape that a patch needs."""


class ForeignPatchError(QuantStateError, RuntimeError):
    """Something else replaced an attribute that this package patched, or is about to patch."""


@dataclass(frozen=True)
class Location:
    """A place in a file the user wrote: ``line`` and ``column`` count from 1."""

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(p) for p in (self.file, self.line, self.column) if p is not None)


class InputError(QuantStateError, ValueError):
    """What the user gave cannot be used: the message says where, what, and what to do.

    Args:
        message (str): what was found, what was expected, what to do.
        location (Location | None): where in the user's file, when there is one.
    """

    def __init__(self, message: str, location: Location | None = None) -> None:
        super().__init__(f"{location}: {message}" if location else message)
        self.message = message
        self.location = location


class WorkerError(QuantStateError, RuntimeError):
    """A process that this package started ended in a way that nobody foresaw."""
