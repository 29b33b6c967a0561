# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Install orders, each in a process of its own, and what is refused with nothing patched.

Megatron takes seconds to import, so a process is a fork of this one, where it is imported already.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

import torch
import transformer_engine
from megatron.core.extensions import transformer_engine as wrappers
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.module import MegatronModule
from transformer_engine.pytorch.distributed import activation_recompute_forward
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from megatron.quant_state import install, uninstall
from megatron.quant_state.errors import ForeignPatchError, UnsupportedVersionError
from megatron.quant_state.patching import Patch, apply_patches, restore_patches

DISTRIBUTED = "transformer_engine.pytorch.distributed"
WRAPPERS = "megatron.core.extensions.transformer_engine"
#: Everything that the layer patches, by hand.
TARGETS: dict[str, tuple[type, str]] = {
    "megatron.core.transformer.module.MegatronModule.set_is_first_microbatch": (
        MegatronModule,
        "set_is_first_microbatch",
    ),
    f"{WRAPPERS}.TELinear.forward": (wrappers.TELinear, "forward"),
    f"{WRAPPERS}.TELayerNormColumnParallelLinear.forward": (
        wrappers.TELayerNormColumnParallelLinear,
        "forward",
    ),
    f"{WRAPPERS}.TEGroupedLinear.forward": (wrappers.TEGroupedLinear, "forward"),
    f"{WRAPPERS}.TELinear.__setattr__": (wrappers.TELinear, "__setattr__"),
    f"{WRAPPERS}.TELayerNormColumnParallelLinear.__setattr__": (
        wrappers.TELayerNormColumnParallelLinear,
        "__setattr__",
    ),
    f"{WRAPPERS}.TEGroupedLinear.__setattr__": (wrappers.TEGroupedLinear, "__setattr__"),
    "transformer_engine.pytorch.module.base.TransformerEngineBaseModule._load_from_state_dict": (
        TransformerEngineBaseModule,
        "_load_from_state_dict",
    ),
    "megatron.core.tensor_parallel.random.CheckpointFunction.forward": (
        CheckpointFunction,
        "forward",
    ),
    f"{DISTRIBUTED}.activation_recompute_forward.__enter__": (
        activation_recompute_forward,
        "__enter__",
    ),
    f"{DISTRIBUTED}.activation_recompute_forward.__exit__": (
        activation_recompute_forward,
        "__exit__",
    ),
    "transformer_engine.pytorch.module.base.TransformerEngineBaseModule.prepare_forward": (
        TransformerEngineBaseModule,
        "prepare_forward",
    ),
}


def in_a_fork(function: Callable[[], None]) -> None:
    """Run a function in a copy of this process; what it raises fails the test here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        report = b""
        try:
            function()
        except BaseException:
            report = traceback.format_exc().encode()
        finally:
            os.write(write, report[-60_000:])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        report = pipe.read()
    _, status = os.waitpid(child, 0)
    if report or status:
        pytest.fail(f"status {status} in the fork:\n{report.decode()}", pytrace=False)


def isolated(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in a fork."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        in_a_fork(lambda: test(*args, **kwargs))

    return run


def raw(target: str) -> Any:
    """What the class has itself, else what it inherits."""
    owner, method = TARGETS[target]
    return owner.__dict__.get(method, getattr(owner, method))


def everything() -> dict[tuple[type, str], Any]:
    """All raw attributes of all classes that are patched."""
    owners = {owner for owner, _ in TARGETS.values()}
    return {(owner, name): value for owner in owners for name, value in owner.__dict__.items()}


def same(left: dict[Any, Any], right: dict[Any, Any]) -> bool:
    """Equal by identity, which a function that was wrapped again is not."""
    return left.keys() == right.keys() and all(left[key] is right[key] for key in left)


def foreign(below: Callable[..., Any]) -> Callable[..., Any]:
    """Somebody else's wrapper, of the polite kind."""

    @functools.wraps(below)
    def somebody_elses_wrapper(*args: Any, **kwargs: Any) -> Any:
        return below(*args, **kwargs)

    return somebody_elses_wrapper


