# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""TE's tracker of named random states.

Draws on CPU tensors come from the CPU generator, so its state stands for the device's: a copy, as
in TE without graph-safe generators, whose replays rewind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_states: dict[str, Any] = {}


def get_all_rng_states() -> dict[str, Any]:
    """States of the last tracker that was given any."""
    return _states


def set_all_rng_states(states: dict[str, Any]) -> None:
    """Publish a tracker's states."""
    global _states
    _states = states


class CudaRNGStatesTracker:
    """Named states; inside ``fork`` draws advance the named one."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget every state."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Any]:
        """A copy of the names, not of the states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        """Take other states."""
        self.states_ = states
        set_all_rng_states(states)

    def add(self, name: str, seed: int) -> None:
        """Start a state from a seed; neither may be known already.

        Raises:
            RuntimeError: If the seed or the name is taken.
        """
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        outer = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer)
        set_all_rng_states(self.states_)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from a named state inside the context.

        Raises:
            KeyError: If there is no such state.
        """
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)
