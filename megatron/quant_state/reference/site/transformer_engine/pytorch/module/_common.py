# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Small parts that the linear modules share."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class ParameterInit:
    """How a parameter is initialized, and its slot where it can be quantized."""

    init_fn: Callable[[torch.Tensor], Any] | None = None
    get_rng_state_tracker: Callable[[], Any] | None = None
    fp8_meta_index: int | None = None

    def __post_init__(self) -> None:
        if self.init_fn is None:
            self.init_fn = default_init


def default_init(weight: torch.Tensor) -> torch.Tensor:
    """TE's default: a normal distribution of standard deviation 0.023."""
    return torch.nn.init.normal_(weight, mean=0.0, std=0.023)


class WeightGradStore:
    """Queue of weight gradients that ``backward_dw`` computes later."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        self.enabled = delay_wgrad_compute
        self.context: queue.Queue[Any] | None = queue.Queue() if delay_wgrad_compute else None

    def delay_wgrad_compute(self) -> bool:
        """Whether gradients are delayed now."""
        return self.enabled

    def enable_delay_wgrad_compute(self) -> None:
        """Delay from now on."""
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        """Compute in the backward from now on."""
        self.enabled = False

    def put(self, tensor_list: Sequence[Any], func: Callable[..., Any]) -> None:
        """Queue a computation."""
        assert self.enabled, "delay_wgrad_compute is not enabled"
        assert self.context is not None
        self.context.put((tensor_list, func))

    def pop(self) -> tuple[Any, Sequence[Any]]:
        """Run the oldest computation.

        Raises:
            RuntimeError: If none is queued.
        """
        assert self.enabled, "delay_wgrad_compute is not enabled"
        assert self.context is not None
        if self.context.empty():
            raise RuntimeError("Pop empty queue.")
        tensors, func = self.context.get()
        return func(*tensors), tensors

    def assert_empty(self) -> None:
        """Raise AssertionError where something is left."""
        assert self.context is not None
        assert self.context.empty(), "Queue is not empty."


def assert_dim_for_fp8_exec(*tensors: torch.Tensor) -> None:
    """Refuse shapes that TE's FP8 products refuse.

    Raises:
        ValueError: Unless the leading dimensions' product is divisible by 8 and the last by 16.
    """
    for tensor in tensors:
        leading = math.prod(tensor.shape[:-1])
        if leading % 8 or tensor.shape[-1] % 16:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be"
                " divisible by 8 and the last dimension to be divisible by 16, but got tensor"
                f" with dims={list(tensor.size())} (product of leading dims = {leading}, last dim"
                f" = {tensor.shape[-1]})"
            )


def refuse(module: str, **options: Any) -> None:
    """Refuse options that the engine does not model and that would change what is computed.

    Raises:
        NotImplementedError: For the first option that is set.
    """
    for name, value in options.items():
        if value not in (None, False, 0):
            raise NotImplementedError(
                f"transformer_engine (reference engine): {module} does not model {name}={value!r}"
            )


def cast_if_needed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in ``dtype``, itself where it is already."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
