# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Fresh process-wide quantization state for each test, and the ``gpu`` mark on the real engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One body for both engines: what the reference passes on a CPU, TE must pass on a GPU."""
    engine = importlib.util.find_spec("transformer_engine")
    if engine is None or engine.origin is None:
        return
    # By its file: importing an engine is for the tests that want one.
    if Path(engine.origin).with_name("reference.py").exists():
        return
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    distributed = pytest.importorskip("transformer_engine.pytorch.distributed")
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    def reset() -> None:
        FP8GlobalStateManager.reset()
        distributed.activation_recompute_forward._is_first_fp8_module.clear()
        distributed.activation_recompute_forward().__exit__(None, None, None)

    reset()
    yield
    reset()
