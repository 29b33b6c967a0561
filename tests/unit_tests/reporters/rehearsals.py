# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Rehearsals made by hand."""

from __future__ import annotations

from typing import Any

from megatron.quant_state.rehearse import Rehearsal, Run, WrongGradient
from megatron.quant_state.twin import Change

EXPERTS = [
    f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}"
    for layer in range(3, 61)
    for expert in range(8)
]


def run(*wrong: tuple[str, int, float], **values: Any) -> Run:
    """A run of two steps with these wrong gradients."""
    defaults: dict[str, Any] = {
        "parameters": 1692,
        "weight_quantizations": 40,
        "weight_quantizations_least": 40,
        "stale_reads": 0,
        "losses": (4.5, 4.25),
        "seconds_per_step": 1.5,
    }
    return Run(wrong=tuple(WrongGradient(*item) for item in wrong), **{**defaults, **values})


def rehearsal(release: Run | None = None, quant_state: Run | None = None, **values: Any) -> Any:
    """A rehearsal of two steps whose runs are right where none are given."""
    defaults: dict[str, Any] = {
        "model": "some-model",
        "steps": 2,
        "num_microbatches": 2,
        "versions": {"torch": "2.11.0", "megatron-core": "0.19.2"},
        "changes": (Change("hidden_size", 7168, 64, "width decides nothing"),),
        "release": release or run(),
        "quant_state": quant_state or run(),
        "truth_is_checked": True,
    }
    return Rehearsal(**{**defaults, **values})


#: The release loses the MTP layer's gradients, as measured for repeated MTP layers.
LOST = (
    ("mtp.layers.0.eh_proj.weight", 1, 0.25),
    ("mtp.layers.0.eh_proj.weight", 2, 0.125),
    *((name, step, 0.5) for step in (1, 2) for name in EXPERTS),
    ("decoder.layers.0.mlp.linear_fc2.weight", 2, 0.75),
)
