# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A plan as JSON, for scripts; keys are only ever added within a schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron.quant_state.expect import PLAN_SCHEMA, decisions, fingerprint
from megatron.quant_state.findings import Finding
from megatron.quant_state.plan import Plan, PlannedModule

__all__ = ["render_plan"]


def render_plan(plan: Plan, findings: Sequence[Finding], *, stage: str | None = None) -> str:
    """The plan and its findings as JSON; with ``stage``, only the modules of that one."""
    modules = [m for m in plan.modules if stage is None or m.stage == stage]
    decided = decisions(plan)
    values: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "model": plan.model,
        "recipe": plan.recipe,
        "fingerprint": fingerprint(plan),
        "stage": stage,
        "versions": dict(plan.versions),
        "stages": list(plan.stages),
        "num_microbatches": plan.num_microbatches,
        "modules": [{**_module(m), **decided[m.global_name]} for m in modules],
        "totals": plan.totals.to_dict(),
        "findings": [item.to_dict() for item in findings],
        "twin": [asdict(change) for change in plan.changes],
    }
    return json.dumps(values, indent=2, allow_nan=False, default=str) + "\n"


def _module(module: PlannedModule) -> dict[str, Any]:
    rule = None
    if module.rule is not None:
        where = module.rule.location
        rule = {"name": str(module.rule.name), "file": where.file, "line": where.line}
    return {
        "name": module.name,
        "global_name": module.global_name,
        "pp_rank": module.pp_rank,
        "vp_stage": module.vp_stage,
        "local_layer": module.local_layer,
        "global_layer": module.global_layer,
        "mtp_depth": module.mtp_depth,
        "class": module.cls,
        "rule": rule,
        "ambient": module.ambient,
        "recompute": bool(module.replays),
        "parameters": module.parameters,
        "weights": module.weights,
        "gemm_flops_per_token": module.flops,
        "cached": module.cached,
    }
