# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Plans of real models on the reference engine: stages, rules, precision, calls, flags, totals."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.quant_state import plan as plan_module
from megatron.quant_state import survey
from megatron.quant_state.errors import InputError
from megatron.quant_state.model import load_model
from megatron.quant_state.plan import make_plan
from megatron.quant_state.plan_totals import cached_bytes, quantizations_per_step
from megatron.quant_state.twin import build_twin
from tests.unit_tests.planning import BF16_CONFIG, DENSE, FORCED_CONFIG, MOE, Planner, rows

FIELDS = {f.name for f in fields(TransformerConfig)}
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def test_a_dense_model(planner: Planner) -> None:
    plan, findings = planner()
    assert findings == ()
    assert plan.stages == ("pp0",)
    assert len(plan.modules) == 4 * len(LINEARS)
    for module in plan.modules:
        assert (module.rule, module.storage) == (None, "bf16")
        assert (module.training, module.evaluation, module.ambient) == ("tensorwise",) * 3
        assert (module.calls, module.first_flags, module.later_flags) == (1, (True,), (False,))
        assert (module.local_layer, module.replays, module.cached) == (
            module.global_layer,
            (),
            True,
        )
    qkv = rows(plan, "linear_qkv")[0]
    assert qkv.cls == "TELayerNormColumnParallelLinear"
    # Full sizes: [3 * hidden, hidden] and the weights of the norm.
    assert (qkv.weight_elements, qkv.parameters) == (3 * 256 * 256, 3 * 256 * 256 + 2 * 256)
    assert qkv.flops == 6 * 3 * 256 * 256


def test_totals_of_a_dense_model(planner: Planner) -> None:
    totals = planner()[0].totals
    layer = (3 + 1 + 4 + 4) * 256 * 256
    norms = 2 * 2 * 256
    assert totals.parameters == {
        "bf16": 2 * 1000 * 256 + 2 * 256,
        "tensorwise": 4 * (layer + norms),
    }
    assert totals.flops == {"bf16": 6 * 1000 * 256, "tensorwise": 6 * 4 * layer}
    assert totals.cached_bytes == 2 * 4 * layer
    assert totals.weight_quantizations == 16
    assert totals.modules == {"tensorwise": 16}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("disable_parameter_transpose_cache=true",),
        ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"),
        ("recompute_granularity=selective", "recompute_modules=[mlp]"),
        ("fp8_recipe=blockwise", "num_microbatches=1"),
        (*MOE, "moe_grouped_gemm=true"),
        (*MOE, "moe_grouped_gemm=true", "mtp_num_layers=1"),
    ],
    ids=lambda overrides: ",".join(overrides) or "dense",
)
def test_quantizations_are_those_that_the_engine_counts(
    planner: Planner,
    overrides: tuple[str, ...],
) -> None:
    from transformer_engine import reference

    from megatron.quant_state.twin_run import TwinRun

    plan, _ = planner(*overrides)
    full = load_model(planner.file(DENSE, "dense.yaml"), list(overrides))
    run = TwinRun(build_twin(full, keep_pipeline=True).description)
    for _ in range(2):
        run.train()
    counted = reference.counters.weight_quantizations
    experts = full.transformer_config.get("num_moe_experts", 8)
    expected = 0
    for module in plan.modules:
        one = quantizations_per_step(module, run.microbatches) // module.weights
        # The twin has fewer experts, each with a weight of its own.
        expected += one * (min(experts, 8) if ".experts." in module.name else 1)
    assert counted == expected > 0


def test_the_cache_switched_off(planner: Planner) -> None:
    plan, _ = planner("disable_parameter_transpose_cache=true", "num_microbatches=8")
    assert (
        {m.first_flags for m in plan.modules} == {m.later_flags for m in plan.modules} == {(None,)}
    )
    assert plan.totals.cached_bytes == 0
    assert plan.totals.weight_quantizations == 16 * 8


def test_recompute_regions(planner: Planner) -> None:
    plan, _ = planner("recompute_granularity=selective", "recompute_modules=[mlp]")
    replayed = {m.name.rsplit(".", 1)[1] for m in plan.modules if m.replays}
    assert replayed == {"linear_fc1", "linear_fc2"}
    assert all(m.replays == ("tensorwise",) for m in plan.modules if m.replays)
    assert rows(plan, "linear_fc1")[0].calls == 1


