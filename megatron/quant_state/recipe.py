# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A quantization recipe: its rules and configs, and which rule decides for a module.

The form is Megatron's own, of ``quantization/quant_config.py`` and of ``TEQuantizationParams`` and
``TEQuantizationRecipe`` in ``extensions/transformer_engine.py`` (0.16.1 to 0.19.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.quant_state.errors import Location
from megatron.quant_state.globs import glob_matches
from megatron.quant_state.located_yaml import KeyPath

__all__ = ["Choice", "Config", "Recipe", "Rule"]


@dataclass(frozen=True)
class Choice:
    """A TEQuantizationRecipe: what a matched module runs in, with Megatron's defaults."""

    fp8_quantization_recipe: str | None = None
    fp4_quantization_recipe: str | None = None
    custom_recipe_factory: str | None = None
    fp8_format: str = "e4m3"
    override_quantized_autocast: bool = True
    override_nonquantized_autocast: bool = False
    tp_only_amax_red: bool = False
    fp8_param: bool = False
    fp4_param: bool = False

    @property
    def precision(self) -> str:
        """``bf16`` for a rule that forces high precision, else the recipe's name."""
        return self.fp8_quantization_recipe or self.fp4_quantization_recipe or "bf16"


@dataclass(frozen=True)
class Config:
    """A TEQuantizationParams under the name that rules give it.

    Attributes:
        name: the key under ``configs``; any YAML scalar.
        training: for ``module.training``.
        evaluation: else; None where the training recipe serves both.
        location: of the name.
        locations: of each key, such as ``("training_recipe", "fp8_format")``.
    """

    name: Any
    training: Choice
    evaluation: Choice | None
    location: Location
    locations: Mapping[KeyPath, Location] = field(compare=False, repr=False, default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """An entry of ``matchers``.

    Attributes:
        name: its key.
        enabled: as written; None where the key is missing.
        pattern, config: None where the rule is off and they are missing.
        location: of the name.
        locations: of ``enabled``, ``pattern`` and the like.
        has_enabled: whether the key was written, rightly or misspelt.
    """

    name: Any
    enabled: Any
    pattern: str | None
    config: Any
    location: Location
    locations: Mapping[str, Location] = field(compare=False, repr=False, default_factory=dict)
    has_enabled: bool = True

    @property
    def applies(self) -> bool:
        """Whether Megatron applies it: it takes any value that is true in Python."""
        return bool(self.enabled)

    def matches(self, module_path: str) -> bool:
        """Whether its pattern takes the path, applied or not."""
        return self.pattern is not None and glob_matches(module_path, self.pattern)


@dataclass(frozen=True)
class Recipe:
    """A recipe that Megatron takes: rules in the file's order, configs by name."""

    file: str
    rules: tuple[Rule, ...]
    configs: Mapping[Any, Config]

    @property
    def applied(self) -> tuple[Rule, ...]:
        """The rules that Megatron applies."""
        return tuple(rule for rule in self.rules if rule.applies)

    def rule_for(self, module_path: str) -> Rule | None:
        """The first applied rule that matches, as RecipeConfig.match_to_config_key finds it."""
        return next((rule for rule in self.applied if rule.matches(module_path)), None)
