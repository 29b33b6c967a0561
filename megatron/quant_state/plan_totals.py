# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Totals of a plan: shares by precision, bytes of cached weights, quantizations a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Totals", "add_up", "cached_bytes", "quantizations_per_step"]

#: Bytes that a cached weight takes for each element: a copy for the forward and one for the
#: gradient of the input, each with its scales. One copy less where a GPU reads both ways.
_BYTES = {
    "delayed": 2.0,
    "tensorwise": 2.0,
    # A scale in fp32 for each block of 128 x 128.
    "blockwise": 2 * (1 + 4 / 128**2),
    # A scale of one byte for 32 elements.
    "mxfp8": 2 * (1 + 1 / 32),
    # Half a byte an element, a scale of one byte for 16.
    "nvfp4": 2 * (1 / 2 + 1 / 16),
}


class _Module(Protocol):
    """What totals need of a planned module."""

    @property
    def training(self) -> str | None: ...
    @property
    def storage(self) -> str: ...
    @property
    def first_flags(self) -> Sequence[bool | None]: ...
    @property
    def later_flags(self) -> Sequence[bool | None]: ...
    @property
    def replays(self) -> Sequence[str]: ...
    @property
    def replay_flags(self) -> Sequence[Sequence[bool | None]]: ...
    @property
    def parameters(self) -> int: ...
    @property
    def weights(self) -> int: ...
    @property
    def weight_elements(self) -> int: ...
    @property
    def flops(self) -> float: ...
    @property
    def cached(self) -> bool: ...


@dataclass(frozen=True)
class Totals:
    """Sums over modules.

    Attributes:
        parameters: elements by precision in training; what is no TE linear counts as ``bf16``.
        flops: GEMM FLOPs of linears for one token, forward and backward, by precision.
        cached_bytes: quantized copies of weights that stay between microbatches.
        weight_quantizations: roundings of weight tensors in one step.
        modules: TE linears by precision.
    """

    parameters: Mapping[str, int]
    flops: Mapping[str, float]
    cached_bytes: int
    weight_quantizations: int
    modules: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "parameters": dict(self.parameters),
            "gemm_flops_per_token": dict(self.flops),
            "modules": dict(self.modules),
            "cached_weight_bytes": self.cached_bytes,
            "weight_quantizations_per_step": self.weight_quantizations,
        }


def add_up(
    modules: Iterable[_Module], others: Iterable[tuple[int, float]], num_microbatches: int
) -> Totals:
    """Add up.

    Args:
        modules: the TE linears.
        others: parameters and FLOPs of everything else.
        num_microbatches: of a step.
    """
    parameters: dict[str, int] = {"bf16": 0}
    flops: dict[str, float] = {"bf16": 0.0}
    counts: dict[str, int] = {}
    cached, quantizations = 0.0, 0
    for module in modules:
        precision = module.training or "not called"
        parameters[precision] = parameters.get(precision, 0) + module.parameters
        flops[precision] = flops.get(precision, 0.0) + module.flops
        counts[precision] = counts.get(precision, 0) + 1
        cached += cached_bytes(module)
        quantizations += quantizations_per_step(module, num_microbatches)
    for count, operations in others:
        parameters["bf16"] += count
        flops["bf16"] += operations
    return Totals(parameters, flops, round(cached), quantizations, counts)


def cached_bytes(module: _Module) -> float:
    """Bytes of the quantized copies of a module's weights that stay between microbatches."""
    if not module.cached or module.training is None:
        return 0.0
    kinds = [_BYTES[part] for part in module.training.split("/") if part in _BYTES]
    return max(kinds, default=0.0) * module.weight_elements


def quantizations_per_step(module: _Module, num_microbatches: int) -> int:
    """Roundings of a module's weight tensors in one step.

    A call that hands False uses the cache, one that hands None or True rounds (TE 2.20.2,
    ``module/base.py``, ``get_weight_workspace``). A parameter that is itself quantized is rounded
    once, after the optimizer's step.
    """
    if module.storage.endswith("Tensor"):
        return module.weights
    quantized = module.training not in (None, "bf16")
    replay_quantized = any(p != "bf16" for p in module.replays)

    def rounds(forward: Sequence[bool | None], replay: Sequence[bool | None]) -> int:
        first = sum(flag is not False for flag in forward) if quantized else 0
        return first + (sum(flag is not False for flag in replay) if replay_quantized else 0)

    first = rounds(module.first_flags, module.replay_flags[0])
    later = rounds(module.later_flags, module.replay_flags[1])
    return module.weights * (first + max(0, num_microbatches - 1) * later)
