# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The layer in place for one test; plans for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.quant_state import Installation, install
from tests.unit_tests.planning import planner as planner


@pytest.fixture
def installed() -> Iterator[Installation]:
    """The layer, which is gone again after the test; needs megatron-core."""
    with install() as installation:
        yield installation
