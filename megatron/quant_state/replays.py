# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Which modules were replayed in another precision than their forward ran in: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Replay", "replays_in_another_precision"]


@dataclass(frozen=True)
class Replay:
    """A module of a recomputed region whose replay ran in another precision than its forward.

    Attributes:
        module: name, as ``named_modules()`` of the unwrapped model names it.
        step: counted from 1.
        forward: what the forward ran in: ``bf16``, ``delayed``, ``tensorwise``, ``blockwise``,
            ``mxfp8`` or ``nvfp4``.
        replay: what its replay ran in.
        calls: number of such replays in the step, all microbatches together.
    """

    module: str
    step: int
    forward: str
    replay: str
    calls: int


def replays_in_another_precision(
    calls: Iterable[Any], names: Mapping[int, str], step: int
) -> list[Replay]:
    """Compare the forwards of a step's regions with their replays, module by module.

    A region's forward runs without gradients, and its replay with them, during backward. How often
    a module ran in each precision is compared, not call with call, since backward replays the
    regions in another order. A region inside a region runs its forward once more in the replay of
    the outer one; that one counts for neither.

    Args:
        calls: the engine's calls of one training step (``transformer_engine.reference.Call``).
        names: ``id`` of each module to its name; what is not in it is left out.
        step: counted from 1.

    Returns:
        list: in the order in which the modules first ran.
    """
    by_module: dict[int, list[Any]] = {}
    for call in calls:
        if id(call.module) in names:
            by_module.setdefault(id(call.module), []).append(call)
    found = []
    for key, of_module in by_module.items():
        replays = Counter(c.precision for c in of_module if c.in_backward and c.grad_enabled)
        if not replays:
            continue
        before = [call for call in of_module if not call.in_backward]
        # A checkpoint that is not reentrant runs its forward with gradients.
        in_regions = [call for call in before if not call.grad_enabled] or before
        forwards = Counter(call.precision for call in in_regions)
        lost = sorted((forwards - replays).elements())
        extra = sorted((replays - forwards).elements())
        pairs = Counter(zip(lost, extra, strict=False))
        found += [
            Replay(names[key], step, forward, replay, count)
            for (forward, replay), count in pairs.items()
        ]
    return found