def test_moe(planner: Planner) -> None:
    plan, _ = planner(*MOE, "moe_grouped_gemm=true")
    fc1 = rows(plan, "experts.linear_fc1")[0]
    assert (fc1.cls, fc1.weights) == ("TEColumnParallelGroupedLinear", 16)
    assert fc1.parameters == 16 * 128 * 256
    # Four of sixteen experts see a token.
    assert fc1.flops == 6 * 4 * 128 * 256
    assert fc1.training == "tensorwise"


def test_local_experts_that_the_twin_has_not(planner: Planner) -> None:
    recipe = BF16_CONFIG + (
        'matchers:\n  twelve: {enabled: true, type: glob, pattern: "*.local_experts.12.*", '
        "config: bf16}\n"
    )
    plan, _ = planner(*MOE, recipe=recipe)
    twelve = rows(plan, "local_experts.12.linear_fc1")
    assert len(twelve) == 2
    assert {str(m.rule.name) for m in twelve if m.rule} == {"twelve"}
    assert rows(plan, "local_experts.15.linear_fc1")[0].training == "tensorwise"


@pytest.mark.parametrize(
    ("overrides", "stages", "layers"),
    [
        (("pipeline_model_parallel_size=2",), ("pp0", "pp1"), [[0, 1], [2, 3]]),
        (
            ("pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"),
            ("pp0 vp0", "pp1 vp0", "pp0 vp1", "pp1 vp1"),
            [[0], [1], [2], [3]],
        ),
        (
            ("pipeline_model_parallel_size=2", "num_layers_in_first_pipeline_stage=1"),
            ("pp0", "pp1"),
            [[0], [1, 2, 3]],
        ),
        (
            ("pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et|tt|t|L"),
            ("pp0 vp0", "pp1 vp0", "pp0 vp1", "pp1 vp1"),
            [[0], [1, 2], [3], []],
        ),
    ],
    ids=["pp2", "pp2 vp2", "uneven", "layout"],
)
def test_pipeline_stages(
    planner: Planner,
    overrides: tuple[str, ...],
    stages: tuple[str, ...],
    layers: list[list[int]],
) -> None:
    plan, _ = planner(*overrides)
    assert plan.stages == stages
    found: dict[str, dict[int, int]] = {name: {} for name in stages}
    for module in plan.modules:
        assert module.local_layer is not None
        assert module.global_layer is not None
        found[module.stage][module.local_layer] = module.global_layer
    assert [list(found[name].values()) for name in stages] == layers
    assert all(list(f) == list(range(len(f))) for f in found.values())
    # Each stage runs as its layers do without a pipeline.
    whole, _ = planner()
    assert {m.global_name: m.training for m in plan.modules} == {
        m.global_name: m.training for m in whole.modules
    }
    assert sum(m.parameters for m in plan.modules) == sum(m.parameters for m in whole.modules)


def test_stages_leave_the_process_as_it_was(planner: Planner) -> None:
    from megatron.core import parallel_state

    planner("pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2")
    assert parallel_state.get_pipeline_model_parallel_world_size() == 1
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None


def test_mtp_on_a_pipeline_is_on_the_last_stage_alone(planner: Planner) -> None:
    plan, _ = planner("pipeline_model_parallel_size=2", "mtp_num_layers=1")
    mtp = [m for m in plan.modules if m.mtp_depth is not None]
    assert {m.stage for m in mtp} == {"pp1"}
    assert {m.training for m in mtp} == {"tensorwise"}
    assert {m.calls for m in mtp} == {1}


def test_first_and_last_layers_in_bf16_across_stages(planner: Planner) -> None:
    plan, _ = planner("pipeline_model_parallel_size=2", "first_last_layers_bf16=true")
    assert {m.global_layer for m in plan.modules if m.training == "bf16"} == {0, 3}


@pytest.mark.skipif("mtp_use_repeated_layer" not in FIELDS, reason="no repeated MTP layer")
def test_a_repeated_layer_is_called_twice_and_flagged_once(planner: Planner) -> None:
    plan, _ = planner("mtp_num_layers=2", "mtp_use_repeated_layer=true")
    mtp = [m for m in plan.modules if m.mtp_depth is not None]
    assert {(m.calls, m.first_flags, m.later_flags) for m in mtp} == {
        (2, (True, False), (False, False))
    }


