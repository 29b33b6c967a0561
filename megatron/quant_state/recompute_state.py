# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Transformer Engine's process-wide recompute state, by whatever names a version gives it."""

from __future__ import annotations

from typing import Any

from megatron.quant_state.errors import UnsupportedVersionError

__all__ = ["Calls", "Queues", "RecomputeState"]

# Globals of TE's ``pytorch/distributed.py``, from 2.19 on and before: inside a region, replaying.
_GLOBALS = (
    ("_IN_ACTIVATION_RECOMPUTE_REGION", "_ACTIVATION_RECOMPUTE_PHASE"),
    ("_FP8_ACTIVATION_RECOMPUTE_ENABLED", "_FP8_ACTIVATION_RECOMPUTE_PHASE"),
)
# Where a module's ``fp8_meta`` says which of TE's queues of stashed scales is its own.
_QUEUE = "global_fp8_buffer_pos_fwd_recompute"

#: A module's queue of stashed scales, and what is or was in it; delayed scaling only.
Queues = list[tuple[Any, tuple[Any, ...]]]
#: Quantized modules that ran, by identity of their ``fp8_meta``: that, what was in the queue before
#: the first call, and whether there are parameters.
Calls = dict[int, tuple[dict[str, Any], tuple[Any, ...], bool]]


class RecomputeState:
    """TE's process-wide state that a region touches, whatever this TE calls it.

    Args:
        manager: TE's FP8GlobalStateManager. Its ``quantization_state`` (from 2.15 on) is looked up
            at every use, since ``reset()`` replaces it.
        distributed: TE's module ``pytorch/distributed.py``.

    Raises:
        UnsupportedVersionError: something is missing; the message names it.
    """

    def __init__(self, manager: Any, distributed: Any) -> None:
        self.manager = manager
        self.globals = vars(distributed)
        found = [names for names in _GLOBALS if all(name in self.globals for name in names)]
        depth_name = (
            "autocast_depth" if hasattr(manager, "quantization_state") else "AUTOCAST_DEPTH"
        )
        self._depth_name = depth_name
        context: Any = getattr(distributed, "activation_recompute_forward", None)
        missing = [
            f"FP8GlobalStateManager.{name}"
            for name in (
                "get_autocast_state",
                "set_autocast_state",
                "get_fp8_recipe",
                "is_first_fp8_module",
                "restore_fp8_meta_tensors",
            )
            if not callable(getattr(manager, name, None))
        ]
        missing += [
            f"the manager's {name}"
            for name in (depth_name, "fp8_tensors_recompute_buffer")
            if not hasattr(self._state, name)
        ]
        if not found:
            missing.append(f"the globals {' or '.join(map(' and '.join, _GLOBALS))}")
        if not isinstance(getattr(context, "_is_first_fp8_module", None), list):
            missing.append("the list activation_recompute_forward._is_first_fp8_module")
        if missing:
            raise UnsupportedVersionError(
                f"transformer-engine has not, for activation recompute: {', '.join(missing)}. "
                "Nothing was patched."
            )
        self.region_name, self.phase_name = found[0]
        self._context = context

    @property
    def _state(self) -> Any:
        return getattr(self.manager, "quantization_state", self.manager)

    @property
    def firsts(self) -> list[bool]:
        """TE's own list of first-module flags, of regions that are still to be replayed."""
        firsts: list[bool] = self._context._is_first_fp8_module
        return firsts

    def save(self) -> tuple[Any, int, bool, bool]:
        """Autocast state as TE's manager returns it, autocast depth, region, phase."""
        values = self.globals
        return (
            self.manager.get_autocast_state(),
            getattr(self._state, self._depth_name),
            values[self.region_name],
            values[self.phase_name],
        )

    def restore(self, saved: tuple[Any, int, bool, bool]) -> None:
        """Set all that :meth:`save` returned.

        Unlike leaving an autocast this reduces no amax, and unlike leaving TE's own region it ends
        nothing that is still going on.
        """
        autocast, depth, region, phase = saved
        self.manager.set_autocast_state(autocast)
        setattr(self._state, self._depth_name, depth)
        self.set_phase(region, phase)

    def phase(self) -> tuple[bool, bool]:
        """Whether a region runs, and whether it is a replay."""
        values = self.globals
        return values[self.region_name], values[self.phase_name]

    def set_phase(self, region: bool, phase: bool) -> None:
        """Set what :meth:`phase` returns."""
        self.globals[self.region_name] = region
        self.globals[self.phase_name] = phase

    def queue_of(self, meta: dict[str, Any]) -> Any:
        """The queue of stashed scales of a module, empty where it never stashed any."""
        position = meta.get(_QUEUE)
        return () if position is None else self._state.fp8_tensors_recompute_buffer[position]

    def take_stashed(self, calls: Calls) -> Queues:
        """Take out what the calls appended to their modules' queues."""
        stashed: Queues = []
        for meta, before, _ in calls.values():
            queue = self.queue_of(meta)
            count = len(queue) - len(before)
            if count > 0:
                items = [queue.pop() for _ in range(count)]
                stashed.append((queue, tuple(reversed(items))))
        return stashed

    def taken(self, calls: Calls) -> Queues:
        """What the calls took from the front of their modules' queues."""
        found = ((self.queue_of(meta), before) for meta, before, _ in calls.values())
        return [
            (queue, old[: len(old) - len(queue)]) for queue, old in found if len(queue) < len(old)
        ]
