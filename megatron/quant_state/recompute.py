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

from megatron.quant_state.recompute_state import Calls, Queues, RecomputeState

__all__ = ["keep_precision", "nest_enter", "nest_exit", "prepare_replayed_call"]

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

# The region that is being replayed; an inner replay runs inside an outer one's backward or forward.
_replaying: _Region | None = None
# What the innermost region's forward has called so far.
_calls: Calls | None = None


def _put_in_front(stashes: Queues) -> None:
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
        self._stashes: Queues = []
        #: Whether the first module of the autocast, whose backward reduces amaxes, is in here.
        self.first = False
        #: Whether only one module may be told so.
        self.first_once = False
        #: In a replay: whether a module has been told that it is the first.
        self.first_given = False
        #: In a replay: ``fp8_meta`` of the modules that have run, whose scales TE swaps meanwhile.
        self.swapped: list[dict[str, Any]] = []

    def __call__(self, *args: Any) -> Any:
        if self._recorded is None:
            return self._forward(args)
        return self._replay(self._recorded, args)

    def _forward(self, args: tuple[Any, ...]) -> Any:
        global _calls
        te = self._te
        outer = te.save()
        autocast, depth, region, replaying = outer
        firsts = te.firsts
        waiting = firsts.copy()
        enclosing = _calls
        calls = _calls = {}
        # A forward inside a replay repeats a part of what is replayed, so it takes the scales that
        # were stashed for that and leaves the phase alone.
        te.set_phase(True, replaying)
        try:
            outputs = self._function(*args)
        except BaseException:
            self._take_stashes(calls, replaying)
            te.restore(outer)
            raise
        finally:
            _calls = enclosing
            # Gradients are off, so no region that was entered inside has a replay of its own.
            firsts[:] = waiting
        te.set_phase(region, replaying)
        self._stashes = self._take_stashes(calls, replaying)
        self.first = bool(autocast[_FIRST]) and not _first_is_given()
        # Amaxes wait for the first module's backward. In a replay of TE's own each module is told
        # that it is the first, and so it stays.
        if self.first and (not replaying or _replaying is not None):
            self.first_once = True
            for call in calls.values():
                if _has_parameters(call[2]):
                    # Without recompute a module in here would have taken the flag by now.
                    te.manager.is_first_fp8_module()
                    break
        if self.first != autocast[_FIRST]:
            autocast = (*autocast[:_FIRST], self.first, *autocast[_FIRST + 1 :])
        self._recorded = (autocast, depth, True, True)
        return outputs

    def _take_stashes(self, calls: Calls, replaying: bool) -> Queues:
        return self._te.taken(calls) if replaying else self._te.take_stashed(calls)

    def _replay(self, recorded: tuple[Any, int, bool, bool], args: tuple[Any, ...]) -> Any:
        global _replaying
        te = self._te
        outer = te.save()
        waiting = te.firsts.copy()
        stashes = self._stashes
        before = [(queue, tuple(queue)) for queue, _ in stashes]
        enclosing = _replaying
        self.first_given = False
        _replaying = self
        _put_in_front(stashes)
        te.restore(recorded)
        try:
            return self._function(*args)
        except BaseException:
            for queue, items in before:
                queue.clear()
                queue.extend(items)
            te.firsts[:] = waiting
            for meta in self.swapped:
                if "updated_scale_fwd" in meta:
                    te.manager.restore_fp8_meta_tensors(meta)
            raise
        finally:
            self.swapped.clear()
            _replaying = enclosing
            te.restore(outer)


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
    values, phase_name = te.globals, te.phase_name

    def prepare_replay(module: Any, inp: Any, num_gemms: int) -> None:
        _take_ambient_state(module, te, num_gemms)
        if _replaying is not None and module.fp8:
            _replaying.swapped.append(module.fp8_meta)
            if _replaying.first_once:
                _give_first_once(_replaying, module, te, inp)

    def note(module: Any, calls: Calls) -> None:
        if te.manager.is_fp8_enabled():
            meta = module.fp8_meta
            if id(meta) not in calls:
                calls[id(meta)] = (meta, tuple(te.queue_of(meta)), module)

    if tuple(inspect.signature(prepare_forward).parameters) == _PREPARE_PARAMETERS:
        # Every call of every module passes here, and Python calls a function of plain arguments
        # several times as fast.
        @functools.wraps(prepare_forward)
        def wrapper_of_four(
            self: Any,
            inp: Any,
            num_gemms: int = 1,
            allow_non_contiguous: bool = False,
            allow_different_data_and_param_types: bool = False,
        ) -> Any:
            if values[phase_name]:
                prepare_replay(self, inp, num_gemms)
            if _calls is not None:
                note(self, _calls)
            return prepare_forward(
                self, inp, num_gemms, allow_non_contiguous, allow_different_data_and_param_types
            )

        return wrapper_of_four

    @functools.wraps(prepare_forward)
    def wrapper(self: Any, inp: Any, num_gemms: int = 1, *args: Any, **kwargs: Any) -> Any:
        if values[phase_name]:
            prepare_replay(self, inp, num_gemms)
        if _calls is not None:
            note(self, _calls)
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


def _has_parameters(module: Any) -> bool:
    """Attention has none, and never takes the first-module flag."""
    for parameter in module._parameters.values():  # noqa: SIM110 - a generator takes as long again
        if parameter is not None:
            return True
    return False


def _give_first_once(region: _Region, module: Any, te: RecomputeState, inp: Any) -> None:
    if region.first_given:
        te.manager.is_first_fp8_module()
        return
    import torch

    wanted = inp.requires_grad or any(
        parameter is not None and parameter.requires_grad
        for parameter in module._parameters.values()
    )
    region.first_given = _has_parameters(module) and wanted and torch.is_grad_enabled()


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
        global _calls
        try:
            result = enter(self)
        except BaseException:
            te.set_phase(*outer)
            raise
        before = _calls
        if inside_replay:
            _calls = {}
            te.set_phase(True, True)
            te.firsts.insert(0, te.firsts.pop() and not _first_is_given())
        self.__dict__.setdefault(_BEFORE, []).append((outer, inside_replay, before))
        return result

    return wrapper


def nest_exit(leave: Callable[..., Any], te: RecomputeState) -> Callable[..., Any]:
    """Wrap ``activation_recompute_forward.__exit__``: restore the phase instead of ending it.

    After a forward inside a replay the scales that it took are stashed again, for its own replay.
    """

    @functools.wraps(leave)
    def wrapper(self: Any, *exc_details: Any) -> Any:
        global _calls
        result = leave(self, *exc_details)
        entries = self.__dict__.get(_BEFORE)
        if entries:
            outer, inside_replay, before = entries.pop()
            if inside_replay:
                _put_in_front(te.taken(_calls or {}))
                _calls = before
            te.set_phase(*outer)
        return result

    return wrapper
