# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The plan of a model: what every Transformer Engine linear of every stage will really run in.

Names, classes and sizes come from the full model on the meta device, everything that needs a run
from the twin; both are built by Megatron itself, in processes of their own (``survey.py``).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.quant_state.errors import WorkerError
from megatron.quant_state.model import ModelDescription
from megatron.quant_state.plan_totals import Totals, add_up
from megatron.quant_state.recipe import Recipe, Rule
from megatron.quant_state.twin import Change, build_twin
from megatron.quant_state.workers import Event, has_transformer_engine, run_workers

__all__ = ["BF16", "Flags", "Plan", "PlannedModule", "make_plan"]

#: What the plan calls a module that is not quantized, whatever its dtype.
BF16 = "bf16"

#: Fields of the config as Megatron derives it that findings look at.
_CONFIG_FIELDS = (
    "disable_parameter_transpose_cache",
    "first_last_layers_bf16",
    "fp4",
    "fp4_recipe",
    "fp8",
    "fp8_recipe",
    "gradient_accumulation_fusion",
    "moe_router_topk",
    "mtp_num_layers",
    "num_layers_at_end_in_bf16",
    "num_layers_at_start_in_bf16",
    "num_moe_experts",
    "recompute_granularity",
)

_LAYER = re.compile(r"^decoder\.layers\.(\d+)(?=\.)")
_MTP = re.compile(r"^mtp\.layers\.(\d+)(?=\.)")
_LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")

Flags = tuple[bool | None, ...]


@dataclass(frozen=True)
class PlannedModule:
    """One linear of one pipeline stage.

    Attributes:
        pp_rank, vp_stage: the stage, from 0; ``vp_stage`` is None without virtual stages.
        name: module path, local to the stage: what patterns are matched against.
        local_layer, global_layer: decoder layer as the path counts and in the model, from 0.
        mtp_depth: which MTP layer, from 0.
        cls: Megatron's class.
        rule: the rule that decides, None where no rule matches.
        storage: how the weight is held: a dtype, or the type of a quantized parameter.
        training, evaluation: precision of its calls: ``bf16`` for not quantized, else the recipe's
            name; several are joined by ``/``, and None means that the twin never called it.
        ambient, ambient_evaluation: the recipe that is on around it.
        calls: calls of its forward in one microbatch.
        first_flags, later_flags: is_first_microbatch as handed to TE by each of these calls, in
            the first microbatch of a step and in a later one (empty where there is none).
        replays: precision of the calls that a recomputation makes; empty outside such a region.
        replay_flags: the flags of these, first microbatch and later one.
        parameters: number of elements, of the full model.
        weights: number of weight tensors.
        weight_elements: their elements together.
        flops: forward and backward FLOPs of its GEMMs for one token of the model.
        cached: whether a quantized copy of its weights is kept between microbatches.
    """

    pp_rank: int
    vp_stage: int | None
    name: str
    local_layer: int | None
    global_layer: int | None
    mtp_depth: int | None
    cls: str
    rule: Rule | None
    storage: str
    training: str | None
    evaluation: str | None
    ambient: str | None
    ambient_evaluation: str | None
    calls: int
    first_flags: Flags
    later_flags: Flags
    replays: tuple[str, ...]
    replay_flags: tuple[Flags, Flags]
    parameters: int
    weights: int
    weight_elements: int
    flops: float
    cached: bool

    @property
    def stage(self) -> str:
        """``pp1`` or ``pp1 vp0``."""
        return f"pp{self.pp_rank}" + ("" if self.vp_stage is None else f" vp{self.vp_stage}")

    @property
    def global_name(self) -> str:
        """The path with the model's own layer number: a name that no other stage has."""
        if self.global_layer is None:
            return self.name
        return _LAYER.sub(f"decoder.layers.{self.global_layer}", self.name)


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        model: name of the description.
        recipe: file of the recipe, or None.
        versions: of Python and of the libraries.
        stages: names of the pipeline stages, in the order in which a microbatch passes them.
        num_microbatches: of a step.
        modules: in the order of stages and of each stage's modules.
        totals: over all stages.
        config: fields of the config as Megatron derives it.
        changes: what the twin has otherwise than the model.
    """

    model: str
    recipe: str | None
    versions: Mapping[str, str]
    stages: tuple[str, ...]
    num_microbatches: int
    modules: tuple[PlannedModule, ...]
    totals: Totals
    config: Mapping[str, Any]
    changes: tuple[Change, ...]


def make_plan(
    description: ModelDescription,
    recipe: Recipe | None,
    progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Plan a model; takes two processes, one thread each.

    Args:
        description: the full model.
        recipe: the recipe that ``description.recipe`` names, as it was read.
        progress: called with what has been done.

    Raises:
        InputError: Megatron refuses the model.
        WorkerError: a process ended in another way.
    """
    full = build_twin(description, keep_pipeline=True, keep_widths=True).description
    twin = build_twin(description, keep_pipeline=True)
    with tempfile.TemporaryDirectory(prefix="quant-state-") as folder:
        job = Path(folder)
        given = {
            "model": description.to_dict(),
            "full": full.to_dict(),
            "twin": twin.description.to_dict(),
            "config_fields": _CONFIG_FIELDS,
        }
        (job / "job.json").write_text(json.dumps(given))
        events = _survey(job, progress)
    config = events["names"][0]["values"]
    named = [event for event in events["names"] if event["event"] == "stage"]
    called = [event for event in events["calls"] if event["event"] == "stage"]
    join = _Join(description, recipe, config)
    modules = [
        planned
        for names, calls in zip(named, called, strict=True)
        for planned in join.stage(names, calls)
    ]
    return Plan(
        model=description.name,
        recipe=description.recipe,
        versions=events["names"][0]["versions"],
        stages=tuple(_stage_name(event) for event in named),
        num_microbatches=description.num_microbatches,
        modules=tuple(modules),
        totals=add_up(modules, join.others, description.num_microbatches),
        config=config,
        changes=twin.changes,
    )


