# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Findings as lines of text that a terminal and an editor can follow, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.quant_state.findings import Finding
from megatron.quant_state.reporters.folding import fold_names

__all__ = ["LINT_SCHEMA", "findings_summary", "findings_text", "render_json", "render_table"]

LINT_SCHEMA = "quant-state/lint/1"

# More names than this make a line that nobody reads.
_MOST_MODULES = 6


def render_table(findings: Sequence[Finding]) -> str:
    """Findings and their count, as text that ends with a line break."""
    return f"{findings_text(findings)}{findings_summary(findings)}\n"


def findings_text(findings: Sequence[Finding]) -> str:
    """``file:line:column: severity code: message`` and, indented, modules and what to do."""
    lines = []
    for item in findings:
        where = f"{item.location}: " if item.location else ""
        lines.append(f"{where}{item.severity} {item.code}: {item.message}")
        if item.modules:
            folded = [name for name, _ in fold_names(item.modules)]
            more = len(folded) - _MOST_MODULES
            names = [*folded[:_MOST_MODULES], *([f"{more} more rows"] if more > 0 else [])]
            lines.append(f"    modules: {', '.join(names)}")
        lines.append(f"    {item.remedy}")
    return "".join(f"{line}\n" for line in lines)


def findings_summary(findings: Sequence[Finding]) -> str:
    """``2 errors, 1 warning``, or that there is nothing."""
    if not findings:
        return "no findings"
    parts = []
    for severity in ("error", "warning"):
        count = sum(item.severity == severity for item in findings)
        if count:
            parts.append(f"{count} {severity}{'s' if count > 1 else ''}")
    return ", ".join(parts)


def render_json(file: str, findings: Sequence[Finding]) -> str:
    """Findings as JSON, for scripts; keys are only ever added within a schema."""
    values: dict[str, Any] = {
        "schema": LINT_SCHEMA,
        "recipe": file,
        "findings": [item.to_dict() for item in findings],
        "errors": sum(item.severity == "error" for item in findings),
        "warnings": sum(item.severity == "warning" for item in findings),
    }
    return json.dumps(values, indent=2, allow_nan=False) + "\n"
