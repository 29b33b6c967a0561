# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What a plan must hold: an expectation file, and a plan that was made before.

An expectation file maps glob patterns to precisions::

    "*.self_attention.linear_qkv": bf16
    "decoder.layers.*.mlp.experts.*": [mxfp8, nvfp4]
    "*": fp8
    only: true

A pattern is matched against paths with the model's own layer numbers; the first match wins, for
training and for evaluation. With ``only``, whatever matches no pattern must not be quantized.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.quant_state.errors import InputError, Location
from megatron.quant_state.findings import Finding, finding, in_order
from megatron.quant_state.globs import glob_matches
from megatron.quant_state.located_yaml import nearest, read_text, read_yaml
from megatron.quant_state.plan import BF16, Plan, PlannedModule

__all__ = [
    "PLAN_SCHEMA",
    "Expectations",
    "check_expectations",
    "check_same",
    "decisions",
    "fingerprint",
    "read_expectations",
    "read_plan",
]

PLAN_SCHEMA = "quant-state/plan/1"

#: What an expectation may name, and the precisions that it allows.
_PRECISIONS: Mapping[str, tuple[str, ...]] = {
    BF16: (BF16,),
    "fp8": ("delayed", "tensorwise", "blockwise", "mxfp8"),
    "fp4": ("nvfp4",),
    **{name: (name,) for name in ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")},
    "custom": ("custom",),
}


@dataclass(frozen=True)
class Expectations:
    """An expectation file.

    Attributes:
        patterns: pattern, names of precisions that are right, where it stands; the file's order.
        only: where ``only: true`` stands, or None.
    """

    patterns: tuple[tuple[str, tuple[str, ...], Location], ...]
    only: Location | None


def read_expectations(path: str) -> Expectations:
    """Read an expectation file.

    Raises:
        InputError: the file cannot be read, or does not say what is expected.
    """
    document = read_yaml(path)
    if not isinstance(document.value, dict) or not document.value:
        message = "expected a mapping of patterns to precisions, such as '*.linear_qkv': bf16"
        raise InputError(message, Location(path))
    patterns, only = [], None
    for key, value in document.value.items():
        where = document.locations[(key,)]
        if key == "only":
            if not isinstance(value, bool):
                raise InputError("only: expected true or false, without quotes", where)
            only = where if value else None
            continue
        if not isinstance(key, str):
            raise InputError(f"the pattern {key} is no text; put it in quotes", where)
        names = tuple(value) if isinstance(value, list) else (value,)
        if not names:
            raise InputError(f"'{key}': an empty list; name a precision that is right", where)
        for name in names:
            if not isinstance(name, str) or name not in _PRECISIONS:
                close = nearest(str(name), _PRECISIONS)
                known = f"did you mean '{close}'?" if close else f"Known: {', '.join(_PRECISIONS)}"
                raise InputError(f"'{key}': no precision '{name}': {known}", where)
        patterns.append((key, names, where))
    return Expectations(tuple(patterns), only)


def check_expectations(plan: Plan, expected: Expectations) -> list[Finding]:
    """Every breach, a finding for each pattern."""
    held: dict[str, list[PlannedModule]] = {pattern: [] for pattern, _, _ in expected.patterns}
    rest = []
    for module in plan.modules:
        for pattern, _, _ in expected.patterns:
            if glob_matches(module.global_name, pattern):
                held[pattern].append(module)
                break
        else:
            rest.append(module)
    found: list[Finding] = []
    for pattern, names, where in expected.patterns:
        allowed = {precision for name in names for precision in _PRECISIONS[name]}
        found += _breaches(pattern, " or ".join(names), allowed, held[pattern], where)
        if not held[pattern]:
            message, remedy = "matches no module", "Correct the pattern, or drop it"
            if any(glob_matches(m.global_name, pattern) for m in plan.modules):
                message = "is never asked, because earlier patterns match all that it does"
                remedy = "Put it before them, or drop it"
            message = f"'{pattern}' was expected to be {' or '.join(names)}, but {message}"
            found.append(finding("QS302", message, remedy, where))
    quantized = [m for m in rest if {m.training, m.evaluation} - {BF16, None}]
    if expected.only is not None and quantized:
        message = (
            f"{len(quantized)} modules are quantized that no pattern names: {_runs(quantized)}"
        )
        remedy = "Add a pattern for them, or keep them in bf16"
        names_of = (m.global_name for m in quantized)
        found.append(finding("QS303", message, remedy, expected.only, names_of))
    return in_order(found)


def _breaches(
    pattern: str, expected: str, allowed: set[str], modules: list[PlannedModule], where: Location
) -> Iterator[Finding]:
    for mode in ("training", "evaluation"):
        wrong = [m for m in modules if getattr(m, mode) not in allowed]
        if mode == "evaluation":
            # What is said of training need not be said twice.
            wrong = [m for m in wrong if m.evaluation != m.training]
        if wrong:
            message = (
                f"'{pattern}' was expected to be {expected} in {mode}, but {len(wrong)} of "
                f"{len(modules)} modules run in {_runs(wrong, mode)}"
            )
            remedy = "Correct the recipe or the model, or the expectation"
            yield finding("QS301", message, remedy, where, (m.global_name for m in wrong))


def _runs(modules: list[PlannedModule], mode: str = "training") -> str:
    return ", ".join(sorted({str(getattr(m, mode) or "nothing (not called)") for m in modules}))


def decisions(plan: Plan) -> dict[str, dict[str, Any]]:
    """What was decided for each module, by its path with the model's own layer numbers.

    Where a module lies, and the name of the rule that decided, are no decision: a plan of another
    pipeline split is the same plan.
    """
    return {
        module.global_name: {
            "storage": module.storage,
            "training": module.training,
            "evaluation": module.evaluation,
            "recompute_precision": "/".join(module.replays) or None,
            "calls_per_microbatch": module.calls,
            "first_microbatch_flags": list(module.first_flags),
            "later_microbatch_flags": list(module.later_flags),
        }
        for module in plan.modules
    }


def fingerprint(plan: Plan) -> str:
    """SHA-256 of the decisions, in hexadecimal."""
    text = json.dumps(decisions(plan), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_plan(path: str) -> dict[str, dict[str, Any]]:
    """The decisions of a plan that ``--format json`` wrote.

    Raises:
        InputError: the file cannot be read, or is no plan of a whole model.
    """
    text = read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"no JSON: {error}", Location(path)) from None
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != PLAN_SCHEMA:
        message = f"expected a plan ('schema': '{PLAN_SCHEMA}'), found {schema!r}"
        raise InputError(f"{message}; make one with --format json", Location(path))
    if values.get("stage") is not None:
        message = f"a plan of stage '{values['stage']}' alone; make it without --stage"
        raise InputError(message, Location(path))
    try:
        # A key that came later is missing in an older plan, and is not compared.
        return {
            str(module["global_name"]): {key: module[key] for key in _DECIDED if key in module}
            for module in values["modules"]
        }
    except (KeyError, TypeError) as error:
        message = f"a damaged plan: {type(error).__name__} {error}"
        raise InputError(message, Location(path)) from None


_DECIDED = (
    "storage",
    "training",
    "evaluation",
    "recompute_precision",
    "calls_per_microbatch",
    "first_microbatch_flags",
    "later_microbatch_flags",
)


def check_same(plan: Plan, path: str, other: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """What the plan decides otherwise than another; one finding for each kind of difference.

    Args:
        plan: the new one.
        path: the file of the other, for messages.
        other: its decisions.
    """
    own = decisions(plan)
    where = Location(path)
    found = []
    missing = [name for name in other if name not in own]
    added = [name for name in own if name not in other]
    for names, has in ((missing, "the other plan has"), (added, "this plan has")):
        if names:
            message = f"{len(names)} modules that only {has}"
            remedy = "Compare plans of one model"
            found.append(finding("QS312", message, remedy, where, names))
    changed: dict[tuple[str, str, str], list[str]] = {}
    for name, before in other.items():
        for key, value in before.items():
            if name in own and own[name][key] != value:
                change = (key, _text(value), _text(own[name][key]))
                changed.setdefault(change, []).append(name)
    for (key, was, now), names in changed.items():
        what = key.replace("_", " ")
        message = f"{len(names)} modules: {what} was {was} and is {now}"
        remedy = "Look for what is different: the recipe, a field of the model, a version"
        found.append(finding("QS311", message, remedy, where, names))
    return in_order(found)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
