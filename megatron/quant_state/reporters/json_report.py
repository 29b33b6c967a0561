# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Results as JSON, for scripts; keys are only ever added within a schema."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from megatron.quant_state.rehearse import Rehearsal, Run

__all__ = ["REHEARSAL_SCHEMA", "render_rehearsal"]

REHEARSAL_SCHEMA = "quant-state/rehearsal/1"


def render_rehearsal(rehearsal: Rehearsal) -> str:
    """The rehearsal as JSON. An error that is no finite number is the string ``inf`` or ``nan``."""
    values: dict[str, Any] = {
        "schema": REHEARSAL_SCHEMA,
        "model": rehearsal.model,
        "steps": rehearsal.steps,
        "num_microbatches": rehearsal.num_microbatches,
        "versions": dict(rehearsal.versions),
        "twin": [asdict(change) for change in rehearsal.changes],
        "truth_is_checked": rehearsal.truth_is_checked,
        "runs": {
            "release": _run(rehearsal.release),
            "quant_state": _run(rehearsal.quant_state),
        },
        "verdict": rehearsal.verdict,
    }
    return json.dumps(values, indent=2, allow_nan=False, default=str) + "\n"


def _run(run: Run) -> dict[str, Any]:
    values = asdict(run)
    for item in values["wrong"]:
        if not math.isfinite(item["relative_error"]):
            item["relative_error"] = str(item["relative_error"])
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
    }