def put(target: str, value: Any) -> None:
    owner, method = TARGETS[target]
    setattr(owner, method, value)


@isolated
def test_install_and_uninstall() -> None:
    before = everything()
    assert uninstall() is None
    installation = install()
    after = everything()
    assert before.keys() <= after.keys()
    changed = {key for key in after if before.get(key) is not after[key]}
    assert changed == set(TARGETS.values())
    # What a class inherits is wrapped on the class, and nothing of its own is lost.
    assert {name for _, name in after.keys() - before.keys()} == {"__setattr__"}
    assert [item.patch.target for item in installation.patches] == list(TARGETS)
    # What inherits a wrapper runs the patch as well.
    assert wrappers.TERowParallelLinear.forward is raw(f"{WRAPPERS}.TELinear.forward")
    assert install() is installation
    assert same(everything(), after)
    installation.uninstall()
    assert same(everything(), before)
    installation.uninstall()
    uninstall()
    assert same(everything(), before)
    again = install()
    assert again is not installation
    # The old handle is not the layer that is in place now.
    installation.uninstall()
    assert {key for key, value in everything().items() if value is not before.get(key)} == changed
    uninstall()
    assert same(everything(), before)


@isolated
def test_the_context_manager_uninstalls_whatever_happens() -> None:
    before = everything()

    def work() -> None:
        with install() as installation:
            assert install() is installation
            assert not same(everything(), before)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        work()
    assert same(everything(), before)


@pytest.mark.parametrize("target", TARGETS)
@isolated
def test_a_foreign_patch_on_top_is_refused_by_name(target: str) -> None:
    before = everything()
    installation = install()
    ours = raw(target)
    put(target, foreign(ours))
    with_foreign = everything()
    for act in (install, uninstall, installation.uninstall):
        with pytest.raises(ForeignPatchError) as caught:
            act()
        message = str(caught.value)
        assert message.startswith(f"{target} was patched by megatron.quant_state, and now ")
        assert "somebody_elses_wrapper" in message
        assert f"{__file__}:" in message
        assert same(everything(), with_foreign)
    put(target, ours)
    installation.uninstall()
    assert same(everything(), before)


@pytest.mark.parametrize("target", TARGETS)
@isolated
def test_a_foreign_patch_below_is_kept_and_said(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = foreign(raw(target))
    put(target, theirs)
    installation = install()
    below = {item.patch.target: item.below for item in installation.patches}
    assert [name for name, found in below.items() if found] == [target]
    assert "somebody_elses_wrapper" in str(below[target])
    (record,) = caplog.records
    assert f"  {target} (over {below[target]})" in record.getMessage()
    uninstall()
    assert raw(target) is theirs


@isolated
def test_what_is_patched_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with install():
        install()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    first, *lines = record.getMessage().splitlines()
    assert first.startswith("megatron.quant_state ")
    assert first.endswith(" patched:")
    assert lines == [f"  {target}" for target in TARGETS]


@pytest.mark.parametrize("known_by", ["environment", "torch.distributed"])
@isolated
def test_other_ranks_say_nothing(
    known_by: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: known_by != "environment")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setenv("RANK", "1" if known_by == "environment" else "0")
    install()
    assert caplog.records == []


@isolated
def test_without_transformer_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything()
    monkeypatch.setattr(wrappers, "HAVE_TE", False)
    installation = install()
    changed = {key for key, value in everything().items() if value is not before[key]}
    assert changed == {(MegatronModule, "set_is_first_microbatch")}
    (record,) = caplog.records
    assert "Transformer Engine is not installed, so no linear was patched" in record.getMessage()
    installation.uninstall()
    assert same(everything(), before)


WITHOUT_TE = """
import sys
import megatron.quant_state
for heavy in ("torch", "megatron.core", "transformer_engine", "numpy"):
    assert heavy not in sys.modules, heavy
sys.modules["transformer_engine"] = None
from megatron.core.transformer.module import MegatronModule
before = dict(MegatronModule.__dict__)
installation = megatron.quant_state.install()
after = dict(MegatronModule.__dict__)
print([item.patch.target for item in installation.patches])
print([name for name in before if before[name] is not after[name]])
installation.uninstall()
print([name for name in before if before[name] is not MegatronModule.__dict__[name]])
"""


def test_a_process_without_transformer_engine() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_TE],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    name = "set_is_first_microbatch"
    target = f"megatron.core.transformer.module.MegatronModule.{name}"
    assert result.stdout.splitlines() == [str([target]), str([name]), "[]"]
    assert "Transformer Engine is not installed, so no linear was patched" in result.stderr
    assert result.stderr.count(target) == 1


