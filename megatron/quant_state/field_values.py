# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Turns a YAML value into what a field of a Megatron dataclass takes, or says why it cannot."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

__all__ = ["field_types", "field_value"]

_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Type hints of a dataclass's fields, by name; private fields are left out.

    A hint that cannot be resolved is ``Any``, so that a field is never lost.
    """
    try:
        hints = typing.get_type_hints(cls)
    except NameError:
        hints = {}
    names = [f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")]
    return {name: hints.get(name, Any) for name in names}


def field_value(cls: type, name: str, value: Any) -> Any:
    """The value to give to field ``name`` of dataclass ``cls``.

    Beyond plain YAML types: activation functions, dtypes (``bf16``, ``float32``) and enum members
    by name; a list for a tuple; ``1e-5``, which YAML 1.1 reads as text, for a number; and a layer
    pattern such as ``([0]*3+[1]*58)`` where Megatron's own flag takes one.

    Raises:
        ValueError: the value does not fit; the text says what was expected.
    """
    hint = field_types(cls)[name]
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    # Some fields say `x: int = None`.
    if value is None and field.default is None:
        return None
    if name == "activation_func":
        return _activation(value)
    converted = _convert(value, hint)
    if converted is _REFUSED:
        raise ValueError(f"expected {_described(hint)}, found {_shown(value)}")
    return converted


class _Refused(enum.Enum):
    REFUSED = "refused"


_REFUSED = _Refused.REFUSED


def _convert(value: Any, hint: Any) -> Any:
    """``value`` as the hint wants it, or ``_REFUSED``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if hint is type(None):
        return None if value is None else _REFUSED
    if origin in (Union, types.UnionType):
        return _convert_union(value, arguments)
    if origin is Literal:
        fits = (v for v in arguments if v == value and type(v) is type(value))
        return next(fits, _REFUSED)
    if hint is list or origin is list:
        return _convert_list(value, arguments[0] if arguments else Any)
    if hint is tuple or origin is tuple:
        return _convert_tuple(value, arguments)
    if isinstance(hint, type):
        return _convert_plain(value, hint)
    return _REFUSED


def _convert_union(value: Any, arguments: tuple[Any, ...]) -> Any:
    # An exact match first, so that a list pattern's text is not taken for a plain str elsewhere.
    for argument in arguments:
        converted = _convert(value, argument)
        if converted is not _REFUSED:
            return converted
    return _REFUSED


def _convert_list(value: Any, item: Any) -> Any:
    if isinstance(value, str) and item is int:
        value = _layer_pattern(value)
    if not isinstance(value, list):
        return _REFUSED
    converted = [_convert(v, item) for v in value]
    return _REFUSED if _REFUSED in converted else converted


def _convert_tuple(value: Any, arguments: tuple[Any, ...]) -> Any:
    if not isinstance(value, list):
        return _REFUSED
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = arguments[:1] * len(value)
    if arguments and len(arguments) != len(value):
        return _REFUSED
    items = arguments or (Any,) * len(value)
    converted = tuple(_convert(v, item) for v, item in zip(value, items, strict=True))
    return _REFUSED if _REFUSED in converted else converted


def _convert_plain(value: Any, hint: type) -> Any:
    if issubclass(hint, enum.Enum):
        return hint.__members__.get(value, _REFUSED) if isinstance(value, str) else _REFUSED
    if f"{hint.__module__}.{hint.__qualname__}" == "torch.dtype":
        return _dtype(value)
    if hint is float:
        return _number(value)
    if hint is int and isinstance(value, bool):
        return _REFUSED
    return value if hint in (bool, int, str) and isinstance(value, hint) else _REFUSED


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return _REFUSED
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return _REFUSED
    return value if isinstance(value, (int, float)) else _REFUSED


def _dtype(value: Any) -> Any:
    import torch

    if not isinstance(value, str):
        return _REFUSED
    name = value.removeprefix("torch.")
    dtype = getattr(torch, _DTYPES.get(name, name), None)
    return dtype if isinstance(dtype, torch.dtype) else _REFUSED


def _layer_pattern(text: str) -> Any:
    """The list that e.g. ``([0]*3+[1]*58)`` stands for; anything but ``+`` and ``*`` is refused."""

    def fold(node: ast.AST) -> Any:
        if isinstance(node, ast.Expression):
            return fold(node.body)
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10_000:
            return node.value
        if isinstance(node, ast.List):
            return [fold(item) for item in node.elts]
        if isinstance(node, ast.BinOp):
            left, right = fold(node.left), fold(node.right)
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
            repeats = right if isinstance(left, list) else left
            if isinstance(node.op, ast.Mult) and isinstance(repeats, int):
                items = left if isinstance(left, list) else right
                if isinstance(items, list) and len(items) * repeats <= 10_000:
                    return items * repeats
        raise ValueError

    try:
        return fold(ast.parse(text.strip(), mode="eval"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return _REFUSED


def _activation(value: Any) -> Callable[..., Any]:
    import torch.nn.functional as F

    names: dict[str, Callable[..., Any]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
    # What else a Megatron has depends on its version.
    for name, path in (
        ("squared_relu", "megatron.core.activations"),
        ("quick_gelu", "megatron.core.fusions.fused_bias_geglu"),
    ):
        try:
            names[name] = getattr(__import__(path, fromlist=[name]), name)
        except (ImportError, AttributeError):
            continue
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"expected one of {', '.join(names)}, found {_shown(value)}")
    return names[value]


def _described(hint: Any) -> str:
    """A hint in the words of a message."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_described(a) for a in arguments))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(repr, arguments))
    if hint is list or origin is list:
        item = typing.get_args(hint)
        return f"a list (each {_described(item[0])})" if item else "a list"
    if origin is tuple:
        return f"a list of {len(arguments)}" if Ellipsis not in arguments else "a list"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"one of {', '.join(hint.__members__)}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    words[type(None)] = "null"
    if isinstance(hint, type) and hint in words:
        return words[hint]
    if getattr(hint, "__qualname__", "") == "dtype":
        return "a dtype (bf16, fp16 or fp32)"
    return "an object that a description cannot hold"


def _shown(value: Any) -> str:
    text = {True: "true", False: "false", None: "null"}.get(value) if _is_word(value) else None
    if text is None:
        text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)
