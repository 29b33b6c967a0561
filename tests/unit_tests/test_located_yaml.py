# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""YAML as a user writes it: merges, duplicates and their order as PyYAML has them."""

from __future__ import annotations

import pytest
import yaml

from megatron.quant_state.errors import InputError
from megatron.quant_state.located_yaml import DuplicateKeyError, parse_yaml

BASE = "base: &base {first: 1, second: 2}\n"


@pytest.mark.parametrize(
    "text",
    [
        BASE + "rules: {second: 3, third: 4, <<: *base}\n",
        BASE + "more: &more {<<: *base, fourth: 4}\nrules: {third: 3, <<: *more}\n",
        BASE + "other: &other {fifth: 5}\nrules: {third: 3, <<: [*base, *other]}\n",
    ],
)
def test_merged_keys_have_pyyamls_values_and_order(text: str) -> None:
    # The order of rules decides, so it is compared too.
    found, expected = parse_yaml(text, "f").value, yaml.safe_load(text)
    assert [list(entry.items()) for entry in found.values()] == [
        list(entry.items()) for entry in expected.values()
    ]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775807", 1 - 2**63),
        ("9223372036854775808", None),
        # Python prints no integer of more than 4300 digits, and reads none but in base 2, 8, 16.
        ("0x" + "F" * 5000, None),
        ("-0x" + "F" * 5000, None),
        ("1" + ":59" * 3000, None),
    ],
)
def test_an_integer_fits_into_64_bits(value: str, found: int | None) -> None:
    if found is not None:
        assert parse_yaml(f"a: {value}", "f").value == {"a": found}
        return
    with pytest.raises(InputError, match=r"^f:1:4: .{1,60} does not fit into 64 bits$"):
        parse_yaml(f"a: {value}", "f")


def test_a_message_clips_what_it_quotes() -> None:
    with pytest.raises(InputError, match=r"^f:1:4: '9{57}\.\.\.' is no !!int$"):
        parse_yaml("a: " + "9" * 5000, "f")


@pytest.mark.parametrize("text", ['a: "\\ud800"', '"\\udfff": 1'])
def test_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="holds a surrogate"):
        parse_yaml(text, "f")
    assert parse_yaml('a: "\\U0001f600"', "f").value == {"a": "\U0001f600"}


def test_a_duplicate_key_has_an_error_of_its_own() -> None:
    with pytest.raises(DuplicateKeyError, match=r"f:2:1: duplicate key 'a', first given at line 1"):
        parse_yaml("a: 1\na: 2\n", "f")


def test_merges_cannot_multiply_without_end() -> None:
    doubled = [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 31)]
    with pytest.raises(InputError, match="more than 100000 values"):
        parse_yaml("a0: &a0 {k: 1}\n" + "".join(doubled), "f")
