# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What is wrong with a model and its recipe together, told from the plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron.quant_state.errors import Location
from megatron.quant_state.findings import Finding, finding, in_order
from megatron.quant_state.globs import glob_matches
from megatron.quant_state.model import ModelDescription
from megatron.quant_state.plan import BF16, Plan, PlannedModule
from megatron.quant_state.recipe import Choice, Config, Recipe, Rule
from megatron.quant_state.recipe_lint import LintedRecipe, shadowed

__all__ = ["lint_plan"]

_INDEX = re.compile(r"layers\.[\[\d]")

Check = Callable[["_Case"], Iterator[Finding]]


def lint_plan(
    plan: Plan, description: ModelDescription, linted: LintedRecipe | None
) -> tuple[Finding, ...]:
    """All findings of a planned model, with those of its recipe alone, errors first."""
    case = _Case(plan, description, linted)
    found = [item for check in (*_OF_RULES, *_OF_MODEL) for item in check(case)]
    return tuple(in_order([*(linted.findings if linted else ()), *found]))


class _Case:
    """A plan and what findings ask of it.

    Attributes:
        matched, decided: the modules that each applied rule matches, and those that it decides.
    """

    def __init__(
        self, plan: Plan, description: ModelDescription, linted: LintedRecipe | None
    ) -> None:
        self.plan, self.description, self.linted = plan, description, linted
        self.recipe = (linted.recipe if linted else None) or Recipe("", (), {})
        self.rules = self.recipe.applied
        self.matched = [[m for m in plan.modules if rule.matches(m.name)] for rule in self.rules]
        self.decided = [[m for m in plan.modules if m.rule is rule] for rule in self.rules]
        self.pipelined = len(plan.stages) > 1

    def config_of(self, rule: Rule) -> Config:
        return self.recipe.configs[rule.config]

    def place(self, *fields: str) -> Location:
        """Where the first of the fields was said, else the model's file."""
        for name in fields:
            where = self.description.location_of(name)
            if where is not None:
                return where
        return Location(self.description.source)

    def names(self, modules: Iterable[PlannedModule]) -> tuple[str, ...]:
        return tuple(m.global_name for m in modules)


def _pattern_at(rule: Rule) -> Location:
    return rule.locations.get("pattern", rule.location)


def _said(rule: Rule) -> str:
    return f"rule '{rule.name}' ({rule.location})"


def _dead(case: _Case) -> Iterator[Finding]:
    for rule, matched in zip(case.rules, case.matched, strict=True):
        if matched:
            continue
        pattern = str(rule.pattern)
        message = f"rule '{rule.name}': '{pattern}' matches no TE linear on any stage"
        remedy = "Look for the right name in `quant-state plan`, or drop the rule"
        lower = [m for m in case.plan.modules if glob_matches(m.name.lower(), pattern.lower())]
        inside = [m for m in case.plan.modules if glob_matches(m.name, f"*{pattern}*")]
        if case.pipelined and _INDEX.search(pattern):
            most = max((m.local_layer or 0 for m in case.plan.modules), default=0)
            message += (
                f"; layer numbers in paths are local to the pipeline stage, here 0 to {most}, and "
                f"the model has {len(case.plan.stages)} stages"
            )
            remedy = "Choose the layers by first_last_layers_bf16, or name the modules by kind"
        elif lower:
            remedy = f"Case counts: write '{pattern.lower()}'"
        elif inside:
            remedy = f"'*{pattern}*' would match {len(inside)} modules: the path goes on"
        yield finding("QS201", message, remedy, _pattern_at(rule))


def _never_wins(case: _Case) -> Iterator[Finding]:
    of_recipe = case.linted.findings if case.linted else ()
    told = {item.location for item in of_recipe if item.code == "QS115"}
    for rule, matched, decided in zip(case.rules, case.matched, case.decided, strict=True):
        if matched and not decided and rule.location not in told:
            others = list(dict.fromkeys(m.rule.name for m in matched if m.rule is not None))
            winners = [other for other in case.rules if other.name in others]
            yield shadowed(rule, winners, case.names(matched))


