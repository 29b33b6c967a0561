# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""TE's state by whatever names a TE has: the oldest one's, and one that lacks some."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron.quant_state.errors import UnsupportedVersionError
from megatron.quant_state.recompute import (
    keep_precision,
    nest_enter,
    nest_exit,
    prepare_replayed_call,
)
from megatron.quant_state.recompute_state import RecomputeState


class OldManager:
    """The names of TE 2.9's FP8GlobalStateManager, which keeps its state in class attributes."""

    FP8_ENABLED = False
    FP8_CALIBRATION = False
    FP8_RECIPE: Any = None
    FP8_DISTRIBUTED_GROUP: Any = None
    IS_FIRST_FP8_MODULE = False
    FP8_GRAPH_CAPTURING = False
    AUTOCAST_DEPTH = 0
    fp8_tensors_recompute_buffer: ClassVar[list[deque[Any]]] = []
    NAMES = (
        "FP8_ENABLED",
        "FP8_CALIBRATION",
        "FP8_RECIPE",
        "FP8_DISTRIBUTED_GROUP",
        "IS_FIRST_FP8_MODULE",
        "FP8_GRAPH_CAPTURING",
    )

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        return tuple(getattr(cls, name) for name in cls.NAMES)

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        for name, value in zip(cls.NAMES, state, strict=True):
            setattr(cls, name, value)

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.FP8_ENABLED

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.FP8_RECIPE

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        first, cls.IS_FIRST_FP8_MODULE = cls.IS_FIRST_FP8_MODULE, False
        return first

    @staticmethod
    def restore_fp8_meta_tensors(meta: dict[str, Any]) -> None:
        meta["scale"] = meta["updated_scale_fwd"]


def old_distributed() -> ModuleType:
    """TE 2.9's globals and its context, with the faults that matter."""
    module = ModuleType("distributed")
    values = vars(module)
    values["_FP8_ACTIVATION_RECOMPUTE_ENABLED"] = False
    values["_FP8_ACTIVATION_RECOMPUTE_PHASE"] = False

    class activation_recompute_forward:
        _is_first_fp8_module: ClassVar[list[bool]] = []

        def __init__(self, activation_recompute: bool, recompute_phase: bool) -> None:
            self.activation_recompute = activation_recompute
            self.recompute_phase = recompute_phase

        def __enter__(self) -> None:
            values["_FP8_ACTIVATION_RECOMPUTE_ENABLED"] = OldManager.FP8_ENABLED
            values["_FP8_ACTIVATION_RECOMPUTE_PHASE"] = self.recompute_phase
            if self.recompute_phase:
                OldManager.IS_FIRST_FP8_MODULE = self._is_first_fp8_module.pop(0)
            else:
                self._is_first_fp8_module.append(OldManager.IS_FIRST_FP8_MODULE)

        def __exit__(self, *exc_details: Any) -> None:
            values["_FP8_ACTIVATION_RECOMPUTE_ENABLED"] = False
            values["_FP8_ACTIVATION_RECOMPUTE_PHASE"] = False

    values["activation_recompute_forward"] = activation_recompute_forward
    return module


