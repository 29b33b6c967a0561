# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Replay a recomputed region in the precision of its forward.

Megatron's ``tensor_parallel.checkpoint`` restores the RNG state and nothing else, and its replay
runs inside backward, outside autocast: what the forward quantized is replayed in BF16. So the
function of a region is wrapped, and each replay gets the quantization state of its own forward.

Everything that TE keeps for this is process-wide, because backward runs on another thread.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.quant_state.errors import UnsupportedVersionError

__all__ = ["RecomputeState", "keep_precision", "nest_enter", "nest_exit", "prepare_replayed_call"]

# Globals of TE's ``pytorch/distributed.py``, from 2.19 on and before: inside a region, replaying.
_GLOBALS = (
    ("_IN_ACTIVATION_RECOMPUTE_REGION", "_ACTIVATION_RECOMPUTE_PHASE"),
    ("_FP8_ACTIVATION_RECOMPUTE_ENABLED", "_FP8_ACTIVATION_RECOMPUTE_PHASE"),
)
# ``prepare_forward`` of TE 2.9 to 2.20.
_PREPARE_PARAMETERS = (
    "self",
    "inp",
    "num_gemms",
    "allow_non_contiguous",
    "allow_different_data_and_param_types",
)
# Place of is_first_fp8_module in what ``FP8GlobalStateManager.get_autocast_state`` returns.
_FIRST = 4
# In the ``__dict__`` of an activation_recompute_forward: what was there before each entry.
_BEFORE = "_quant_state_before"

#: A module's queue of stashed scales, and what is or was in it.
_Queues = list[tuple[Any, tuple[Any, ...]]]

