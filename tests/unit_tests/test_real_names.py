# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Plans with the names, classes and rules of the real Transformer Engine; no GPU is needed.

Run by a Python that has it, without the reference engine: `python -m pytest` on this file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.quant_state import plan as plan_module
from megatron.quant_state.model import load_model
from megatron.quant_state.plan import make_plan
from megatron.quant_state.recipe_lint import lint_recipe
from megatron.quant_state.workers import has_transformer_engine
from tests.unit_tests.planning import DENSE, MOE

RECIPE = str(Path(__file__).parent / "cases" / "pipeline_index.yaml")

pytestmark = pytest.mark.skipif(
    not has_transformer_engine(), reason="needs the real Transformer Engine, and no engine of ours"
)


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("", ["pipeline_model_parallel_size=2", "mtp_num_layers=1"]),
        ("", [*MOE, "moe_grouped_gemm=true"]),
        ("", MOE),
        ("deepseek-v3", ["parallel={}", "num_layers=2", "moe_layer_freq=[0,1]"]),
    ],
    ids=["pp2 mtp", "grouped", "sequential", "mla"],
)
def test_both_engines_give_one_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, overrides: list[str]
) -> None:
    path = tmp_path / "dense.yaml"
    path.write_text(DENSE)
    description = load_model(model or str(path), overrides, recipe=RECIPE)
    recipe = lint_recipe(RECIPE).recipe
    real = make_plan(description, recipe)
    assert real.versions["transformer-engine"][0].isdigit()
    monkeypatch.setattr(plan_module, "has_transformer_engine", lambda: False)
    ours = make_plan(description, recipe)
    assert ours.versions["transformer-engine"] == "none (reference engine)"
    assert any(module.rule is not None for module in real.modules)
    assert real.modules == ours.modules
    assert real.totals == ours.totals
    assert real.stages == ours.stages
