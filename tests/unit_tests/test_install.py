# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Install orders, each in a process of its own: exact restoration, refusals, what is said."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import pytest

from megatron.quant_state import install, uninstall
from megatron.quant_state.errors import ForeignPatchError, UnsupportedVersionError
from megatron.quant_state.patching import Patch, apply_patches, restore_patches
from tests.unit_tests import wrappers

# By name: the package shows a function where the submodule `install` was.
install_module = importlib.import_module("megatron.quant_state.install")

PATCHES = (*install_module.MEGATRON_PATCHES, *install_module.TE_PATCHES)
TARGETS = [patch.target for patch in PATCHES]


def owner_of(patch: Patch) -> type:
    owner: type = getattr(importlib.import_module(patch.module), patch.class_name)
    return owner


def raw_attributes() -> list[Any]:
    return [owner_of(patch).__dict__.get(patch.method) for patch in PATCHES]


def isolated(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in a fork: what it patches dies with it, and Megatron is imported already."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            said = b""
            try:
                test(*args, **kwargs)
            except BaseException:
                said = traceback.format_exc().encode()
            os.write(write, said[-60000:])
            os._exit(bool(said))
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, said.decode()

    return run


def wrap_foreign(owner: type, method: str) -> Callable[..., Any]:
    """Somebody else's patch, well made, on top of what is there."""
    below = owner.__dict__[method]

    @functools.wraps(below)
    def somebody_elses_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return below(self, *args, **kwargs)

    setattr(owner, method, somebody_elses_forward)
    return somebody_elses_forward


def test_isolated_reports_a_failure() -> None:
    @isolated
    def fails() -> None:
        raise ValueError("seen by the parent")

    with pytest.raises(AssertionError, match="seen by the parent"):
        fails()


@isolated
def test_uninstall_restores_every_attribute() -> None:
    before = raw_attributes()
    handle = install()
    patched = raw_attributes()
    assert all(a is not b for a, b in zip(before, patched, strict=True))
    handle.uninstall()
    assert all(a is b for a, b in zip(before, raw_attributes(), strict=True))


@pytest.mark.parametrize("order", list(itertools.product("iuc", repeat=4)), ids="".join)
@isolated
def test_orders(order: tuple[str, ...]) -> None:
    """i(nstall), u(ninstall), c(ontext): installed exactly where the last word says so."""
    before = raw_attributes()
    handle = None
    for action in order:
        if action == "i":
            again = install()
            assert handle is None or again is handle
            handle = again
        elif action == "u":
            uninstall()
            handle = None
        else:
            with install() as handle:
                assert [item.patch.target for item in handle.patches] == TARGETS
            handle = None
        now = raw_attributes()
        is_patched = [a is not b for a, b in zip(before, now, strict=True)]
        assert is_patched == [handle is not None] * len(PATCHES)


@isolated
def test_an_old_handle_does_not_touch_a_new_installation() -> None:
    old = install()
    old.uninstall()
    new = install()
    patched = raw_attributes()
    old.uninstall()
    assert all(a is b for a, b in zip(patched, raw_attributes(), strict=True))
    new.uninstall()


@pytest.mark.parametrize("patch", PATCHES, ids=TARGETS)
@isolated
def test_a_foreign_patch_on_top_is_refused_by_name(patch: Patch) -> None:
    before = raw_attributes()
    handle = install()
    ours = owner_of(patch).__dict__[patch.method]
    wrap_foreign(owner_of(patch), patch.method)
    patched = raw_attributes()
    for action in (handle.uninstall, uninstall, install):
        with pytest.raises(ForeignPatchError) as caught:
            action()
        assert patch.target in str(caught.value)
        assert "somebody_elses_forward" in str(caught.value)
        assert __file__ in str(caught.value)
        assert all(a is b for a, b in zip(patched, raw_attributes(), strict=True))
    setattr(owner_of(patch), patch.method, ours)
    handle.uninstall()
    assert all(a is b for a, b in zip(before, raw_attributes(), strict=True))


@isolated
def test_a_foreign_patch_below_stays_and_is_said() -> None:
    owner = owner_of(PATCHES[1])
    foreign = wrap_foreign(owner, "forward")
    with install() as handle:
        below = {item.patch.class_name: item.below for item in handle.patches}
        assert "somebody_elses_forward" in below.pop(owner.__name__)
        assert set(below.values()) == {None}
    assert owner.__dict__["forward"] is foreign


@isolated
def test_a_foreign_patch_below_that_hides_the_method_is_refused() -> None:
    owner = owner_of(PATCHES[1])
    owner.forward = lambda self, *args: None
    before = raw_attributes()
    with pytest.raises(UnsupportedVersionError, match=r"a signature \(self, x, ...\)"):
        install()
    assert all(a is b for a, b in zip(before, raw_attributes(), strict=True))


def without_class(patch: Patch) -> str:
    delattr(importlib.import_module(patch.module), patch.class_name)
    return f"a class '{patch.class_name}', found nothing of that name"


def without_method(patch: Patch) -> str:
    delattr(owner_of(patch), patch.method)
    return f"a method '{patch.method}' of the class itself, found nothing of that name"


def other_signature(patch: Patch) -> str:
    def renamed(me: Any) -> None: ...

    setattr(owner_of(patch), patch.method, renamed)
    return f"a signature ({', '.join(patch.parameters)}, ...), found (me) in "


def other_code(patch: Patch) -> str:
    namespace: dict[str, Any] = {}
    exec(f"def other({', '.join(patch.parameters)}): ...", namespace)
    setattr(owner_of(patch), patch.method, namespace["other"])
    return f"code that uses '{patch.mentions[0]}'"


@pytest.mark.parametrize("patch", PATCHES, ids=TARGETS)
@pytest.mark.parametrize(
    "change", [without_class, without_method, other_signature, other_code], ids=lambda f: f.__name__
)
@isolated
def test_another_shape_is_refused_with_nothing_patched(
    patch: Patch, change: Callable[[Patch], str]
) -> None:
    words = change(patch)
    here = [getattr(importlib.import_module(p.module), p.class_name, None) for p in PATCHES]
    before = [dict(owner.__dict__) if owner else None for owner in here]
    with pytest.raises(UnsupportedVersionError) as caught:
        install()
    assert words in str(caught.value)
    assert patch.target in str(caught.value)
    assert "Nothing was patched" in str(caught.value)
    after = [dict(owner.__dict__) if owner else None for owner in here]
    assert before == after


@pytest.mark.parametrize(
    "name", ["is_fp8_enabled", "fp8_graph_capturing", "get_skip_fp8_weight_update_tensor"]
)
@isolated
def test_a_missing_part_of_te_is_named(name: str) -> None:
    delattr(wrappers.FP8GlobalStateManager, name)
    before = raw_attributes()
    with pytest.raises(UnsupportedVersionError, match=f"has not: FP8GlobalStateManager.{name}"):
        install()
    assert all(a is b for a, b in zip(before, raw_attributes(), strict=True))


@isolated
def test_it_is_said_once_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.quant_state").addHandler(handler)
    with install():
        install()
    assert len(said) == 1
    assert all(target in said[0] for target in TARGETS)
    monkeypatch.setattr(wrappers.torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("RANK", "1")
    with install():
        assert len(said) == 1


class WithStaticMethod:
    @staticmethod
    def method(ctx: int) -> int:
        return ctx


def test_a_static_method_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "somewhere", types.ModuleType("somewhere"))
    sys.modules["somewhere"].WithStaticMethod = WithStaticMethod  # type: ignore[attr-defined]
    raw = WithStaticMethod.__dict__["method"]
    patch = Patch(
        module="somewhere",
        class_name="WithStaticMethod",
        method="method",
        parameters=("ctx",),
        mentions=(),
        wrap=lambda function: lambda ctx: function(ctx) + 1,
        reaches="a test",
    )
    applied = apply_patches([patch])
    assert isinstance(WithStaticMethod.__dict__["method"], staticmethod)
    assert WithStaticMethod.method(1) == 2
    restore_patches(applied)
    assert WithStaticMethod.__dict__["method"] is raw


def test_without_transformer_engine() -> None:
    """A real process without any transformer_engine."""
    code = """
import megatron.quant_state as q
from megatron.core.transformer.module import MegatronModule
before = MegatronModule.__dict__["set_is_first_microbatch"]
with q.install() as handle:
    print(*(item.patch.target for item in handle.patches))
print(MegatronModule.__dict__["set_is_first_microbatch"] is before)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_path_without_engine())}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[-2:] == [TARGETS[0], "True"]
    assert "Transformer Engine is not installed, so no linear was patched" in done.stderr


def _path_without_engine() -> list[str]:
    engine = os.path.dirname(os.path.dirname(wrappers.reference.__file__))
    return [entry for entry in sys.path if entry and os.path.abspath(entry) != engine]