# The region that is being replayed; an inner replay runs inside an outer one's backward or forward.
_replaying: _Region | None = None


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
        self._globals = vars(distributed)
        found = [names for names in _GLOBALS if all(name in self._globals for name in names)]
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
        self._region, self._phase = found[0]
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
        values = self._globals
        return (
            self.manager.get_autocast_state(),
            getattr(self._state, self._depth_name),
            values[self._region],
            values[self._phase],
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

    @property
    def phase_name(self) -> tuple[dict[str, Any], str]:
        """The globals of TE's module, and the name there that says whether this is a replay."""
        return self._globals, self._phase

    def phase(self) -> tuple[bool, bool]:
        """Whether a region runs, and whether it is a replay."""
        values = self._globals
        return values[self._region], values[self._phase]

    def set_phase(self, region: bool, phase: bool) -> None:
        """Set what :meth:`phase` returns."""
        self._globals[self._region] = region
        self._globals[self._phase] = phase

    def queues(self) -> _Queues:
        """The queues of stashed scales, one a module, and what is in each; delayed scaling only."""
        return [(queue, tuple(queue)) for queue in self._state.fp8_tensors_recompute_buffer]

    def take_appended(self, before: _Queues) -> _Queues:
        """Take out what was appended since ``before``; empty queues are left out."""
        taken: _Queues = []
        lengths = [len(old) for _, old in before]
        queues = self._state.fp8_tensors_recompute_buffer
        # Queues are only ever added, at the end.
        lengths += [0] * (len(queues) - len(lengths))
        for queue, length in zip(queues, lengths, strict=True):
            count = len(queue) - length
            if count > 0:
                items = [queue.pop() for _ in range(count)]
                taken.append((queue, tuple(reversed(items))))
        return taken


def _taken(before: _Queues) -> _Queues:
    """What was taken from the queues' fronts since ``before``."""
    return [(queue, old[: len(old) - len(queue)]) for queue, old in before if len(queue) < len(old)]


def _put_in_front(stashes: _Queues) -> None:
    for queue, items in stashes:
        queue.extendleft(reversed(items))


class _Region:
    """The function of one region: the first call is its forward, later ones are replays.

    The scales that delayed scaling stashed in the forward are kept here and not in TE's queues,
    which pair first in, first out, while backward runs last in, first out.
    """

    __slots__ = (
        "_function",
        "_recorded",
        "_stashes",
        "_te",
        "first",
        "first_given",
        "first_once",
        "swapped",
    )

    def __init__(self, te: RecomputeState, function: Callable[..., Any]) -> None:
        self._te = te
        self._function = function
        self._recorded: tuple[Any, int, bool, bool] | None = None
        self._stashes: _Queues = []
        #: Whether the first module of the autocast, whose backward reduces amaxes, is in here.
        self.first = False
        #: Whether only one module may be told so.
        self.first_once = True
        #: In a replay: whether a module has been told that it is the first.
        self.first_given = False
        #: In a replay: ``fp8_meta`` of the modules that have run, whose scales TE swaps meanwhile.
        self.swapped: list[dict[str, Any]] = []

    def __call__(self, *args: Any) -> Any:
        if self._recorded is None:
            return self._forward(args)
        return self._replay(self._recorded, args)

    def _forward(self, args: tuple[Any, ...]) -> Any:
        te = self._te
        outer = te.save()
        autocast, depth, _, replaying = outer
        # A forward inside a replay repeats a part of what is replayed, so it takes the scales that
        # were stashed for that and leaves the phase alone.
        before, firsts = te.queues(), te.firsts.copy()
        te.set_phase(True, replaying)
        try:
            outputs = self._function(*args)
        except BaseException:
            self._put_back(before, firsts)
            te.restore(outer)
            raise
        self._stashes = _taken(before) if replaying else te.take_appended(before)
        # Gradients are off, so no region that was entered inside has a replay of its own.
        te.firsts[:] = firsts
        te.set_phase(*outer[2:])
        self.first = bool(autocast[_FIRST]) and not _first_is_given()
        # In a replay of TE's own each module is told that it is the first, and so it stays.
        self.first_once = not replaying or _replaying is not None
        self._recorded = (
            (*autocast[:_FIRST], self.first, *autocast[_FIRST + 1 :]),
            depth,
            True,
            True,
        )
        if self.first and self.first_once and self._stashes:
            # Without recompute a module in here would have taken the flag by now.
            te.manager.is_first_fp8_module()
            if _replaying is not None:
                _replaying.first_given = True
        return outputs

    def _replay(self, recorded: tuple[Any, int, bool, bool], args: tuple[Any, ...]) -> Any:
        global _replaying
        te = self._te
        outer = te.save()
        before, firsts = te.queues(), te.firsts.copy()
        enclosing = _replaying
        self.first_given = False
        self.swapped = []
        _replaying = self
        _put_in_front(self._stashes)
        te.restore(recorded)
        try:
            return self._function(*args)
        except BaseException:
            self._put_back(before, firsts)
            for meta in self.swapped:
                if "updated_scale_fwd" in meta:
                    te.manager.restore_fp8_meta_tensors(meta)
            raise
        finally:
            self.swapped = []
            _replaying = enclosing
            te.restore(outer)

    def _put_back(self, before: _Queues, firsts: list[bool]) -> None:
        self._te.take_appended(before)
        for queue, old in before:
            queue.clear()
            queue.extend(old)
        self._te.firsts[:] = firsts


def _first_is_given() -> bool:
    return _replaying is not None and _replaying.first_given


def keep_precision(forward: Callable[..., Any], te: RecomputeState) -> Callable[..., Any]:
    """Wrap ``CheckpointFunction.forward`` so that a replay sees its forward's quantization state.

    The forward runs under TE's recompute phase False, a replay under the forward's autocast
    (enabled, calibration, recipe, amax group) and phase True. Afterwards the state is what it was,
    after an exception as well. Nothing is done where no autocast is on, and where there will be no
    replay because gradients are off around the region or no input wants one.

    Args:
        forward: ``(ctx, run_function, distribute_saved_activations, *args)``.
        te: TE's state.

    Returns:
        Callable: a function with the same signature.

    Source: megatron-core 0.19.2, ``tensor_parallel/random.py: CheckpointFunction``.
    """
    is_fp8_enabled = te.manager.is_fp8_enabled

    @functools.wraps(forward)
    def wrapper(
        ctx: Any, run_function: Callable[..., Any], distribute_saved_activations: bool, *args: Any
    ) -> Any:
        # Inside an autograd.Function grad mode is always off, and needs_input_grad is True for a
        # leaf under an outer no_grad too. The node has next functions only if it is in the graph.
        # A ctx that is no node was made by a caller that means to call backward by itself.
        if is_fp8_enabled() and getattr(ctx, "next_functions", True):
            run_function = _Region(te, run_function)
        return forward(ctx, run_function, distribute_saved_activations, *args)

    return wrapper


def prepare_replayed_call(
    prepare_forward: Callable[..., Any], te: RecomputeState
) -> Callable[..., Any]:
    """Wrap ``TransformerEngineBaseModule.prepare_forward``, for calls in a replay.

    There TE takes the module's own ``fp8`` for the ambient autocast, which another call may have
    changed since the forward. And it gives the first-module flag back after each module, so each
    module of the first region would reduce the amaxes of backward.

    Args:
        prepare_forward: ``(self, inp, num_gemms, ...)``.
        te: TE's state; ``is_first_fp8_module`` may be cleared.

    Returns:
        Callable: a function with the same signature.

    Source: Transformer Engine 2.20.2, ``module/base.py: prepare_forward``,
    ``module/linear.py: _check_fp8_reduce_and_update``.
    """
    # Every call of every module passes here, so what is no replay costs one look-up.
    values, replaying = te.phase_name

    def prepare_replay(module: Any, inp: Any, num_gemms: int) -> None:
        _take_ambient_state(module, te, num_gemms)
        if _replaying is not None and module.fp8:
            _replaying.swapped.append(module.fp8_meta)
            if _replaying.first and _replaying.first_once:
                _give_first_once(_replaying, module, te, inp)

    if tuple(inspect.signature(prepare_forward).parameters) == _PREPARE_PARAMETERS:
        # Python calls a function of plain arguments several times as fast.
        @functools.wraps(prepare_forward)
        def wrapper_of_four(
            self: Any,
            inp: Any,
            num_gemms: int = 1,
            allow_non_contiguous: bool = False,
            allow_different_data_and_param_types: bool = False,
        ) -> Any:
            if values[replaying]:
                prepare_replay(self, inp, num_gemms)
            return prepare_forward(
                self, inp, num_gemms, allow_non_contiguous, allow_different_data_and_param_types
            )

        return wrapper_of_four

    @functools.wraps(prepare_forward)
    def wrapper(self: Any, inp: Any, num_gemms: int = 1, *args: Any, **kwargs: Any) -> Any:
        if values[replaying]:
            prepare_replay(self, inp, num_gemms)
        return prepare_forward(self, inp, num_gemms, *args, **kwargs)

    return wrapper


def _take_ambient_state(module: Any, te: RecomputeState, num_gemms: int) -> None:
    enabled = te.manager.is_fp8_enabled()
    if bool(module.fp8) == bool(enabled):
        if not enabled:
            return
        recipe, ambient = module.fp8_meta.get("recipe"), te.manager.get_fp8_recipe()
        if recipe is ambient or recipe == ambient:
            return
    module.init_fp8_metadata(num_gemms=num_gemms)


def _give_first_once(region: _Region, module: Any, te: RecomputeState, inp: Any) -> None:
    import torch

    if region.first_given:
        te.manager.is_first_fp8_module()
        return
    parameters = [item for item in module._parameters.values() if item is not None]
    wanted = inp.requires_grad or any(item.requires_grad for item in parameters)
    # Attention has no parameters and never takes the flag.
    region.first_given = bool(parameters) and wanted and torch.is_grad_enabled()


def nest_enter(enter: Callable[..., Any], te: RecomputeState) -> Callable[..., Any]:
    """Wrap ``activation_recompute_forward.__enter__``: remember what was there, for the exit.

    A forward that is entered inside a replay (``CheckpointWithoutOutput``, TE's own checkpoint)
    stays in the replay's phase, and its own replay is the next one, so its flag goes to the front
    of TE's list. An entry that raises leaves the phase as it was.
    """

    @functools.wraps(enter)
    def wrapper(self: Any) -> Any:
        outer = te.phase()
        inside_replay = outer[1] and self.activation_recompute and not self.recompute_phase
        queues = te.queues() if inside_replay else None
        try:
            result = enter(self)
        except BaseException:
            te.set_phase(*outer)
            raise
        if inside_replay:
            te.set_phase(True, True)
            te.firsts.insert(0, te.firsts.pop() and not _first_is_given())
        self.__dict__.setdefault(_BEFORE, []).append((outer, queues))
        return result

    return wrapper


def nest_exit(leave: Callable[..., Any], te: RecomputeState) -> Callable[..., Any]:
    """Wrap ``activation_recompute_forward.__exit__``: restore the phase instead of ending it.

    After a forward inside a replay the scales that it took are stashed again, for its own replay.
    """

    @functools.wraps(leave)
    def wrapper(self: Any, *exc_details: Any) -> Any:
        result = leave(self, *exc_details)
        entries = self.__dict__.get(_BEFORE)
        if entries:
            outer, queues = entries.pop()
            if queues is not None:
                _put_in_front(_taken(queues))
            te.set_phase(*outer)
        return result

    return wrapper
