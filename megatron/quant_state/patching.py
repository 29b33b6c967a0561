# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A patch of one method: find it, check its shape, wrap it, restore it exactly.

All patches of a set are checked before the first is applied or restored, so a set is in place as a
whole or not at all.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from megatron.quant_state.errors import ForeignPatchError, UnsupportedVersionError

__all__ = ["AppliedPatch", "Patch", "apply_patches", "restore_patches"]


@dataclass(frozen=True)
class Patch:
    """One method that is to be wrapped, and the shape that the wrapper relies on.

    Attributes:
        module: name of the module that holds the class.
        class_name: the class; the method must be its own, not inherited.
        method: the method, static or not.
        parameters: names that the method's signature begins with.
        mentions: attributes that the method's code must name, since the wrapper acts through them.
        wrap: takes the method's function, returns what stands in for it.
        reaches: for people: what the patch is for.
        inherited: the class need not have the method itself; what it inherits is wrapped then, and
            the class's own attribute is taken away again when the patch is.
    """

    module: str
    class_name: str
    method: str
    parameters: tuple[str, ...]
    mentions: tuple[str, ...]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    reaches: str
    inherited: bool = False

    @property
    def target(self) -> str:
        """The dotted name of the method."""
        return f"{self.module}.{self.class_name}.{self.method}"


@dataclass(frozen=True)
class AppliedPatch:
    """A patch that is in place.

    Attributes:
        patch: what was asked for.
        owner: the class.
        before: the raw attribute that was in ``owner.__dict__``; a staticmethod stays one. None
            where the class inherited the method.
        after: the raw attribute that stands there now.
        below: name of somebody else's wrapper that was there before, or None.
    """

    patch: Patch
    owner: type
    before: Any
    after: Any
    below: str | None


def apply_patches(patches: Iterable[Patch]) -> tuple[AppliedPatch, ...]:
    """Put patches in place, all of them or none.

    Raises:
        UnsupportedVersionError: a class, method, signature or attribute is not as expected; the
            message says what was looked for and what was found. Nothing is patched then.
    """
    applied = tuple(_prepare(patch) for patch in patches)
    for item in applied:
        setattr(item.owner, item.patch.method, item.after)
    return applied


def restore_patches(applied: Sequence[AppliedPatch]) -> None:
    """Put back exactly what was there, all of it or nothing.

    Raises:
        ForeignPatchError: as :func:`check_on_top`. Nothing is restored then.
    """
    check_on_top(applied)
    for item in applied:
        if item.before is None:
            delattr(item.owner, item.patch.method)
        else:
            setattr(item.owner, item.patch.method, item.before)


def check_on_top(applied: Sequence[AppliedPatch]) -> None:
    """Check that nobody else wrapped or replaced a patched method since.

    Raises:
        ForeignPatchError: somebody did; the message names the method and what stands there.
    """
    for item in applied:
        now = item.owner.__dict__.get(item.patch.method)
        if now is not item.after:
            raise ForeignPatchError(
                f"{item.patch.target} was patched by megatron.quant_state, and now "
                f"{_describe(now)} stands there. Remove that patch first; nothing was changed."
            )


def _prepare(patch: Patch) -> AppliedPatch:
    owner = _owner(patch)
    before = owner.__dict__.get(patch.method)
    raw = before
    if before is None and patch.inherited:
        raw = getattr(owner, patch.method, None)
    function = raw.__func__ if isinstance(raw, staticmethod) else raw
    if not isinstance(function, FunctionType):
        found = "nothing of that name" if raw is None else f"a {type(raw).__name__}"
        raise _unsupported(patch, f"a method '{patch.method}' of the class itself", found)
    parameters = tuple(inspect.signature(function).parameters)
    if parameters[: len(patch.parameters)] != patch.parameters:
        wanted = f"a signature ({', '.join(patch.parameters)}, ...)"
        raise _unsupported(patch, wanted, f"({', '.join(parameters)}) in {_describe(raw)}")
    innermost = inspect.unwrap(function)
    for name in patch.mentions:
        if name not in innermost.__code__.co_names:
            found = f"{_describe(innermost)}, which never does"
            raise _unsupported(patch, f"code that uses '{name}'", found)
    wrapped = patch.wrap(function)
    after = staticmethod(wrapped) if isinstance(raw, staticmethod) else wrapped
    below = None if function.__module__ == innermost.__module__ else _describe(function)
    if function is not innermost and below is None:
        # functools.wraps hides where a wrapper comes from; its code tells.
        code_file = function.__code__.co_filename
        # A method that is a generator in a contextmanager is its owner's own.
        own = (innermost.__code__.co_filename, contextlib.__file__)
        below = None if code_file in own else _describe(function)
    return AppliedPatch(patch, owner, before, after, below)


def _owner(patch: Patch) -> type:
    try:
        module = importlib.import_module(patch.module)
    except ImportError as error:
        raise _unsupported(patch, f"the module {patch.module}", f"{error}") from error
    owner = getattr(module, patch.class_name, None)
    if not inspect.isclass(owner):
        found = "nothing of that name" if owner is None else f"a {type(owner).__name__}"
        raise _unsupported(patch, f"a class '{patch.class_name}'", found)
    return owner


def _unsupported(patch: Patch, looked_for: str, found: str) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"cannot patch {patch.target}: looked for {looked_for}, found {found}. Nothing was "
        "patched. This megatron-core or transformer-engine is not one that this release knows."
    )


def _describe(raw: Any) -> str:
    """Names a function by where its code stands, since functools.wraps copies all other names."""
    function = raw.__func__ if isinstance(raw, staticmethod) else raw
    if not isinstance(function, FunctionType):
        return "nothing" if raw is None else repr(raw)
    code = function.__code__
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"