def _local_index(case: _Case) -> Iterator[Finding]:
    for rule, matched in zip(case.rules, case.matched, strict=True):
        if not _INDEX.search(str(rule.pattern)) or not matched:
            continue
        decoder = [m for m in matched if m.global_layer is not None]
        mtp = [m for m in matched if m.mtp_depth is not None]
        if case.pipelined and decoder:
            layers = sorted({m.global_layer for m in decoder if m.global_layer is not None})
            message = (
                f"rule '{rule.name}': '{rule.pattern}' names a layer, and layer numbers in paths "
                f"are local to the pipeline stage: it hits the model's "
                f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
            )
            remedy = "Choose the layers by first_last_layers_bf16, or name the modules by kind"
            names = case.names(decoder)
            yield finding("QS251", message, remedy, _pattern_at(rule), names)
        if decoder and mtp:
            depths = sorted({m.mtp_depth for m in mtp if m.mtp_depth is not None})
            message = (
                f"rule '{rule.name}': '{rule.pattern}' also hits MTP depth "
                f"{', '.join(map(str, depths))}, whose layers are counted from 0 again"
            )
            remedy = "Write 'decoder.layers.' or 'mtp.layers.' in the pattern"
            yield finding("QS252", message, remedy, _pattern_at(rule), case.names(mtp))


def _no_effect(case: _Case) -> Iterator[Finding]:
    for rule, decided in zip(case.rules, case.decided, strict=True):
        config = case.config_of(rule)
        for is_training, choice in ((True, config.training), (False, config.evaluation)):
            if choice is not None:
                yield from _no_effect_of(case, rule, choice, decided, is_training)


def _no_effect_of(
    case: _Case, rule: Rule, choice: Choice, decided: Sequence[PlannedModule], training: bool
) -> Iterator[Finding]:
    def ran(module: PlannedModule) -> str | None:
        return module.training if training else module.evaluation

    def around(module: PlannedModule) -> str | None:
        return module.ambient if training else module.ambient_evaluation

    when = "" if training else " in evaluation"
    where = rule.location
    for key, is_bare in (
        ("override_nonquantized_autocast", True),
        ("override_quantized_autocast", False),
    ):
        if getattr(choice, key):
            continue
        kept = [
            m
            for m in decided
            if ran(m) is not None
            and (around(m) == BF16) is is_bare
            and ran(m) == around(m) != choice.precision
        ]
        if kept:
            context = "no quantized context" if is_bare else "a quantized context"
            what = ", ".join(sorted({str(ran(m)) for m in kept}))
            message = (
                f"{_said(rule)} has no effect on {len(kept)} of {len(decided)} modules{when}: it "
                f"asks for {choice.precision}, there is {context} around them, and {key} is false "
                f"in the config '{rule.config}', so they run in {what}"
            )
            remedy = f"Set {key}: true in '{rule.config}' to make it act there"
            yield finding("QS253", message, remedy, where, case.names(kept))
    same = [m for m in decided if ran(m) == around(m) == choice.precision]
    if decided and len(same) == len(decided) and _formats_agree(case, choice):
        message = (
            f"{_said(rule)} changes nothing{when}: all modules that it decides would run in "
            f"{choice.precision} without it"
        )
        yield finding("QS253", message, "Drop the rule", where, case.names(decided))


def _formats_agree(case: _Case, choice: Choice) -> bool:
    fp8 = case.plan.config.get("fp8")
    return choice.fp8_quantization_recipe is None or choice.fp8_format == fp8


def _unnamed_parameters(case: _Case) -> Iterator[Finding]:
    for rule, decided in zip(case.rules, case.decided, strict=True):
        choice = case.config_of(rule).training
        for key in ("fp8_param", "fp4_param"):
            plain = [m for m in decided if not m.storage.endswith("Tensor")]
            if getattr(choice, key) and plain:
                message = (
                    f"{_said(rule)}: {key} is set, but the weights of {len(plain)} of "
                    f"{len(decided)} modules stay in {plain[0].storage}: GPTModel gives its "
                    "wrappers no name, so the rule comes after the weights were made"
                )
                remedy = f"Set {key} for the whole model, or drop it here"
                where = case.config_of(rule).locations.get(("training_recipe", key), rule.location)
                yield finding("QS254", message, remedy, where, case.names(plain))


def _other_than_global(case: _Case) -> Iterator[Finding]:
    config = case.plan.config
    kind = "fp8" if config.get("fp8") else "fp4" if config.get("fp4") else None
    if kind is None:
        return
    recipe = str(config.get(f"{kind}_recipe"))
    for rule, decided in zip(case.rules, case.decided, strict=True):
        choice = case.config_of(rule).training
        if choice.precision == BF16 or not decided:
            continue
        differs = []
        if choice.precision != recipe:
            differs.append(f"{choice.precision}, the model's own recipe is {recipe}")
        if choice.fp8_quantization_recipe and kind == "fp8" and choice.fp8_format != config["fp8"]:
            differs.append(f"format {choice.fp8_format}, the model's own is {config['fp8']}")
        if differs:
            message = f"{_said(rule)} asks for {' and '.join(differs)}"
            remedy = f"Make sure that this is meant; without {kind} for the model there is only one"
            yield finding("QS259", message, remedy, rule.location, case.names(decided))


