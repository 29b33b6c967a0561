# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Fold names that differ only in numbers: ``layers.[3-60].mlp.experts.linear_fc1.weight[0-7]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod

__all__ = ["fold_names"]

# The digits of `linear_fc1` name a module; they count nothing.
_COUNTS = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=weight)\d+$|(?<=bias)\d+$")


def fold_names(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Fold names into rows.

    Names of one row differ in layer and expert numbers alone, and stand for every combination of
    the numbers shown.

    Args:
        names: dotted names, each once.

    Returns:
        Pairs of the folded name, such as ``decoder.layers.[3-60].mlp.linear_fc1.weight``, and the
        names it stands for, in the order in which the rows were first met.
    """
    by_shape: dict[str, list[str]] = {}
    for name in names:
        by_shape.setdefault(_COUNTS.sub("#", name), []).append(name)
    rows = []
    for shape, members in by_shape.items():
        numbers = {name: tuple(map(int, _COUNTS.findall(name))) for name in members}
        for group in _rectangles(members, numbers):
            columns = list(zip(*(numbers[name] for name in group), strict=True))
            folded = shape
            for column in columns:
                folded = folded.replace("#", _ranges(sorted(set(column))), 1)
            rows.append((folded, group))
    return rows


def _rectangles(
    names: Sequence[str], numbers: dict[str, tuple[int, ...]], position: int = 0
) -> list[list[str]]:
    """Groups whose numbers are all combinations of what each position holds."""
    columns = list(zip(*(numbers[name] for name in names), strict=True))
    if prod(len(set(column)) for column in columns) == len(names) or position == len(columns):
        return [list(names)]
    # Layers that hold the same set of experts go together.
    held: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    by_number: dict[int, list[str]] = {}
    for name in names:
        by_number.setdefault(numbers[name][position], []).append(name)
    for number in sorted(by_number):
        rest = tuple(
            sorted(
                n[:position] + n[position + 1 :]
                for n in map(numbers.__getitem__, by_number[number])
            )
        )
        held.setdefault(rest, []).extend(by_number[number])
    return [row for group in held.values() for row in _rectangles(group, numbers, position + 1)]


def _ranges(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    parts = []
    for _, run in groupby(enumerate(values), key=lambda pair: pair[1] - pair[0]):
        block = [value for _, value in run]
        parts.append(str(block[0]) if len(block) == 1 else f"{block[0]}-{block[-1]}")
    return f"[{','.join(parts)}]"
