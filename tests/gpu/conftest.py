# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Everything here needs a GPU with Transformer Engine; ``-m gpu`` picks it.

The same tests run on the reference engine, smaller, where a developer has no GPU:
``python -m megatron.quant_state.reference -m pytest tests/gpu -m gpu``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when Transformer Engine and cuBLAS are loaded.
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _fresh_process_state() -> Iterator[None]:
    from tests.gpu import gpt

    gpt.reset()
    yield
    gpt.reset()
    gc.collect()
