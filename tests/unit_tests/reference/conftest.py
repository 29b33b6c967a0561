# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Each test starts and ends with fresh process-wide quantization state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


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