class Engine:
    """An old TE with the layer's wraps in place."""

    def __init__(self) -> None:
        self.distributed = old_distributed()
        self.te = RecomputeState(OldManager, self.distributed)
        context = self.distributed.activation_recompute_forward
        context.__enter__ = nest_enter(context.__enter__, self.te)
        context.__exit__ = nest_exit(context.__exit__, self.te)
        self.context = context
        self.recipe = object()

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Run a region's forward under autocast; its replay, to be called as often as wanted."""
        context = SimpleNamespace()

        def checkpoint_forward(ctx: Any, run_function: Any, distribute: bool, *args: Any) -> Any:
            ctx.run_function = run_function
            with torch.no_grad():
                return run_function(*args)

        OldManager.set_autocast_state((True, False, self.recipe, None, True, False))
        OldManager.AUTOCAST_DEPTH = 1
        keep_precision(checkpoint_forward, self.te)(context, function, False)
        OldManager.set_autocast_state((False, False, None, None, False, False))
        OldManager.AUTOCAST_DEPTH = 0
        replay: Callable[..., Any] = context.run_function
        return replay

    def module(
        self,
        name: str,
        calls: list[Any],
        *parameters: torch.Tensor,
        raises: int = 0,
        requires_grad: bool = False,
    ) -> Callable[[], None]:
        """A delayed-scaling module that notes the scale it computes with, and the flag.

        In its call number ``raises`` it raises; TE 2.9 then restores no scale.
        """
        queue: deque[Any] = deque()
        queues = OldManager.fp8_tensors_recompute_buffer
        queues.append(queue)
        meta = {"recipe": self.recipe, "scale": 1.0}
        meta["global_fp8_buffer_pos_fwd_recompute"] = len(queues) - 1

        def init_fp8_metadata(num_gemms: int) -> None:
            module.fp8 = OldManager.FP8_ENABLED

        def prepare_forward(self: Any, inp: Any, num_gemms: int = 1) -> None:
            if not self.te.phase()[1]:
                queue.append(meta["scale"])
                return
            meta["updated_scale_fwd"] = meta["scale"]
            meta["scale"] = queue.popleft()

        module: Any = SimpleNamespace(
            fp8=True,
            fp8_meta=meta,
            _parameters=dict(enumerate([*parameters, None])),
            te=self.te,
            init_fp8_metadata=init_fp8_metadata,
        )
        prepare = prepare_replayed_call(prepare_forward, self.te)

        def run() -> None:
            prepare(module, torch.zeros(1, requires_grad=requires_grad))
            calls.append((name, meta["scale"], OldManager.IS_FIRST_FP8_MODULE))
            if len(calls) == raises:
                raise InterruptedError
            if self.te.phase()[1]:
                OldManager.restore_fp8_meta_tensors(meta)
            else:
                # Amaxes move the scale.
                meta["scale"] += 1

        return run


@pytest.fixture
def engine() -> Iterator[Engine]:
    def reset() -> None:
        OldManager.set_autocast_state((False, False, None, None, False, False))
        OldManager.AUTOCAST_DEPTH = 0
        OldManager.fp8_tensors_recompute_buffer.clear()

    reset()
    yield Engine()
    reset()


def test_an_old_te_has_its_state_restored(engine: Engine) -> None:
    seen = []

    def function() -> None:
        seen.append((OldManager.get_autocast_state(), OldManager.AUTOCAST_DEPTH, engine.te.phase()))

    replay = engine.forward(function)
    before = engine.te.save()
    replay()
    state = (True, False, engine.recipe, None, True, False)
    assert seen == [(state, 1, (True, False)), (state, 1, (True, True))]
    assert engine.te.save() == before
    assert engine.te.firsts == []


def test_each_replay_gets_its_own_scales_however_often(engine: Engine) -> None:
    calls: list[Any] = []
    module = engine.module("a", calls)

    def twice() -> None:
        module()
        module()

    replays = [engine.forward(twice) for _ in range(3)]
    forward = calls.copy()
    assert [scale for _, scale, _ in forward] == [1, 2, 3, 4, 5, 6]
    for index in (2, 0, 1, 0):
        calls.clear()
        replays[index]()
        assert calls == forward[2 * index : 2 * index + 2]
    assert [list(queue) for queue in OldManager.fp8_tensors_recompute_buffer] == [[]]


def test_tes_region_inside_a_replay_keeps_phase_and_scales(engine: Engine) -> None:
    calls: list[Any] = []
    module, other = engine.module("inner", calls), engine.module("outer", calls)

    def function() -> None:
        with engine.context(True, False):
            module()
        phases.append(engine.te.phase())
        other()

    phases: list[Any] = []
    # A region of TE's own waits for its replay meanwhile.
    engine.te.firsts.append(False)
    replay = engine.forward(function)
    assert engine.te.firsts == [False]
    forward = calls.copy()
    calls.clear()
    replay()
    assert calls == forward
    assert phases == [(True, False), (True, True)]
    # Its own replay comes next and finds the scale and the flag of the same forward.
    assert engine.te.firsts == [True, False]
    calls.clear()
    with engine.context(True, True):
        module()
    assert calls == [forward[0]]
    assert engine.te.firsts == [False]


