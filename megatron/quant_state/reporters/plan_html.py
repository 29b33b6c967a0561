# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A plan as one HTML page that works offline, in light and in dark."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from megatron.quant_state.expect import fingerprint
from megatron.quant_state.findings import Finding
from megatron.quant_state.plan import Plan
from megatron.quant_state.reporters.findings import findings_summary
from megatron.quant_state.reporters.folding import fold_names
from megatron.quant_state.reporters.page import render_page
from megatron.quant_state.reporters.plan import COLUMNS, NUMBERS, plan_rows, total_rows
from megatron.quant_state.reporters.plan_map import color_of, draw_map

__all__ = ["render_plan"]


def render_plan(plan: Plan, findings: Sequence[Finding], *, stage: str | None = None) -> str:
    """The plan as a page without scripts and without anything to load.

    Args:
        plan: the result.
        findings: what is wrong, in the order to show.
        stage: only the modules of this stage.
    """
    modules = [m for m in plan.modules if stage is None or m.stage == stage]
    precisions = dict.fromkeys(m.training or "not called" for m in modules)
    shown = [i for i, heading in enumerate(COLUMNS) if heading != "local" or len(plan.stages) > 1]
    return render_page(
        "plan.html.j2",
        plan=plan,
        stage=stage,
        # Drawn here from names that Python identifiers are made of, and escaped by matplotlib.
        map=Markup(draw_map(modules)) if modules else "",
        legend=[(name, color_of(None if name == "not called" else name)) for name in precisions],
        columns=[(COLUMNS[i], COLUMNS[i] in NUMBERS) for i in shown],
        rows=[
            (color_of(row.modules[0].training), [row.texts[i] for i in shown])
            for row in plan_rows(modules)
        ],
        totals=[*total_rows(plan), ("fingerprint", fingerprint(plan))],
        findings=[(item, [name for name, _ in fold_names(item.modules)]) for item in findings],
        summary=findings_summary(findings),
    )
