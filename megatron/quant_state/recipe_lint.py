# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What is wrong with a recipe, as far as the recipe alone can tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.quant_state.errors import InputError
from megatron.quant_state.findings import Finding, finding, in_order
from megatron.quant_state.globs import covers
from megatron.quant_state.recipe import Recipe, Rule
from megatron.quant_state.recipe_reader import ParsedRecipe, read_recipe, shown

__all__ = ["LintedRecipe", "check_recipe", "lint_parsed", "lint_recipe", "shadowed"]

_OPEN_INDEX = re.compile(r"layers\.(\d+)\*")


@dataclass(frozen=True)
class LintedRecipe:
    """A recipe file, its recipe (None where Megatron would refuse it), and all that is wrong."""

    file: str
    recipe: Recipe | None
    findings: tuple[Finding, ...]


def lint_recipe(path: str) -> LintedRecipe:
    """Read a recipe file and look for faults.

    Raises:
        InputError: the file cannot be read.
    """
    return lint_parsed(read_recipe(path))


def check_recipe(path: str) -> None:
    """Refuse a recipe with errors, for what should not run with it.

    Raises:
        InputError: the file cannot be read, or its first error, in the finding's own words.
    """
    errors = [item for item in lint_recipe(path).findings if item.severity == "error"]
    if errors:
        first = errors[0]
        message = f"{first.severity} {first.code}: {first.message}. {first.remedy}"
        if len(errors) > 1:
            message += f" ({len(errors) - 1} more: `quant-state lint {path}`)"
        raise InputError(message, first.location)


def lint_parsed(parsed: ParsedRecipe) -> LintedRecipe:
    """All findings of a parsed recipe, errors first."""
    findings = in_order([*parsed.findings, *_of_rules(parsed.readable)])
    recipe = parsed.readable if parsed.usable else None
    return LintedRecipe(parsed.readable.file, recipe, tuple(findings))


def _of_rules(recipe: Recipe) -> Iterator[Finding]:
    for rule in recipe.rules:
        yield from _of_enabled(rule)
        if rule.applies and isinstance(rule.pattern, str):
            yield from _of_pattern(rule)
    yield from _shadowed(recipe)


def _of_enabled(rule: Rule) -> Iterator[Finding]:
    if not rule.has_enabled:
        message = f"rule '{rule.name}' never applies: it has no 'enabled', which defaults to false"
        yield finding("QS114", message, "Add enabled: true", rule.location)
    elif "enabled" in rule.locations and not isinstance(rule.enabled, bool):
        does = "applies" if rule.applies else "does not apply"
        message = (
            f"rule '{rule.name}': enabled is {shown(rule.enabled)}, which is no boolean; "
            f"Megatron {does} the rule"
        )
        remedy = "Write enabled: true or enabled: false, without quotes"
        yield finding("QS151", message, remedy, rule.locations["enabled"])


def _of_pattern(rule: Rule) -> Iterator[Finding]:
    pattern, where = str(rule.pattern), rule.locations.get("pattern", rule.location)
    for index in dict.fromkeys(_OPEN_INDEX.findall(pattern)):
        message = (
            f"rule '{rule.name}': 'layers.{index}*' also hits layers {index}0 and {index}00, "
            "and all others that start with these digits"
        )
        yield finding("QS152", message, f"Write layers.{index}.* for layer {index} alone", where)
    if pattern[:1] not in ("*", "?", "["):
        message = (
            f"rule '{rule.name}': '{pattern}' is anchored at the start; a model inside another "
            "has a longer path there, which it misses"
        )
        if pattern.startswith("module."):
            message = (
                f"rule '{rule.name}': '{pattern}' starts with a wrapper's prefix, but names are "
                "those of the unwrapped model"
            )
        remedy = f"Write '*{pattern.removeprefix('module.')}'"
        yield finding("QS153", message, remedy, where)
    if pattern != pattern.lower():
        message = (
            f"rule '{rule.name}': '{pattern}' has capital letters; case counts, and Megatron's "
            "module names are in lower case"
        )
        yield finding("QS154", message, f"Write '{pattern.lower()}'", where)


def _shadowed(recipe: Recipe) -> Iterator[Finding]:
    earlier: list[Rule] = []
    for rule in recipe.applied:
        if not isinstance(rule.pattern, str):
            continue
        for other in earlier:
            if covers(str(other.pattern), str(rule.pattern)):
                yield shadowed(rule, [other])
                break
        earlier.append(rule)


def shadowed(rule: Rule, others: list[Rule], modules: tuple[str, ...] = ()) -> Finding:
    """The finding for a rule whose modules all go to rules that come first."""
    by = " and ".join(f"'{o.name}' ({o.location}, pattern '{o.pattern}')" for o in others)
    message = (
        f"rule '{rule.name}' ({rule.location}, pattern '{rule.pattern}') never wins: "
        f"the first match decides, and {by} comes first"
    )
    if len(others) > 1:
        message = message.replace(" comes first", " come first")
    remedy = f"Move '{rule.name}' above '{others[0].name}', or drop it"
    return finding("QS115", message, remedy, rule.location, modules)