def _survey(job: Path, progress: Callable[[str], None]) -> dict[str, list[Event]]:
    """The events of both workers; names are the real Transformer Engine's where there is one."""

    def run(*parts: str) -> dict[str, list[Event]]:
        workers = {part: ["-m", "megatron.quant_state.survey", str(job), part] for part in parts}
        tell = partial(_tell, progress)
        return run_workers(job, workers, tell, plain={"real_names"})

    if not has_transformer_engine():
        return run("names", "calls")
    events = run("real_names", "calls")
    last = events["real_names"][-1]
    if last["event"] == "unavailable":
        progress(f"Transformer Engine cannot be used here ({last['reason']}); names without it")
        return {**events, **run("names")}
    return {**events, "names": events["real_names"]}


def _tell(progress: Callable[[str], None], worker: str, event: Event) -> None:
    if worker != "calls" and event["event"] == "stage":
        progress(f"full model, meta device: {_stage_name(event)}")
    elif event["event"] == "built":
        progress("twin: built")
    elif event["event"] == "step":
        progress(f"twin: step {event['step']} done")


def _stage_name(event: Event) -> str:
    return f"pp{event['pp']}" + ("" if event["vp"] is None else f" vp{event['vp']}")


class _Join:
    """Puts what the full model says and what the twin did together.

    Attributes:
        others: parameters and FLOPs a token of each module that is no TE linear, such as norms,
            embeddings, the router and the output layer.
    """

    def __init__(
        self, description: ModelDescription, recipe: Recipe | None, config: Mapping[str, Any]
    ) -> None:
        self.description, self.recipe, self.config = description, recipe, config
        self.others: list[tuple[int, float]] = []

    def stage(self, names: Event, calls: Event) -> Iterator[PlannedModule]:
        """The planned modules of one stage."""
        layers = dict(names["layers"])
        for module in names["modules"]:
            seen = self.seen(module, calls["modules"])
            if not module["ruled"]:
                self.others.append((module["parameters"], self.flops(module, seen)))
                continue
            yield self.module(names, module, seen, layers)

    def seen(self, module: Event, calls: Mapping[str, Event]) -> Event | None:
        """What the twin did with the module; the twin has fewer experts, which are all alike."""
        name = module["name"]
        if name in calls:
            return calls[name]
        alike = [c for n, c in calls.items() if _alike(n) == _alike(name)]
        same_rule = [c for c in alike if c["has_rule"] == module["has_rule"]]
        return next(iter(same_rule or alike), None)

    def module(
        self, names: Event, module: Event, seen: Event | None, layers: Mapping[int, int]
    ) -> PlannedModule:
        name = module["name"]
        layer, mtp = _LAYER.match(name), _MTP.match(name)
        rule = self.recipe.rule_for(name) if self.recipe else None
        if (rule is not None) != module["has_rule"]:
            raise WorkerError(
                f"{name}: Megatron {'has' if module['has_rule'] else 'has no'} rule for it, and "
                f"the plan says '{rule.name if rule else None}'. Please report this recipe"
            )
        steps = seen["microbatches"] if seen else []
        storage = (seen["storage"] if seen else None) or _weight_dtype(self.description)
        first, later = (_flags(steps, i, "forward") for i in (0, 1))
        local = int(layer[1]) if layer else None
        return PlannedModule(
            pp_rank=names["pp"],
            vp_stage=names["vp"],
            name=name,
            local_layer=local,
            global_layer=layers.get(local) if local is not None else None,
            mtp_depth=int(mtp[1]) if mtp else None,
            cls=module["class"],
            rule=rule,
            storage=storage,
            training=_joined(p for step in steps for p, _ in step["forward"]),
            evaluation=_joined(p for p, _ in seen["evaluation"]["forward"]) if seen else None,
            ambient=_joined(p for step in steps for p in step["ambient"]),
            ambient_evaluation=_joined(seen["evaluation"]["ambient"]) if seen else None,
            calls=len(first),
            first_flags=first,
            later_flags=later,
            replays=tuple(dict.fromkeys(p for step in steps for p, _ in step["replay"])),
            replay_flags=(_flags(steps, 0, "replay"), _flags(steps, 1, "replay")),
            parameters=module["parameters"],
            weights=module["weights"],
            weight_elements=module["weight_elements"],
            flops=self.flops(module, seen),
            cached=bool(seen and seen["cached"]) and not (seen and seen["storage"]),
        )

    def flops(self, module: Event, seen: Event | None) -> float:
        """Two FLOPs a weight element and row, once forward and twice backward, for one token."""
        if seen is None or not seen["microbatches"] or not module["weights"]:
            return 0.0
        done = seen["microbatches"][0]
        rows = float(done["rows"])
        if ".experts." in module["name"]:
            # Tokens are routed: as many as the full model chooses experts, spread evenly.
            topk, experts = self.config["moe_router_topk"], self.config["num_moe_experts"]
            rows = len(done["forward"]) * topk / experts
        return 6.0 * float(module["weight_elements"]) * rows


def _weight_dtype(description: ModelDescription) -> str:
    """``bf16``, ``fp16`` or ``fp32``: how weights that are not quantized are held."""
    config = description.transformer_config
    given = config.get("params_dtype")
    if isinstance(given, str):
        names = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
        return names.get(given.removeprefix("torch."), given)
    return next((name for name in (BF16, "fp16") if config.get(name) is True), "fp32")


def _alike(name: str) -> str:
    return _LOCAL_EXPERT.sub("#", name)


def _flags(steps: Sequence[Event], index: int, kind: str) -> Flags:
    return tuple(flag for _, flag in steps[index][kind]) if index < len(steps) else ()


def _joined(precisions: Any) -> str | None:
    return "/".join(dict.fromkeys(precisions)) or None