# --- generated orders -------------------------------------------------------------------------

#: Two patches that are installed one after the other, for foreign patches.
CROWDED = tuple(TARGETS)[:2]
STEPS = (
    "install",
    "uninstall",
    "with",
    *(f"{what} {index}" for what in ("wrap", "unwrap") for index in range(len(CROWDED))),
)


def check_order(steps: list[str]) -> None:
    """Take the steps, and after each compare all raw attributes with a stack of what was put."""
    stacks = {target: [raw(target)] for target in TARGETS}
    theirs: set[int] = set()
    handle: Any = None
    patched: dict[str, Any] = {}

    def act(function: Callable[[], Any]) -> Any:
        on_top = [name for name, ours in patched.items() if stacks[name][-1] is not ours]
        if on_top:
            with pytest.raises(ForeignPatchError, match=f"^{on_top[0]} was patched by "):
                function()
            return None
        return function()

    for step in steps:
        what, _, index = step.partition(" ")
        if what in ("install", "with"):
            installation = act(install)
            if installation is not None and not patched:
                handle = installation
                patched = {target: raw(target) for target in TARGETS}
                for target, ours in patched.items():
                    assert ours is not stacks[target][-1]
                    stacks[target].append(ours)
            elif installation is not None:
                assert installation is handle
        if what == "with" and patched:
            on_top = any(stacks[target][-1] is not ours for target, ours in patched.items())
            act(functools.partial(handle.__exit__, None, None, None))
        elif what == "uninstall":
            on_top = any(stacks[target][-1] is not ours for target, ours in patched.items())
            act(uninstall)
        if what in ("with", "uninstall") and patched and not on_top:
            for stack in stacks.values():
                stack.pop()
            patched = {}
        if what == "wrap":
            target = CROWDED[int(index)]
            stacks[target].append(foreign(raw(target)))
            theirs.add(id(stacks[target][-1]))
            put(target, stacks[target][-1])
        if what == "unwrap" and id(stacks[CROWDED[int(index)]][-1]) in theirs:
            target = CROWDED[int(index)]
            stacks[target].pop()
            put(target, stacks[target][-1])
        for target, stack in stacks.items():
            assert raw(target) is stack[-1], f"{target} after {step} of {steps}"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=12))
@example(["wrap 0", "install", "wrap 0", "uninstall", "unwrap 0", "install", "uninstall"])
@example(["install", "wrap 1", "with", "install", "unwrap 1", "uninstall", "unwrap 1", "with"])
def test_orders(steps: list[str]) -> None:
    in_a_fork(lambda: check_order(steps))


def test_the_orders_can_fail() -> None:
    """The negative control: a layer that leaves one patch behind."""

    def forgetful() -> None:
        from megatron.quant_state.patching import AppliedPatch

        module = importlib.import_module("megatron.quant_state.install")

        def restore_all_but_one(applied: tuple[AppliedPatch, ...]) -> None:
            restore_patches(applied[1:])

        module.restore_patches = restore_all_but_one
        with pytest.raises(AssertionError, match="set_is_first_microbatch after uninstall"):
            check_order(["install", "uninstall"])

    in_a_fork(forgetful)


# --- refusals: a Megatron or a Transformer Engine of another shape ------------------------------


def _without_class() -> None:
    del wrappers.TEGroupedLinear


def _class_is_a_function() -> None:
    wrappers.TEGroupedLinear = lambda *_: None


