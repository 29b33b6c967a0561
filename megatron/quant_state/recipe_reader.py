# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Reads a quantization recipe file; faults of its form are findings, each at its place.

Findings are collected, so that one reading shows all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from megatron.quant_state.errors import InputError, Location
from megatron.quant_state.findings import Finding, finding
from megatron.quant_state.located_yaml import (
    DuplicateKeyError,
    KeyPath,
    nearest,
    parse_yaml,
    read_text,
)
from megatron.quant_state.recipe import Choice, Config, Recipe, Rule

__all__ = ["ParsedRecipe", "parse_recipe", "read_recipe", "shown"]

CONFIG_TYPE_KEY = "transformer_engine_config_type"
_KITCHEN_KEY = "kitchen_config_type"
_CONFIG_TYPE = "TEQuantizationParams"
_TOP_KEYS = ("configs", "matchers")
_RULE_KEYS = ("enabled", "type", "pattern", "config")
_CONFIG_KEYS = (CONFIG_TYPE_KEY, "training_recipe", "evaluation_recipe")
_VALUES = {
    "fp8_quantization_recipe": ("tensorwise", "blockwise", "mxfp8", "custom"),
    "fp4_quantization_recipe": ("nvfp4", "custom"),
    "fp8_format": ("e4m3", "hybrid"),
}
_SWITCHES = (
    "override_quantized_autocast",
    "override_nonquantized_autocast",
    "tp_only_amax_red",
    "fp8_param",
    "fp4_param",
)
_CHOICE_KEYS = (*_VALUES, "custom_recipe_factory", *_SWITCHES)
_NEWER_KEYS = {"fp8_param": "0.18", "fp4_param": "0.18"}


@dataclass(frozen=True)
class ParsedRecipe:
    """What was read.

    Attributes:
        readable: the rules and configs that could be read, for more findings.
        usable: whether Megatron takes the file; the findings say why not.
        findings: the faults of its form.
    """

    readable: Recipe
    usable: bool
    findings: tuple[Finding, ...]


def read_recipe(path: str) -> ParsedRecipe:
    """Read a recipe file.

    Raises:
        InputError: the file cannot be read. What is wrong with its content is a finding.
    """
    return parse_recipe(read_text(path), path)


def parse_recipe(text: str, file: str) -> ParsedRecipe:
    """Parse a recipe; ``file`` is the name that locations carry."""
    try:
        document = parse_yaml(text, file)
    except DuplicateKeyError as error:
        fault = finding("QS102", *_split(error.message), error.location)
        return ParsedRecipe(Recipe(file, (), {}), False, (fault,))
    except InputError as error:
        remedy = "Write plain YAML: mappings, lists, text, numbers, true and false"
        fault = finding("QS101", error.message, remedy, error.location)
        return ParsedRecipe(Recipe(file, (), {}), False, (fault,))
    reader = _Reader(file, document.locations)
    recipe = reader.recipe(document.value)
    return ParsedRecipe(recipe, reader.usable, tuple(reader.findings))


def _split(message: str) -> tuple[str, str]:
    what, _, remedy = message.partition("; ")
    return what, f"{remedy[:1].upper()}{remedy[1:]}"