def test_one_module_of_a_replay_is_the_first(engine: Engine) -> None:
    """TE gives the flag back after each; one that cannot have taken it does not count."""
    calls: list[Any] = []
    weight = torch.zeros(1, requires_grad=True)
    modules = [
        engine.module("attention", calls, requires_grad=True),
        engine.module("frozen", calls, torch.zeros(1)),
        engine.module("first", calls, torch.zeros(1), weight),
        engine.module("second", calls, weight),
    ]
    firsts: list[bool] = []

    def function() -> None:
        for module in modules:
            module()
            # As TE does in the phase of a replay, where the module has taken it.
            if torch.is_grad_enabled() and calls[-1][2]:
                OldManager.IS_FIRST_FP8_MODULE = True
            # Whether a region of TE's own, after this module, would hold the first.
            with engine.context(True, False):
                firsts.append(engine.te.firsts[0])

    replay = engine.forward(function)
    calls.clear()
    firsts.clear()
    replay()
    assert firsts == [True, True, False, False]
    assert [(name, first) for name, _, first in calls] == [
        ("attention", True),
        ("frozen", True),
        ("first", True),
        ("second", False),
    ]


def test_an_exception_in_a_replay_restores_the_scales(engine: Engine) -> None:
    calls: list[Any] = []
    modules = [engine.module("a", calls), engine.module("b", calls, raises=4)]

    def function() -> None:
        with engine.context(True, False):
            pass
        for module in modules:
            module()

    replay = engine.forward(function)
    engine.forward(modules[0])
    # Of a region of TE's own, whose replay is still to come.
    queues = OldManager.fp8_tensors_recompute_buffer
    for queue in queues:
        queue.append(9)
    before = engine.te.save()
    assert len(calls) == 3
    calls.pop()
    with pytest.raises(InterruptedError):
        replay()
    assert engine.te.save() == before
    assert engine.te.firsts == []
    assert [list(queue) for queue in queues] == [[9], [9]]
    # Scales as the forwards left them, and not as the replay took them.
    calls.clear()
    for module in modules:
        engine.forward(module)
    assert [scale for _, scale, _ in calls] == [3, 2]
    calls.clear()
    replay()
    assert [scale for _, scale, _ in calls] == [1, 1]


def test_without_the_wraps_the_phase_is_lost() -> None:
    """The negative control: what TE 2.9 does."""
    distributed = old_distributed()
    te, context = RecomputeState(OldManager, distributed), distributed.activation_recompute_forward
    context._is_first_fp8_module.append(True)
    with context(True, True):
        with context(True, False):
            pass
        assert te.phase() == (False, False)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("_FP8_ACTIVATION_RECOMPUTE_PHASE", "globals _IN_ACTIVATION_RECOMPUTE_REGION and"),
        ("activation_recompute_forward", "the list activation_recompute_forward."),
    ],
)
def test_globals_of_other_names_are_refused(missing: str, said: str) -> None:
    distributed = old_distributed()
    delattr(distributed, missing)
    with pytest.raises(UnsupportedVersionError, match=said):
        RecomputeState(OldManager, distributed)


@pytest.mark.parametrize(
    "missing",
    ["set_autocast_state", "restore_fp8_meta_tensors", "fp8_tensors_recompute_buffer"],
)
def test_a_manager_of_another_shape_is_refused(missing: str) -> None:
    names = {name: value for name, value in vars(OldManager).items() if name != missing}
    manager = type("Manager", (), names)
    with pytest.raises(UnsupportedVersionError, match=missing):
        RecomputeState(manager, old_distributed())
