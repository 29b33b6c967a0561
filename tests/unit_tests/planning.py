# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Plans for tests: the workers' own code, run in the test's process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.quant_state import plan as plan_module
from megatron.quant_state import survey
from megatron.quant_state.findings import Finding
from megatron.quant_state.model import error_from_json, load_model
from megatron.quant_state.plan import Plan, PlannedModule, make_plan
from megatron.quant_state.plan_lint import lint_plan
from megatron.quant_state.recipe_lint import lint_recipe

DENSE = """\
vocab_size: 1000
seq_length: 64
position_embedding_type: rope
transformer_config:
  num_layers: 4
  hidden_size: 256
  num_attention_heads: 8
  gradient_accumulation_fusion: true
  add_bias_linear: false
  bf16: true
  fp8: e4m3
  fp8_recipe: tensorwise
"""

MOE = (
    "num_layers=2",
    "num_moe_experts=16",
    "moe_ffn_hidden_size=128",
    "moe_router_topk=4",
    "moe_token_dispatcher_type=alltoall",
)

BF16_CONFIG = """\
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
"""

FORCED_CONFIG = """\
  block:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: blockwise, override_nonquantized_autocast: true}
"""


def run_here(
    job: Path, workers: Mapping[str, Sequence[str]], progress: Any, plain: Any = ()
) -> Any:
    """``workers.run_workers`` in this process, which is on the reference engine."""
    events = {}
    for name in workers:
        code = survey.main([str(job), name])
        lines = (job / name / "events.jsonl").read_text().splitlines()
        events[name] = [json.loads(line) for line in lines]
        if code != 0:
            raise error_from_json(events[name][-1]["error"])
        for event in events[name]:
            progress(name, event)
    return events


class Planner:
    """Makes plans in this process, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[tuple[str, ...], tuple[Plan, tuple[Finding, ...]]] = {}

    def file(self, text: str, name: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def __call__(
        self, *overrides: str, model: str = "", recipe: str = ""
    ) -> tuple[Plan, tuple[Finding, ...]]:
        """A plan and its findings; ``recipe`` is the text of a recipe or a file's path."""
        key = (*overrides, model, recipe)
        if key not in self.made:
            from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

            # Megatron keeps them for the process, in the size of the first model that had MTP.
            MTPLossLoggingHelper.tracker = {}
            path = recipe
            if "\n" in recipe:
                path = self.file(recipe, f"recipe{len(self.made)}.yaml")
            name = model or self.file(DENSE, "dense.yaml")
            description = load_model(name, list(overrides), recipe=path or None)
            linted = lint_recipe(path) if path else None
            plan = make_plan(description, linted.recipe if linted else None)
            self.made[key] = (plan, lint_plan(plan, description, linted))
        return self.made[key]


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Plans by the workers' own code, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "run_workers", run_here)
        yield Planner(tmp_path_factory.mktemp("plans"))


def rows(plan: Plan, suffix: str) -> list[PlannedModule]:
    return [module for module in plan.modules if module.name.endswith(suffix)]


def codes(findings: Sequence[Finding]) -> list[str]:
    return [item.code for item in findings]
