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


def test_a_duplicate_key_has_an_error_of_its_own() -> None:
    with pytest.raises(DuplicateKeyError, match=r"f:2:1: duplicate key 'a', first given at line 1"):
        parse_yaml("a: 1\na: 2\n", "f")


def test_merges_cannot_multiply_without_end() -> None:
    doubled = [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 31)]
    with pytest.raises(InputError, match="more than 100000 values"):
        parse_yaml("a0: &a0 {k: 1}\n" + "".join(doubled), "f")