class _Reader:
    """Reads a document's values, and notes faults; ``usable`` while Megatron would take it."""

    def __init__(self, file: str, locations: Mapping[KeyPath, Location]) -> None:
        self.file = file
        self.locations = locations
        self.findings: list[Finding] = []
        self.usable = True

    def at(self, path: KeyPath) -> Location:
        while path and path not in self.locations:
            path = path[:-1]
        return self.locations.get(path, Location(self.file, 1, 1))

    def fault(self, code: str, path: KeyPath, message: str, remedy: str, usable: bool) -> None:
        self.findings.append(finding(code, message, remedy, self.at(path)))
        self.usable = self.usable and usable

    def recipe(self, value: Any) -> Recipe:
        nothing = Recipe(self.file, (), {})
        if not isinstance(value, dict):
            message = f"expected a mapping with 'configs' and 'matchers', found {shown(value)}"
            self.fault("QS103", (), message, "Write both keys", False)
            return nothing
        misspelt = self.unknown_keys((), value, _TOP_KEYS, usable=True)
        self.usable = not misspelt
        faulty = len(self.findings)
        sections: dict[str, dict[Any, Any]] = {}
        for name in _TOP_KEYS:
            section = value.get(name)
            if isinstance(section, dict) and section:
                sections[name] = section
            elif name not in value and name not in misspelt:
                message = f"no '{name}': Megatron would apply no rule and say nothing"
                self.fault("QS105", (), message, f"Add '{name}:'", False)
            elif name in value and not section:
                message = f"'{name}' is empty: no rule can apply"
                self.fault(
                    "QS105", (name,), message, f"Add entries to '{name}', or no recipe", True
                )
            elif name in value:
                message = f"'{name}': expected a mapping, found {shown(section)}"
                self.fault("QS103", (name,), message, "Give each entry a name", False)
        if len(self.findings) > faulty or misspelt:
            # What else could be said follows from this.
            return nothing
        configs: dict[Any, Config] = {}
        for name, entry in sections["configs"].items():
            config = self.config(name, entry)
            if config is not None:
                configs[name] = config
        rules = [self.rule(n, e, sections["configs"]) for n, e in sections["matchers"].items()]
        return Recipe(self.file, tuple(rule for rule in rules if rule is not None), configs)

    def rule(self, name: Any, entry: Any, configs: Mapping[Any, Any]) -> Rule | None:
        path: KeyPath = ("matchers", name)
        if not isinstance(entry, dict):
            message = f"rule '{name}': expected a mapping, found {shown(entry)}"
            self.fault("QS103", path, message, f"Give it {', '.join(_RULE_KEYS)}", False)
            return None
        misspelt = self.unknown_keys(path, entry, _RULE_KEYS, usable=True, owner=f"rule '{name}'")
        rule = Rule(
            name,
            entry.get("enabled"),
            entry.get("pattern"),
            entry.get("config"),
            self.at(path),
            {key: self.at((*path, key)) for key in entry},
            "enabled" in entry or "enabled" in misspelt,
        )
        if not rule.applies and rule.has_enabled:
            return rule
        for key in ("type", "pattern", "config"):
            if entry.get(key) in (None, "") and key not in misspelt:
                message = f"rule '{name}' has no '{key}'"
                remedy = {"type": "Write type: glob", "pattern": "Name the modules it is for"}
                what = remedy.get(key, "Name one of the configs")
                self.fault("QS106", path, message, what, not rule.applies)
        self.rule_values(rule, entry, path, configs)
        return rule

    def rule_values(
        self, rule: Rule, entry: Mapping[str, Any], path: KeyPath, configs: Mapping[Any, Any]
    ) -> None:
        kind, pattern, config = (entry.get(key) for key in ("type", "pattern", "config"))
        usable = not rule.applies
        if kind not in (None, "", "glob"):
            message = f"rule '{rule.name}': unknown type {shown(kind)}"
            where = (*path, "type")
            self.fault("QS107", where, message, "Write type: glob, the only one there is", usable)
        if pattern is not None and not isinstance(pattern, str):
            message = f"rule '{rule.name}': pattern is {shown(pattern)}, which is no text"
            self.fault("QS116", (*path, "pattern"), message, "Put it in quotes", False)
        if isinstance(config, (list, dict)):
            message = f"rule '{rule.name}': config is {shown(config)}, expected a name"
            where = (*path, "config")
            self.fault("QS116", where, message, "Name one of the configs", False)
        elif config not in (None, "") and config not in configs:
            names = [str(known) for known in configs]
            close = nearest(str(config), names)
            remedy = f"Did you mean '{close}'?" if close else f"Configs here: {', '.join(names)}"
            message = f"rule '{rule.name}' names the config '{config}', which does not exist"
            self.fault("QS109", (*path, "config"), message, remedy, usable)

    def config(self, name: Any, entry: Any) -> Config | None:
        path: KeyPath = ("configs", name)
        owner = f"config '{name}'"
        if not isinstance(entry, dict):
            message = f"{owner}: expected a mapping, found {shown(entry)}"
            self.fault("QS103", path, message, f"Give it {' and '.join(_CONFIG_KEYS[:2])}", False)
            return None
        if _KITCHEN_KEY in entry and CONFIG_TYPE_KEY not in entry:
            message = f"{owner} is one of Kitchen's ('{_KITCHEN_KEY}'), which is not checked here"
            self.fault("QS155", path, message, "Check it with Kitchen itself", False)
            return None
        misspelt = self.unknown_keys(path, entry, _CONFIG_KEYS, usable=False, owner=owner)
        kind = entry.get(CONFIG_TYPE_KEY)
        if CONFIG_TYPE_KEY not in entry and CONFIG_TYPE_KEY not in misspelt:
            message = f"{owner} has no '{CONFIG_TYPE_KEY}'"
            remedy = f"Write {CONFIG_TYPE_KEY}: {_CONFIG_TYPE}"
            self.fault("QS106", path, message, remedy, False)
        elif CONFIG_TYPE_KEY in entry and kind != _CONFIG_TYPE:
            message = f"{owner}: unknown type {shown(kind)}"
            where = (*path, CONFIG_TYPE_KEY)
            self.fault("QS107", where, message, f"Write {_CONFIG_TYPE}", False)
        if "training_recipe" not in entry and "training_recipe" not in misspelt:
            message = f"{owner} has no 'training_recipe'"
            self.fault("QS106", path, message, "Write training_recipe: {} for BF16", False)
        choices: dict[str, Choice] = {}
        for key in ("training_recipe", "evaluation_recipe"):
            if key in entry:
                choices[key] = self.choice((*path, key), entry[key], f"{owner}: {key}")
        start = len(path)
        below = {k[start:]: v for k, v in self.locations.items() if k[:start] == path}
        training = choices.get("training_recipe", Choice())
        return Config(name, training, choices.get("evaluation_recipe"), self.at(path), below)

    def choice(self, path: KeyPath, value: Any, owner: str) -> Choice:
        if value is None:
            message = f"{owner} is null, which Megatron cannot read"
            self.fault("QS110", path, message, "Write {} for BF16, or drop the key", False)
            return Choice()
        if not isinstance(value, dict):
            message = f"{owner}: expected a mapping, found {shown(value)}"
            self.fault("QS103", path, message, "Write {} for BF16, or its keys", False)
            return Choice()
        self.unknown_keys(path, value, _known_choice_keys(), usable=False, owner=owner)
        kept: dict[str, Any] = {}
        for key, found in value.items():
            if key in _CHOICE_KEYS and self.choice_value((*path, key), found, owner):
                kept[key] = found
        choice = Choice(**kept)
        fp8, fp4 = choice.fp8_quantization_recipe, choice.fp4_quantization_recipe
        if fp8 is not None and fp4 is not None:
            message = f"{owner} has an fp8 and an fp4 recipe, which exclude each other"
            where = (*path, "fp4_quantization_recipe")
            self.fault("QS112", where, message, "Keep one of them", False)
        elif "custom" in (fp8, fp4) and choice.custom_recipe_factory is None:
            key = f"fp{8 if fp8 else 4}_quantization_recipe"
            message = f"{owner} is custom, but has no 'custom_recipe_factory'"
            remedy = "Add custom_recipe_factory: package.module.function"
            self.fault("QS113", (*path, key), message, remedy, False)
        return choice

    def choice_value(self, path: KeyPath, value: Any, owner: str) -> bool:
        """Whether the value can be kept."""
        key = path[-1]
        if key in _SWITCHES:
            if not isinstance(value, bool):
                message = f"{owner}: {key} is {shown(value)}, which is no boolean"
                self.fault("QS116", path, message, "Write true or false, without quotes", False)
            return isinstance(value, bool)
        if value is None and key != "fp8_format":
            return True
        if key == "custom_recipe_factory":
            if not isinstance(value, str):
                message = f"{owner}: {key} is {shown(value)}, which is no text"
                self.fault("QS116", path, message, "Write package.module.function", False)
            return isinstance(value, str)
        if value == "delayed" and key == "fp8_quantization_recipe":
            message = f"{owner}: delayed scaling cannot be chosen for single modules"
            remedy = "Choose tensorwise, blockwise or mxfp8"
            self.fault("QS111", path, message, remedy, False)
            return False
        known = _VALUES[key]
        if value in known:
            return True
        close = nearest(str(value), known)
        remedy = f"Did you mean '{close}'?" if close else f"Write one of {', '.join(known)}"
        self.fault("QS108", path, f"{owner}: {key} has no {shown(value)}", remedy, False)
        return False

    def unknown_keys(
        self,
        path: KeyPath,
        value: Mapping[Any, Any],
        known: Iterable[str],
        *,
        usable: bool,
        owner: str = "",
    ) -> set[str]:
        """Note keys that nothing reads; the right names of those that are misspelt."""
        known = tuple(known)
        misspelt = set()
        for key in value:
            if key in known:
                continue
            missing = [name for name in known if name not in value]
            close = nearest(str(key), missing) or nearest(str(key).lower(), missing)
            if close:
                misspelt.add(close)
            remedy = f"Did you mean '{close}'?" if close else f"Known keys: {', '.join(known)}"
            message = f"unknown key '{key}'"
            if key in _NEWER_KEYS:
                message = (
                    f"'{key}' came with megatron-core {_NEWER_KEYS[key]}, this is {_installed()}"
                )
                remedy = "Drop it, or use a newer Megatron"
            message = f"{owner}: {message}" if owner else message
            self.fault("QS104", (*path, key), message, remedy, usable)
        return misspelt


def _known_choice_keys() -> tuple[str, ...]:
    installed = _installed()
    if installed is None:
        return _CHOICE_KEYS
    since = {key: Version(first) for key, first in _NEWER_KEYS.items()}
    return tuple(k for k in _CHOICE_KEYS if k not in since or Version(installed) >= since[k])


def _installed() -> str | None:
    # Not megatron.core itself: a lint should not take the seconds that torch's import takes.
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return None


def shown(value: Any) -> str:
    """A value in the words of a message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
