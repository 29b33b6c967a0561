# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A plan as tables for a terminal; the same text when piped, without colour."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.quant_state.expect import fingerprint
from megatron.quant_state.findings import Finding
from megatron.quant_state.plan import Plan
from megatron.quant_state.reporters.findings import findings_summary, findings_text
from megatron.quant_state.reporters.plan import COLUMNS, NUMBERS, plan_rows, total_rows

__all__ = ["render_plan"]

# More than any row needs: what is piped is searched and cut by other programs, so nothing folds.
_PIPED_WIDTH = 1000
_FOLDS = ("module (global layer)", "rule", "local", "class")


def render_plan(
    plan: Plan, findings: Sequence[Finding], *, stage: str | None = None, color: bool = False
) -> str:
    """The plan and its findings as text that ends with a line break.

    Args:
        plan: the result.
        findings: what is wrong, in the order to show.
        stage: only the modules of this stage, such as ``pp1`` or ``pp1 vp0``.
        color: with terminal colours, at the terminal's width.
    """
    buffer = io.StringIO()
    width = Console(file=sys.stdout).width if color else _PIPED_WIDTH
    console = Console(
        file=buffer, width=width, force_terminal=color, no_color=not color, highlight=False
    )
    modules = [m for m in plan.modules if stage is None or m.stage == stage]
    versions = ", ".join(f"{name} {value}" for name, value in plan.versions.items())
    stages = f"{len(plan.stages)} pipeline stages, " if len(plan.stages) > 1 else ""
    console.print(Text(f"{plan.model}: {stages}{len(plan.modules)} TE linears ({versions})"))
    if stage is not None:
        console.print(Text(f"stage {stage}: {len(modules)} TE linears"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    # Without a pipeline, local numbers are the model's own.
    shown = [i for i, heading in enumerate(COLUMNS) if heading != "local" or len(plan.stages) > 1]
    for heading in (COLUMNS[i] for i in shown):
        table.add_column(
            heading,
            justify="right" if heading in NUMBERS else "left",
            overflow="fold",
            no_wrap=heading not in _FOLDS,
        )
    for row in plan_rows(modules):
        table.add_row(*(Text(row.texts[i]) for i in shown))
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for what, value in [*total_rows(plan), ("fingerprint", fingerprint(plan))]:
        table.add_row(what, value)
    console.print(table)
    # Not folded, so that an editor finds file:line:column at the start of a line.
    console.print(Text(f"{findings_text(findings)}{findings_summary(findings)}"), soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())
