# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Glob patterns as Megatron matches them: does one match, does one cover another."""

from __future__ import annotations

import fnmatch
import string

__all__ = ["covers", "glob_matches"]

# Every character that a path of named_modules() is made of in Megatron.
_ALPHABET = string.ascii_letters + string.digits + "_."

# Pairs of state sets to look at before giving up; real patterns need a few dozen.
_MOST_STATES = 20_000

# One element of a pattern: the characters that it takes, or None for `*`.
_Element = frozenset[str] | None


def glob_matches(path: str, pattern: str) -> bool:
    """Whether Megatron's GlobMatcher takes the path (``quantization/quant_config.py``, 0.19.2).

    Args:
        path: a module's name, as ``named_modules()`` of the unwrapped model gives it.
        pattern: ``*`` also matches dots; case counts on POSIX.
    """
    return fnmatch.fnmatch(path, pattern)


def covers(first: str, second: str) -> bool:
    """Whether every module path that ``second`` matches is matched by ``first`` too.

    Exact over letters, digits, ``_`` and ``.``; False where that cannot be told in bounded time.
    """
    outer, inner = _elements(first), _elements(second)
    # The inner pattern's automaton runs beside the outer one's; both as sets of positions.
    start = (_closure(frozenset({0}), inner), _closure(frozenset({0}), outer))
    seen, waiting = {start}, [start]
    while waiting:
        inside, outside = waiting.pop()
        if len(inner) in inside and len(outer) not in outside:
            return False
        for character in _ALPHABET:
            next_inside = _step(inside, inner, character)
            if not next_inside:
                continue
            following = (next_inside, _step(outside, outer, character))
            if following not in seen:
                if len(seen) >= _MOST_STATES:
                    return False
                seen.add(following)
                waiting.append(following)
    return True


def _elements(pattern: str) -> list[_Element]:
    elements: list[_Element] = []
    position = 0
    while position < len(pattern):
        length = 1
        if pattern[position] == "[":
            # As fnmatch.translate reads it: `]` may come first, and `[` without an end is itself.
            end = position + 1
            end += pattern[end : end + 1] == "!"
            end += pattern[end : end + 1] == "]"
            close = pattern.find("]", end)
            length = close - position + 1 if close >= 0 else 1
        token = pattern[position : position + length]
        if token == "*":
            elements.append(None)
        else:
            matched = (c for c in _ALPHABET if fnmatch.fnmatchcase(c, token))
            elements.append(frozenset(matched))
        position += length
    return elements


def _closure(positions: frozenset[int], elements: list[_Element]) -> frozenset[int]:
    reached = set(positions)
    for position in positions:
        after = position
        while after < len(elements) and elements[after] is None:
            after += 1
            reached.add(after)
    return frozenset(reached)


def _step(positions: frozenset[int], elements: list[_Element], character: str) -> frozenset[int]:
    reached = set()
    for position in positions:
        if position == len(elements):
            continue
        element = elements[position]
        if element is None:
            reached.add(position)
        elif character in element:
            reached.add(position + 1)
    return _closure(frozenset(reached), elements)
