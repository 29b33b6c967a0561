# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The truth table of `is_first_microbatch`, and the module that Megatron's schedules ask it of.

The first part needs neither torch nor Megatron: configs and modules are stand-ins. Expected values
are literal tables here, so that nothing of the code under test decides them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.quant_state import Installation, uninstall, weights_changed
from megatron.quant_state.first_microbatch import (
    _resolve_is_first_microbatch,
    is_first_microbatch_tracked,
)

#: fp8, fp4, kitchen, quant_recipe: set or not.
CONFIGS = list(itertools.product((False, True), repeat=4))
#: Ambient autocast and training, each of which a call finds on or off.
SURROUNDINGS = list(itertools.product((False, True), repeat=2))


@dataclass
class Rule:
    """One recipe of a rule, with the fields and defaults of Megatron's TEQuantizationRecipe."""

    quantizes: bool
    override_quantized_autocast: bool = True
    override_nonquantized_autocast: bool = False


class Module:
    """What a TE linear wrapper shows: its flag, and the hook that Megatron gives it."""

    def __init__(self, rule: Rule | None = None, evaluation_rule: Rule | None = None) -> None:
        self.rule = rule
        self.evaluation_rule = evaluation_rule
        self.training = True
        self.is_first_microbatch: bool | None = True
        self.disable_parameter_transpose_cache = False

    def will_execute_quantized(self, is_context_quantized: bool) -> bool:
        rule = self.rule if self.training else self.evaluation_rule or self.rule
        if rule is None:
            return is_context_quantized
        overrides = (
            rule.override_quantized_autocast
            if is_context_quantized
            else rule.override_nonquantized_autocast
        )
        return rule.quantizes if overrides else is_context_quantized


class ModuleWithoutHook:
    """A module of a kind that cannot be asked."""

    def __init__(self) -> None:
        self.training = True
        self.is_first_microbatch: bool | None = True
        self.disable_parameter_transpose_cache = False


FP8_EVERYWHERE = Rule(True, override_nonquantized_autocast=True)
BF16 = Rule(False)

KINDS: dict[str, Any] = {
    "no module": lambda: None,
    "no hook": ModuleWithoutHook,
    "no rule": Module,
    "quantizing rule": lambda: Module(FP8_EVERYWHERE),
    "quantizing rule inside autocast only": lambda: Module(Rule(True)),
    "BF16 rule": lambda: Module(BF16),
    "BF16 rule that overrides nothing": lambda: Module(Rule(False, False)),
    "quantizing rule, BF16 in evaluation": lambda: Module(FP8_EVERYWHERE, BF16),
    "BF16 rule, quantized in evaluation": lambda: Module(BF16, FP8_EVERYWHERE),
}

#: The answer of a module that a quant_recipe governs. Columns: autocast off in evaluation, off in
#: training, on in evaluation, on in training; None where the model-wide answer holds.
GOVERNED: dict[str, str | None] = {
    "no module": None,
    "no hook": None,
    "no rule": "no no yes yes",
    "quantizing rule": "yes yes yes yes",
    "quantizing rule inside autocast only": "no no yes yes",
    "BF16 rule": "no no no no",
    "BF16 rule that overrides nothing": "no no yes yes",
    "quantizing rule, BF16 in evaluation": "no yes no yes",
    "BF16 rule, quantized in evaluation": "yes no yes no",
}


def config_of(fp8: bool, fp4: bool, kitchen: bool, recipe: bool) -> SimpleNamespace:
    return SimpleNamespace(
        fp8="hybrid" if fp8 else None,
        fp4="e2m1" if fp4 else None,
        use_kitchen=kitchen,
        # Falsy on purpose: a recipe without rules is a recipe.
        quant_recipe=[] if recipe else None,
    )


def expected(kind: str, config: tuple[bool, ...], ambient: bool, training: bool) -> bool:
    _, _, kitchen, recipe = config
    governed = GOVERNED[kind]
    if kitchen or not recipe or governed is None:
        return any(config)
    return governed.split()[2 * ambient + training] == "yes"


def table() -> Iterator[Any]:
    for config, kind, (ambient, training) in itertools.product(CONFIGS, KINDS, SURROUNDINGS):
        names = ("fp8", "fp4", "kitchen", "recipe")
        on = "+".join(name for name, is_set in zip(names, config, strict=True) if is_set)
        where = f"autocast {'on' if ambient else 'off'}-{'training' if training else 'evaluation'}"
        yield pytest.param(config, kind, ambient, training, id=f"{on or 'bf16'}-{kind}-{where}")