def _without_method() -> None:
    # The base class has one of that name, which is not the wrapper's.
    del wrappers.TELayerNormColumnParallelLinear.forward


def _method_is_something_else() -> None:
    wrappers.TELinear.forward = property(lambda self: None)


def _signature() -> None:
    def forward(self: Any, hidden_states: Any) -> Any:
        return (self.is_first_microbatch, self.disable_parameter_transpose_cache)

    wrappers.TELinear.forward = forward


def _one_parameter_less() -> None:
    def forward(self: Any, x: Any) -> Any:
        return (self.is_first_microbatch, self.disable_parameter_transpose_cache)

    wrappers.TEGroupedLinear.forward = forward


def _mention() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.is_first_microbatch

    wrappers.TELinear.forward = forward


def _mention_of_megatron() -> None:
    def set_is_first_microbatch(self: Any) -> None:
        self.config.arm(self)

    MegatronModule.set_is_first_microbatch = set_is_first_microbatch


def _impolite_wrapper() -> None:
    below = wrappers.TELinear.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return below(*args, **kwargs)

    wrappers.TELinear.forward = forward


def _without_skip_tensor() -> None:
    del FP8GlobalStateManager.get_skip_fp8_weight_update_tensor
    state = FP8GlobalStateManager.quantization_state
    del type(state).skip_fp8_weight_update_tensor
    del state.skip_fp8_weight_update_tensor


def _without_flag() -> None:
    def forward(self: Any, inp: Any) -> Any:
        return inp

    transformer_engine.pytorch.LayerNormLinear.forward = forward


def _without_workspaces() -> None:
    def __init__(self: Any, name: str | None = None) -> None:
        self.workspaces = {}

    TransformerEngineBaseModule.__init__ = __init__


def _without_load() -> None:
    del TransformerEngineBaseModule._load_from_state_dict


REFUSALS: list[tuple[Callable[[], None], str]] = [
    (
        _without_class,
        (
            f"cannot patch {WRAPPERS}.TEGroupedLinear.forward: looked for a class "
            "'TEGroupedLinear', found nothing of that name. Nothing was patched."
        ),
    ),
    (_class_is_a_function, "looked for a class 'TEGroupedLinear', found a function."),
    (
        _without_method,
        (
            f"cannot patch {WRAPPERS}.TELayerNormColumnParallelLinear.forward: looked for a method "
            "'forward' of the class itself, found nothing of that name."
        ),
    ),
    (_method_is_something_else, "looked for a method 'forward' of the class itself, found a prope"),
    (_signature, "looked for a signature (self, x, ...), found (self, hidden_states) in "),
    (_one_parameter_less, "looked for a signature (self, x, m_splits, ...), found (self, x) in "),
    (_mention, "looked for code that uses 'disable_parameter_transpose_cache', found "),
    (_mention_of_megatron, "MegatronModule.set_is_first_microbatch: looked for code that uses 'is"),
    (_impolite_wrapper, "looked for a signature (self, x, ...), found (args, kwargs) in "),
    (_without_skip_tensor, f"transformer-engine {transformer_engine.__version__} has not: "),
    (_without_skip_tensor, "FP8GlobalStateManager.get_skip_fp8_weight_update_tensor."),
    (_without_flag, "parameter is_first_microbatch of LayerNormLinear.forward."),
    (_without_workspaces, "TransformerEngineBaseModule._fp8_workspaces, the cache of quantized we"),
    (_without_load, "TransformerEngineBaseModule._load_from_state_dict: looked for a method "),
]


@pytest.mark.parametrize(
    ("reshape", "message"), REFUSALS, ids=[reshape.__name__.strip("_") for reshape, _ in REFUSALS]
)
@isolated
def test_another_shape_is_refused(reshape: Callable[[], None], message: str) -> None:
    reshape()
    before = everything()
    with pytest.raises(UnsupportedVersionError) as caught:
        install()
    assert message in str(caught.value)
    assert "Nothing was patched." in str(caught.value)
    assert same(everything(), before)
    assert uninstall() is None
    assert same(everything(), before)