@pytest.mark.skipif("mlp_chunks_for_training" not in FIELDS, reason="no MLP chunks")
def test_chunks_are_more_calls_and_no_more_flops(planner: Planner) -> None:
    plan, _ = planner("mlp_chunks_for_training=4")
    whole, _ = planner()
    assert {m.calls for m in rows(plan, "linear_fc1")} == {4}
    assert plan.totals.flops == whole.totals.flops


def test_mla(planner: Planner) -> None:
    plan, _ = planner("parallel={}", "num_layers=2", "moe_layer_freq=[0,1]", model="deepseek-v3")
    assert {m.training for m in plan.modules} == {"blockwise"}
    up = rows(plan, "linear_q_up_proj")
    assert {m.replays for m in up} == {("blockwise",)}
    assert rows(plan, "linear_q_down_proj")[0].replays == ()
    experts = rows(plan, "layers.1.mlp.experts.linear_fc1")[0]
    assert (experts.weights, experts.weight_elements) == (256, 256 * 2 * 2048 * 7168)


def test_parallel_sizes_change_nothing(planner: Planner) -> None:
    plan, _ = planner(*MOE, "expert_model_parallel_size=4", "tensor_model_parallel_size=2")
    whole, _ = planner(*MOE)
    assert plan.modules == whole.modules


def test_recipe_alone(planner: Planner) -> None:
    recipe = (
        BF16_CONFIG
        + FORCED_CONFIG
        + 'matchers:\n  up: {enabled: true, type: glob, pattern: "*.linear_fc1", config: block}\n'
    )
    plan, findings = planner("fp8=null", recipe=recipe)
    assert findings == ()
    for module in plan.modules:
        is_up = module.name.endswith("linear_fc1")
        assert (module.training, module.ambient) == ("blockwise" if is_up else "bf16", "bf16")
        assert module.evaluation == module.training
        assert module.cached is is_up
        assert (str(module.rule.name) if module.rule else None) == ("up" if is_up else None)
    assert rows(plan, "linear_fc1")[0].rule is not None


def test_an_evaluation_recipe(planner: Planner) -> None:
    recipe = (
        "configs:\n  half:\n    transformer_engine_config_type: TEQuantizationParams\n"
        "    training_recipe: {fp8_quantization_recipe: blockwise}\n    evaluation_recipe: {}\n"
        'matchers:\n  all: {enabled: true, type: glob, pattern: "*", config: half}\n'
    )
    plan, _ = planner(recipe=recipe)
    assert {(m.training, m.evaluation) for m in plan.modules} == {("blockwise", "bf16")}


def test_quantized_parameters(planner: Planner) -> None:
    plan, _ = planner("fp8_param=true")
    assert {m.storage for m in plan.modules} == {"Float8Tensor"}
    assert plan.totals.cached_bytes == 0
    assert plan.totals.weight_quantizations == 16


def test_bf16_weights_are_never_counted_as_cached(planner: Planner) -> None:
    plan, findings = planner("fp8=null")
    assert findings == ()
    assert plan.totals.weight_quantizations == plan.totals.cached_bytes == 0
    assert all(cached_bytes(module) == 0.0 for module in plan.modules)


def test_width_changes_sizes_alone(planner: Planner) -> None:
    wide, _ = planner("hidden_size=2560", "num_attention_heads=80")
    narrow, _ = planner()

    def decisions(plan: Any) -> list[Any]:
        return [(m.name, m.cls, m.training, m.first_flags, m.calls) for m in plan.modules]

    assert decisions(wide) == decisions(narrow)
    assert wide.modules[0].parameters == 100 * narrow.modules[0].parameters


def test_what_megatron_refuses(planner: Planner) -> None:
    with pytest.raises(InputError, match="pipeline_model_parallel_size=3"):
        planner("pipeline_model_parallel_size=3")


def test_an_engine_that_cannot_be_used_is_said_and_done_without(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(given: Any, write: Any, te_version: str) -> None:
        if te_version != "none (reference engine)":
            write("config", values={}, versions={})
            raise OSError("libnccl.so.2: cannot open shared object file")
        names(given, write, te_version)

    names = survey._names
    monkeypatch.setattr(survey, "_names", broken)
    monkeypatch.setattr(plan_module, "has_transformer_engine", lambda: True)
    said: list[str] = []
    description = load_model(planner.file(DENSE, "dense.yaml"))
    assert make_plan(description, None, said.append).modules == planner()[0].modules
    assert any("libnccl.so.2" in text for text in said)
