# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Reads the YAML a user wrote into plain values, and remembers where each key stands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.quant_state.errors import InputError, Location

__all__ = [
    "DuplicateKeyError",
    "LocatedDocument",
    "nearest",
    "parse_yaml",
    "read_text",
    "read_yaml",
]

#: A path of mapping keys and list indices from the root, e.g. ``("ddp", "bucket_size")``.
KeyPath = tuple[Any, ...]

_CORE_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str")}
_MERGE_TAG = "tag:yaml.org,2002:merge"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"

# Aliases share nodes, so a few lines can stand for billions of values.
_MOST_VALUES = 100_000

# No field is a wider integer, and Python refuses to print one of more than 4300 digits.
_INTEGER_BITS = 63


class DuplicateKeyError(InputError):
    """A mapping has a key twice; YAML readers keep the last one and say nothing."""


@dataclass(frozen=True)
class LocatedDocument:
    """Plain values of a YAML document.

    Attributes:
        value: None, bool, int, float, str, or lists and dicts of them.
        locations: for each key path, where the key (or the list item) stands.
    """

    value: Any
    locations: dict[KeyPath, Location] = field(default_factory=dict)


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``name`` most likely was meant to be, or None if none is close."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return close[0] if close else None


def read_text(path: str | Path, location: Location | None = None) -> str:
    """Text of a UTF-8 file.

    Args:
        path: the file.
        location: who named the file, where that is not the file itself.

    Raises:
        InputError: the file is missing, a directory, unreadable or not UTF-8.
    """
    where = location or Location(str(path))
    named = f" '{path}'" if location else ""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"no such file{named}; check the path", where) from None
    except IsADirectoryError:
        raise InputError(f"expected a file, found a directory{named}", where) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot read the file{named}: {reason}", where) from None
    except ValueError as error:  # a NUL in the name
        raise InputError(f"not a file name{named}: {error}", where) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8 text (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        raise InputError(message, Location(str(path), line)) from None


def read_yaml(path: str | Path) -> LocatedDocument:
    """Plain values and locations of a YAML file.

    Raises:
        InputError: as :func:`read_text` and :func:`parse_yaml`.
    """
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, file: str) -> LocatedDocument:
    """Plain values and locations of YAML text; ``file`` is the name that locations carry.

    An empty document has the value None. Keys stand in the order in which PyYAML has them, those
    of a ``<<`` merge first.

    Raises:
        DuplicateKeyError: a mapping has a key twice.
        InputError: malformed YAML, an unusable key, a tag beyond YAML's core types, an integer
            beyond 64 bits.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return LocatedDocument(None)
        reader = _Reader(file)
        return LocatedDocument(reader.value(root, ()), reader.locations)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(p for p in (error.context, error.problem) if p)
        where = Location(file, mark.line + 1, mark.column + 1) if mark else Location(file)
        raise InputError(f"malformed YAML: {problem}", where) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        message = f"malformed YAML: character #x{ord(text[error.position]):04x} is not allowed"
        raise InputError(message, Location(file, line, column)) from None
    except RecursionError:
        message = "malformed YAML: nested too deeply, or a value that contains itself"
        raise InputError(message, Location(file)) from None


class _Reader:
    """Turns composed nodes into values; one object a document."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.locations: dict[KeyPath, Location] = {}
        self.values_read = 0
        self.construct = yaml.SafeLoader("")

    def at(self, node: yaml.Node) -> Location:
        return Location(self.file, node.start_mark.line + 1, node.start_mark.column + 1)

    def count(self, values: int) -> None:
        self.values_read += values
        if self.values_read > _MOST_VALUES:
            raise InputError(f"more than {_MOST_VALUES} values", Location(self.file))

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count(1)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                item_path = (*path, index)
                self.locations[item_path] = self.at(item)
                items.append(self.value(item, item_path))
            return items
        return self.scalar(node)

    def scalar(self, node: yaml.Node) -> Any:
        if node.tag == _TIMESTAMP_TAG:
            return node.value  # no field is a date, so what looks like one is text
        if node.tag not in _CORE_TAGS:
            raise InputError(f"the tag {_short(node.tag)} cannot be used here", self.at(node))
        try:
            value = self.construct.construct_object(node)
        except ValueError:  # e.g. "!!int four"
            message = f"{_clipped(node.value)!r} is no {_short(node.tag)}"
            raise InputError(message, self.at(node)) from None
        if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
            message = f"{_clipped(node.value)} does not fit into 64 bits"
            raise InputError(message, self.at(node))
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            # An escape, since UTF-8 has none: half a character, which nothing can print.
            message = f"{_clipped(value)!a} holds a surrogate, which is no character"
            raise InputError(message, self.at(node))
        return value

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        if node.tag != "tag:yaml.org,2002:map":
            raise InputError(f"the tag {_short(node.tag)} cannot be used here", self.at(node))
        values: dict[Any, Any] = {}
        pairs = [(*self.key(key_node), value_node) for key_node, value_node in self.own(node)]
        self.check_duplicates(pairs)
        # As in PyYAML, what is merged comes first, and what the mapping says itself wins.
        for key, where, value_node in self.merged(node):
            if key not in values:
                self.add(values, (*path, key), where, value_node)
        for key, where, value_node in pairs:
            self.add(values, (*path, key), where, value_node)
        return values

    def own(self, node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
        return [pair for pair in node.value if pair[0].tag != _MERGE_TAG]

    def merged(self, node: yaml.MappingNode) -> list[tuple[Any, Location, yaml.Node]]:
        """What ``<<`` brings in: keys, places and values; of equal keys the first one counts."""
        found = []
        for key_node, value_node in node.value:
            if key_node.tag != _MERGE_TAG:
                continue
            is_list = isinstance(value_node, yaml.SequenceNode)
            for source in value_node.value if is_list else [value_node]:
                if not isinstance(source, yaml.MappingNode):
                    raise InputError("'<<' merges a mapping, found something else", self.at(source))
                self.count(len(source.value))
                own = [(*self.key(key), value) for key, value in self.own(source)]
                own_keys = {key for key, _, _ in own}
                found += [item for item in self.merged(source) if item[0] not in own_keys]
                found += own
        return found

    def check_duplicates(self, pairs: list[tuple[Any, Location, yaml.Node]]) -> None:
        places: dict[Any, Location] = {}
        for key, where, _ in pairs:
            if key in places:
                message = f"duplicate key '{key}', first given at line {places[key].line}"
                raise DuplicateKeyError(f"{message}; keep one of them", where)
            places[key] = where

    def add(self, to: dict[Any, Any], path: KeyPath, where: Location, node: yaml.Node) -> None:
        self.locations[path] = where
        to[path[-1]] = self.value(node, path)

    def key(self, node: yaml.Node) -> tuple[Any, Location]:
        where = self.at(node)
        if not isinstance(node, yaml.ScalarNode):
            raise InputError("a key must be plain text, found a list or a mapping", where)
        return self.scalar(node), where


def _short(tag: str) -> str:
    return re.sub("^tag:yaml.org,2002:", "!!", tag)


def _clipped(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
