# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Switches and counters of the reference engine; Transformer Engine has no such module.

Everything is process-wide, like the state it observes. Counting is always on: it costs an
addition, and a comparison where a cached weight is reused. Calls are recorded on request.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Call:
    """One forward of a linear module, or of attention that a recipe quantizes.

    Where its forward was recorded, attention is recorded in its replay too, quantized or not.

    Attributes:
        module: The module; hold it to name it through ``named_modules``.
        precision: What the call computed in: ``bf16`` (not quantized, whatever the dtype),
            ``delayed``, ``tensorwise``, ``blockwise``, ``mxfp8`` or ``nvfp4``.
        is_first_microbatch: The flag as it was passed, before a capture forces it to False.
        recompute_phase: Whether the call ran under TE's recompute phase.
        grad_enabled: Grad mode of the call.
        training: ``module.training``.
        in_backward: Whether a backward pass made the call: with gradients, it is a replay.
    """

    module: object
    precision: str
    is_first_microbatch: bool | None
    recompute_phase: bool
    grad_enabled: bool
    training: bool
    in_backward: bool = False


@dataclass
class Counters:
    """What happened to weights since the last ``reset()``.

    Attributes:
        weight_quantizations: Roundings of a weight tensor: a workspace made, a workspace updated
            in place, a primary quantized parameter written. A skipped update does not count.
        weights_used: ``id`` of each weight whose quantized form a forward used. Its length is the
            least number of quantizations, one a weight a step.
        stale_reads: Forwards that used a cached workspace whose source differs from the weight.
        empty_reads: Forwards that used a workspace which nothing had filled.
    """

    weight_quantizations: int = 0
    weights_used: set[int] = field(default_factory=set)
    stale_reads: int = 0
    empty_reads: int = 0

    def reset(self) -> None:
        """Start from zero."""
        self.weight_quantizations = 0
        self.weights_used.clear()
        self.stale_reads = 0
        self.empty_reads = 0


#: The one instance, never replaced: keep a reference or read it through the module alike.
counters = Counters()

#: Calls in the order of their start, while recording is on. Never replaced.
calls: list[Call] = []


@dataclass
class _Switches:
    never_overwrite: bool = False
    record_calls: bool = False


_switches = _Switches()


def never_overwrite(enabled: bool) -> None:
    """Turn every overwrite of ``main_grad`` into an accumulation, for the run that is the truth.

    Reaches ``is_first_microbatch=True`` and ``weight.overwrite_main_grad`` alike. The weight cache
    is left alone: it behaves as released.
    """
    _switches.never_overwrite = enabled


def is_never_overwrite() -> bool:
    """Whether ``never_overwrite`` is on."""
    return _switches.never_overwrite


def record_calls(enabled: bool) -> None:
    """Switch the recording of ``calls`` on, from an empty list, or off, which keeps the list."""
    if enabled:
        calls.clear()
    _switches.record_calls = enabled


def is_recording() -> bool:
    """Whether calls are recorded."""
    return _switches.record_calls