def _nothing_quantized(case: _Case) -> Iterator[Finding]:
    config = case.plan.config
    choices = [c for r in case.recipe.configs.values() for c in (r.training, r.evaluation) if c]
    fields = [name for name in ("fp8", "fp4") if config.get(name)]
    asked = fields or any(choice.precision != BF16 for choice in choices)
    precisions = {p for m in case.plan.modules for p in (m.training, m.evaluation)}
    if asked and precisions <= {BF16, None}:
        by = f"{fields[0]}: {config[fields[0]]}" if fields else f"the recipe {case.recipe.file}"
        message = f"nothing is quantized, although {by} asks for it"
        remedy = "Look at the other findings; each names a rule that does not act"
        where = case.place(*fields) if fields else Location(case.recipe.file)
        yield finding("QS202", message, remedy, where)


def _first_and_last(case: _Case) -> Iterator[Finding]:
    config, given = case.plan.config, case.description.transformer_config
    counts = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    said = [name for name in counts if name in given]
    if not config.get("first_last_layers_bf16"):
        if said:
            message = f"{' and '.join(said)} without first_last_layers_bf16 do nothing"
            yield finding("QS255", message, "Set first_last_layers_bf16: true", case.place(*said))
        return
    mtp = [m for m in case.plan.modules if m.mtp_depth is not None and m.training != BF16]
    if mtp:
        message = (
            "first_last_layers_bf16 does not cover MTP, although it comes last: MTP opens its "
            "quantized context without a layer number"
        )
        remedy = "Add a rule for '*mtp.layers.*' if MTP is to be in BF16"
        where = case.place("first_last_layers_bf16")
        yield finding("QS256", message, remedy, where, case.names(mtp))


def _evaluation_differs(case: _Case) -> Iterator[Finding]:
    differ = [
        m
        for m in case.plan.modules
        if None not in (m.training, m.evaluation) and m.training != m.evaluation
    ]
    if differ and case.plan.config.get("recompute_granularity"):
        pairs = sorted({f"{m.evaluation} instead of {m.training}" for m in differ})
        message = (
            f"{len(differ)} modules evaluate in another precision than they train in "
            f"({', '.join(pairs)}), and the model recomputes activations: what picks the recipe by "
            "training mode must not change between a forward and its replay"
        )
        remedy = "Drop evaluation_recipe, or make sure that no forward under gradients is in eval()"
        yield finding("QS257", message, remedy, case.place("recipe"), case.names(differ))


def _fused_mlp(case: _Case) -> Iterator[Finding]:
    # Of the description: the twin has switched it off.
    if not case.description.transformer_config.get("use_transformer_engine_op_fuser"):
        return
    where = case.place("use_transformer_engine_op_fuser")
    fused: dict[tuple[str, str], list[PlannedModule]] = {}
    for module in case.plan.modules:
        if re.search(r"\.mlp\.linear_fc[12]$", module.name):
            fused.setdefault((module.stage, module.name[:-1]), []).append(module)
    pairs = [pair for pair in fused.values() if len({m.training for m in pair}) > 1]
    if pairs:
        message = "fc1 and fc2 of one fused MLP differ in precision, but one operation runs both"
        remedy = "Give both the same rule"
        modules = case.names(m for pair in pairs for m in pair)
        yield finding("QS258", message, remedy, where, modules)
    if fused:
        message = (
            "use_transformer_engine_op_fuser: TE runs the MLP as one fused operation, which no "
            "wrapper and no rule sees; the plan shows these modules unfused"
        )
        remedy = "Drop it where rules or this package's gradients matter"
        yield finding(
            "QS261", message, remedy, where, case.names(m for p in fused.values() for m in p)
        )


def _repeated(case: _Case) -> Iterator[Finding]:
    config = case.plan.config
    if not config.get("gradient_accumulation_fusion"):
        return
    if config.get("disable_parameter_transpose_cache"):
        return
    repeated = [m for m in case.plan.modules if m.calls > 1]
    if repeated:
        steps = "every step" if any(True in m.first_flags for m in repeated) else "the first step"
        message = (
            f"{len(repeated)} modules run more than once in a microbatch; the release overwrites "
            f"the weight gradients of all calls but the first in {steps}"
        )
        remedy = "Call megatron.quant_state.install() in the training script"
        where = case.place("mtp_use_repeated_layer", "mlp_chunks_for_training")
        yield finding("QS260", message, remedy, where, case.names(repeated))


_OF_RULES: tuple[Check, ...] = (
    _dead,
    _never_wins,
    _local_index,
    _no_effect,
    _unnamed_parameters,
    _other_than_global,
)
_OF_MODEL: tuple[Check, ...] = (
    _nothing_quantized,
    _first_and_last,
    _evaluation_differs,
    _fused_mlp,
    _repeated,
)
