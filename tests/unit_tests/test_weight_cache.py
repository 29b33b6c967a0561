# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Real Megatron wrappers on the reference engine: the right gradient, the current weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron.quant_state import Installation
from tests.unit_tests.wrappers import (
    KINDS,
    PRECISIONS,
    equal,
    main_grads,
    microbatch,
    model_of,
    reset_engine,
    train,
    truth,
    weights_of,
)


@pytest.fixture(autouse=True)
def _fresh_engine() -> Iterator[None]:
    reset_engine()
    yield
    reset_engine()


def grads(steps: list[dict[str, Any]]) -> list[Any]:
    return [step["main_grads"] for step in steps]


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_exact(
    installed: Installation, kind: str, precision: str, calls: int
) -> None:
    model = model_of(kind, precision)
    steps = train(model, precision, calls)
    installed.uninstall()
    right = truth(kind, precision, calls)
    quantized = 0 if precision in ("bf16", "fp8_param") else len(weights_of(model))
    for step, expected in zip(steps, right, strict=True):
        assert equal(step["main_grads"], expected["main_grads"])
        assert equal(step["outputs"], expected["outputs"])
        assert step["quantizations"] == quantized
        assert step["stale_reads"] == 0
    assert not equal(*grads(steps))
