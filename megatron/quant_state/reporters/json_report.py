# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Results as JSON, for scripts; keys are only ever added within a schema."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from megatron.quant_state.rehearse import Rehearsal

__all__ = ["REHEARSAL_SCHEMA", "render_rehearsal"]

REHEARSAL_SCHEMA = "quant-state/rehearsal/1"


def render_rehearsal(rehearsal: Rehearsal) -> str:
    """The rehearsal as JSON; numbers that are not finite are texts: ``inf``, ``-inf``, ``nan``."""
    values: dict[str, Any] = {
        "schema": REHEARSAL_SCHEMA,
        "model": rehearsal.model,
        "steps": rehearsal.steps,
        "num_microbatches": rehearsal.num_microbatches,
        "versions": dict(rehearsal.versions),
        "twin": [_finite(asdict(change)) for change in rehearsal.changes],
        "truth_is_checked": rehearsal.truth_is_checked,
        "runs": {
            "release": _finite(asdict(rehearsal.release)),
            "quant_state": _finite(asdict(rehearsal.quant_state)),
        },
        "verdict": rehearsal.verdict,
    }
    return json.dumps(values, indent=2, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    # JSON has no other numbers, and its readers refuse Python's NaN.
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