@pytest.mark.parametrize(("config", "kind", "ambient", "training"), table())
def test_truth_table(config: tuple[bool, ...], kind: str, ambient: bool, training: bool) -> None:
    module = KINDS[kind]()
    if module is not None:
        module.training = training
    answer = is_first_microbatch_tracked(config_of(*config), module, ambient)
    assert answer is expected(kind, config, ambient, training)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "".join("01"[on] for on in config))
def test_what_a_call_may_hand(config: tuple[bool, ...]) -> None:
    for kind, (ambient, training), disabled, flag in itertools.product(
        (kind for kind in KINDS if kind != "no module"),
        SURROUNDINGS,
        (False, True),
        (False, True, None),
    ):
        module = KINDS[kind]()
        module.training = training
        module.is_first_microbatch = flag
        module.disable_parameter_transpose_cache = disabled
        before = dict(vars(module))
        handed = _resolve_is_first_microbatch(module, config_of(*config), ambient)
        tracked = expected(kind, config, ambient, training)
        assert handed is (flag if tracked and not disabled else None), (kind, ambient, training)
        assert vars(module) == before


@pytest.mark.parametrize("recipe", [False, True])
def test_the_model_wide_answer_needs_no_autocast(recipe: bool) -> None:
    assert is_first_microbatch_tracked(config_of(False, False, False, recipe)) is recipe


def test_a_config_of_a_megatron_without_kitchen_and_recipe() -> None:
    assert is_first_microbatch_tracked(SimpleNamespace(fp8=None, fp4=None), Module(), True) is False
    assert is_first_microbatch_tracked(SimpleNamespace(fp8="e4m3", fp4=None), Module()) is True


def test_kitchen_and_recipe_free_configs_do_not_ask_the_module() -> None:
    class Unasked(ModuleWithoutHook):
        def will_execute_quantized(self, _: bool) -> bool:
            raise AssertionError("asked")

    for config in CONFIGS:
        _, _, kitchen, recipe = config
        if kitchen or not recipe:
            answer = is_first_microbatch_tracked(config_of(*config), Unasked(), True)
            assert answer is any(config), config
        else:
            with pytest.raises(AssertionError, match="asked"):
                is_first_microbatch_tracked(config_of(*config), Unasked(), True)


def test_the_module_is_told_the_ambient_autocast() -> None:
    told = []
    module = SimpleNamespace(will_execute_quantized=lambda ambient: told.append(ambient))
    config = config_of(True, False, False, True)
    assert [is_first_microbatch_tracked(config, module, on) for on in (True, False)] == [False] * 2
    assert told == [True, False]


# --- MegatronModule ---------------------------------------------------------------------------


def model_of(config: Any) -> Any:
    """A real MegatronModule over two leaves, one with the flag and one without."""
    import torch
    from megatron.core.transformer.module import MegatronModule

    model = MegatronModule(config)
    model.flagged = torch.nn.Identity()
    model.flagged.is_first_microbatch = False
    model.plain = torch.nn.Identity()
    return model


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "".join("01"[on] for on in config))
def test_set_is_first_microbatch_asks_the_model_wide_predicate(
    installed: Installation, config: tuple[bool, ...]
) -> None:
    model = model_of(config_of(*config))
    # A hook that says no: the model-wide answer does not depend on it.
    model.flagged.will_execute_quantized = lambda ambient: False
    model.set_is_first_microbatch()
    assert model.flagged.is_first_microbatch is any(config)
    assert not hasattr(model.plain, "is_first_microbatch")


def late_module(model: Any) -> Any:
    """A module that joins after the first step."""
    import torch

    model.set_is_first_microbatch()
    model.late = torch.nn.Identity()
    model.late.is_first_microbatch = False
    model.set_is_first_microbatch()
    return model.late


def test_a_module_added_after_the_first_step_is_armed(installed: Installation) -> None:
    assert late_module(model_of(config_of(True, False, False, False))).is_first_microbatch is True


def test_a_module_added_after_the_first_step_is_not_armed_by_the_release() -> None:
    uninstall()
    assert late_module(model_of(config_of(True, False, False, False))).is_first_microbatch is False


def test_weights_changed_arms_whatever_the_config_says() -> None:
    chunks = [model_of(config_of(False, False, False, False)) for _ in range(2)]
    weights_changed(chunks[0])
    assert [chunk.flagged.is_first_microbatch for chunk in chunks] == [True, False]
    weights_changed(chunks)
    assert [chunk.flagged.is_first_microbatch for chunk in chunks] == [True, True]
    chunks[0].flagged.is_first_microbatch = False
    weights_changed(iter(chunks[:1]))
    assert chunks[0].flagged.is_first_microbatch is True
