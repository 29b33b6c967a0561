# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What every report of a plan says, whatever it looks like."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.quant_state.plan import Flags, Plan, PlannedModule
from megatron.quant_state.reporters.folding import fold_names

__all__ = ["COLUMNS", "NUMBERS", "PlanRow", "plan_rows", "total_rows"]

#: Headings of a row's texts.
COLUMNS = (
    "module (global layer)",
    "count",
    "local",
    "class",
    "rule",
    "weight",
    "training",
    "evaluation",
    "calls",
    "first / later flag",
    "recompute",
    "parameters",
)

#: Those of them that are numbers.
NUMBERS = ("count", "calls", "parameters")

# More modules than this have too many stages and local numbers to list.
_MOST_PLACES = 4


@dataclass(frozen=True)
class PlanRow:
    """Modules that are alike but for their numbers.

    Attributes:
        name: folded name, with the model's own layer numbers.
        modules: the modules that it stands for.
        texts: one for each of ``COLUMNS``.
    """

    name: str
    modules: tuple[PlannedModule, ...]
    texts: tuple[str, ...]


def plan_rows(modules: Iterable[PlannedModule]) -> list[PlanRow]:
    """Rows of like modules, in the order in which the model has them."""
    alike: dict[tuple[object, ...], dict[str, PlannedModule]] = {}
    order: dict[str, int] = {}
    for module in modules:
        order.setdefault(module.global_name, len(order))
        key = (
            module.cls,
            module.rule.name if module.rule else None,
            module.storage,
            module.training,
            module.evaluation,
            module.first_flags,
            module.later_flags,
            module.replays,
            module.weight_elements,
        )
        alike.setdefault(key, {})[module.global_name] = module
    rows = []
    for group in alike.values():
        for name, names in fold_names(group):
            members = tuple(group[n] for n in names)
            rows.append(PlanRow(name, members, _texts(name, members)))
    return sorted(rows, key=lambda row: min(order[m.global_name] for m in row.modules))


def _texts(name: str, members: tuple[PlannedModule, ...]) -> tuple[str, ...]:
    module = members[0]
    rule = "none"
    if module.rule is not None:
        where = module.rule.location
        rule = f"{module.rule.name} ({os.path.basename(where.file)}:{where.line})"
    return (
        name,
        str(len(members)),
        _places(members),
        module.cls,
        rule,
        module.storage,
        module.training or "not called",
        module.evaluation or "not called",
        str(module.calls),
        _flags_text(module.first_flags, module.later_flags),
        "/".join(module.replays),
        _count(sum(m.parameters for m in members)),
    )


def _places(members: tuple[PlannedModule, ...]) -> str:
    """Stage and local number, ``pp1:0``; how many stages where those are many."""
    stages = list(dict.fromkeys(m.stage for m in members))
    if len(members) > _MOST_PLACES:
        return stages[0] if len(stages) == 1 else f"{len(stages)} stages"
    places = []
    for member in members:
        number = member.local_layer if member.local_layer is not None else member.mtp_depth
        places.append(member.stage if number is None else f"{member.stage}:{number}")
    return ", ".join(dict.fromkeys(places))


def _flags_text(first: Flags, later: Flags) -> str:
    parts = [",".join(str(flag)[0] for flag in flags) or "-" for flags in (first, later)]
    return " / ".join(parts)


def total_rows(plan: Plan) -> list[tuple[str, str]]:
    """What and how much."""
    totals = plan.totals
    rows = []
    for what, values in (("parameters", totals.parameters), ("GEMM FLOPs", totals.flops)):
        whole = sum(values.values()) or 1
        shares = [f"{name} {100 * value / whole:.2f} %" for name, value in values.items()]
        rows.append((f"share of {what}", ", ".join(shares)))
    rows.append(("parameters", _count(sum(totals.parameters.values()))))
    rows.append(("cached quantized weights", f"{totals.cached_bytes:,} bytes"))
    rows.append(("weight quantizations a step", f"{totals.weight_quantizations:,}"))
    return rows


def _count(number: int) -> str:
    for size, letter in ((10**9, " B"), (10**6, " M"), (10**3, " K")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return str(number)