@pytest.mark.parametrize("missing", ["megatron.core", "megatron.core.extensions"])
@isolated
def test_without_megatron_core(missing: str) -> None:
    for name in [name for name in sys.modules if name.startswith("megatron.core")]:
        del sys.modules[name]
    sys.modules[missing] = None  # type: ignore[assignment]
    before = everything()
    with pytest.raises(UnsupportedVersionError, match="pip install megatron-core"):
        install()
    assert same(everything(), before)


@isolated
def test_another_module_that_is_missing_is_named() -> None:
    for name in [name for name in sys.modules if name.startswith("megatron.core")]:
        del sys.modules[name]
    sys.modules["megatron.core.tensor_parallel"] = None  # type: ignore[assignment]
    with pytest.raises(ModuleNotFoundError, match=r"megatron\.core\.tensor_parallel"):
        install()


# --- patches of a class of our own --------------------------------------------------------------


class Owner:
    """Methods of each kind that the patching knows."""

    @staticmethod
    def static(x: int, factor: int = 2) -> int:
        return abs(x) * factor

    def method(self, x: int) -> int:
        return abs(x)


def plus_one(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> int:
        return function(*args, **kwargs) + 1

    return wrapper


def patch_of(method: str, *parameters: str, mentions: tuple[str, ...] = ("abs",)) -> Patch:
    return Patch("owners", "Owner", method, parameters, mentions, plus_one, "a test")


@pytest.fixture(autouse=True)
def _owners(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("owners")
    module.Owner = Owner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "owners", module)


@isolated
def test_a_staticmethod_stays_one() -> None:
    before = dict(Owner.__dict__)
    applied = apply_patches([patch_of("static", "x"), patch_of("method", "self", "x")])
    assert isinstance(Owner.__dict__["static"], staticmethod)
    assert (Owner.static(-3), Owner().static(-3, factor=5), Owner().method(-3)) == (7, 16, 4)
    assert [item.below for item in applied] == [None, None]
    restore_patches(applied)
    assert same(dict(Owner.__dict__), before)
    assert isinstance(Owner.__dict__["static"], staticmethod)
    assert (Owner.static(-3), Owner().static(-3), Owner().method(-3)) == (6, 6, 3)


@isolated
def test_all_or_nothing() -> None:
    before = dict(Owner.__dict__)
    good = patch_of("static", "x")
    bad = [
        (patch_of("method", "self", "y"), r"looked for a signature \(self, y, \.\.\.\), found "),
        (patch_of("method", "self", mentions=("abs", "pow")), "looked for code that uses 'pow'"),
        (patch_of("missing"), "looked for a method 'missing' of the class itself, found nothing"),
        (patch_of("__hash__"), "looked for a method '__hash__' of the class itself, found nothing"),
        (
            Patch("no_such_module", "Owner", "static", (), (), plus_one, "a test"),
            "looked for the module no_such_module, found No module named 'no_such_module'",
        ),
    ]
    for patch, message in bad:
        with pytest.raises(UnsupportedVersionError, match=message):
            apply_patches([good, patch])
        assert same(dict(Owner.__dict__), before)
    applied = apply_patches([good, patch_of("method", "self")])
    after = dict(Owner.__dict__)
    for standing, described in [(len, "<built-in function len>"), (None, "nothing")]:
        Owner.method = standing  # type: ignore[assignment, method-assign]
        with pytest.raises(ForeignPatchError, match=rf"now {described} stands there"):
            restore_patches(applied)
        assert Owner.__dict__["static"] is after["static"]
    Owner.method = after["method"]  # type: ignore[method-assign]
    restore_patches(applied)
    assert same(dict(Owner.__dict__), before)


def test_a_fork_that_dies_or_fails_is_seen() -> None:
    """The negative control of this file's own tool."""
    with pytest.raises(pytest.fail.Exception, match="status 9 "):
        in_a_fork(lambda: os.kill(os.getpid(), 9))
    with pytest.raises(pytest.fail.Exception, match="AssertionError: seen"):
        in_a_fork(lambda: _raise(AssertionError("seen")))


def _raise(error: BaseException) -> None:
    raise error
