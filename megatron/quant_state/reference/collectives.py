# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Collectives over one rank, which move nothing. Process-wide, never undone.

Gloo would do, were it not for three things: it has no average, it packs a coalesced gather of two
dtypes (the bf16 and the FP8 parameters of ``param_and_grad_buffer.py``) wrongly, and each call
wakes a thread. Groups of more ranks are left to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Done:
    """A collective that has finished."""

    def wait(self, *_: Any) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It has finished."""
        return True


def _is_alone(group: Any) -> bool:
    return bool(torch.distributed.get_world_size(group) == 1)


def _in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """``all_reduce`` and ``broadcast``: the tensor is the result."""

    @functools.wraps(original)
    def collective(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The group is the third argument of both.
        group = kwargs.get("group", args[1] if len(args) > 1 else None)
        if not _is_alone(group):
            return original(tensor, *args, **kwargs)
        return _Done() if kwargs.get("async_op", args[2] if len(args) > 2 else False) else None

    return collective


def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    """``all_gather_into_tensor``, ``reduce_scatter_tensor``: the result is a copy of the input."""

    @functools.wraps(original)
    def collective(output: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", next((arg for arg in args if _is_group(arg)), None))
        if not _is_alone(group):
            return original(output, source, *args, **kwargs)
        if output.data_ptr() != source.data_ptr():
            output.view(-1).copy_(source.view(-1))
        return _Done() if kwargs.get("async_op") or True in args else None

    return collective


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.distributed.ProcessGroup)


@contextmanager
def _coalescing_manager(*_: Any, **__: Any) -> Iterator[_Done]:
    """Collectives inside have run when they return."""
    yield _Done()


def apply() -> None:
    """Install the stand-ins, before Megatron binds the originals; again is harmless."""
    distributed: Any = torch.distributed
    if distributed._coalescing_manager is _coalescing_manager:
        return
    for name in ("all_reduce", "broadcast"):
        setattr(distributed, name, _in_place(getattr(distributed, name)))
    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    for name in (*names, "_all_gather_base", "_reduce_scatter_base"):
        setattr(distributed, name, _copying(getattr(distributed, name)))
    distributed._coalescing_manager = _coalescing_manager
