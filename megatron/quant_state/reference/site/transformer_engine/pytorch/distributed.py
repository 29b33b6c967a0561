# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Phases of activation recompute, with TE's own list of first modules.

Models TE 2.20, ``pytorch/distributed.py``, its faults included: the list is first in, first out,
while backward runs last in, first out; leaving a region clears both globals instead of restoring
them; a replay without a forward raises IndexError after the globals have been set.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, ClassVar

import torch

from transformer_engine.pytorch._rng import CudaRNGStatesTracker as CudaRNGStatesTracker
from transformer_engine.pytorch._rng import get_all_rng_states as get_all_rng_states
from transformer_engine.pytorch._rng import set_all_rng_states as set_all_rng_states
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

_IN_ACTIVATION_RECOMPUTE_REGION = False
_ACTIVATION_RECOMPUTE_PHASE = False


class activation_recompute_forward(AbstractContextManager, ContextDecorator):  # type: ignore[type-arg]
    """Mark a checkpointed forward (phase False) or its replay (phase True)."""

    _is_first_fp8_module: ClassVar[list[bool]] = []

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        super().__init__()
        self.activation_recompute = activation_recompute
        self.recompute_phase = recompute_phase

    def __enter__(self) -> None:
        global _IN_ACTIVATION_RECOMPUTE_REGION, _ACTIVATION_RECOMPUTE_PHASE
        _IN_ACTIVATION_RECOMPUTE_REGION = self.activation_recompute
        _ACTIVATION_RECOMPUTE_PHASE = self.recompute_phase
        if not self.activation_recompute:
            return
        state = FP8GlobalStateManager.quantization_state
        firsts = activation_recompute_forward._is_first_fp8_module
        if self.recompute_phase:
            state.is_first_fp8_module = firsts.pop(0)
        else:
            firsts.append(state.is_first_fp8_module)

    def __exit__(self, *_: Any) -> None:
        global _IN_ACTIVATION_RECOMPUTE_REGION, _ACTIVATION_RECOMPUTE_PHASE
        _IN_ACTIVATION_RECOMPUTE_REGION = False
        _ACTIVATION_RECOMPUTE_PHASE = False


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether a checkpointed forward, or a replay, runs quantized now."""
    return _IN_ACTIVATION_RECOMPUTE_REGION and FP8GlobalStateManager.is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Whether a replay runs now, quantized or not."""
    return _ACTIVATION_RECOMPUTE_PHASE


def get_activation_recompute_contexts() -> tuple[
    activation_recompute_forward, activation_recompute_forward
]:
    """The contexts of a forward and of its replay."""
    return (
        activation_recompute_forward(activation_recompute=True, recompute_phase=False),
        activation_recompute_forward(activation_recompute=True, recompute_phase=True),
    )


def get_distributed_world_size(group: Any = None) -> int:
    """Size of a group, 1 where there is no distribution."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size(group=group))


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` now and again in the backward; see ``_checkpoint.checkpoint``."""
    from transformer_engine.pytorch._checkpoint import checkpoint as run

    return run(function, *args, **kwargs)
