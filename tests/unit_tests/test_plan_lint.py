# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What is wrong with a model and its recipe together, on plans of real models."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from dataclasses import fields

from megatron.core.extensions.transformer_engine import TEQuantizationRecipe
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.quant_state.findings import CODES, Finding
from tests.unit_tests.planning import BF16_CONFIG, FORCED_CONFIG, MOE, Planner, codes, rows

CASES = Path(__file__).parent / "cases"
FIELDS = {f.name for f in fields(TransformerConfig)}
RECIPE_FIELDS = {f.name for f in fields(TEQuantizationRecipe)}
PP2 = "pipeline_model_parallel_size=2"
RULE = '  {name}: {{enabled: true, type: glob, pattern: "{pattern}", config: {config}}}\n'


def recipe(*rules: tuple[str, str], configs: str = BF16_CONFIG + FORCED_CONFIG) -> str:
    """A recipe of rules (pattern, config), named r0, r1 ... from line 7 on."""
    lines = [RULE.format(name=f"r{i}", pattern=p, config=c) for i, (p, c) in enumerate(rules)]
    return configs + "matchers:\n" + "".join(lines)


def only(findings: tuple[Finding, ...], code: str) -> Finding:
    found = [item for item in findings if item.code == code]
    assert len(found) == 1, codes(findings)
    return found[0]


def test_case_pipeline_index(planner: Planner) -> None:
    path = str(CASES / "pipeline_index.yaml")
    plan, findings = planner("num_layers=8", PP2, "mtp_num_layers=1", recipe=path)
    hit = [m for m in plan.modules if m.training == "bf16"]
    places = {(m.stage, m.local_layer, m.global_layer, m.mtp_depth) for m in hit}
    assert places == {("pp0", 0, 0, None), ("pp1", 0, 4, None), ("pp1", None, None, 0)}
    assert {str(m.rule.name) for m in hit if m.rule} == {"first"}
    # All linears of those layers, and no others.
    assert len(hit) == 4 + 4 + 5
    assert codes(findings) == ["QS201", "QS251", "QS252"]
    dead, index, mtp = findings
    assert (dead.severity, dead.location and dead.location.line) == ("error", 7)
    assert "'last'" in dead.message
    assert "local to the pipeline stage, here 0 to 3" in dead.message
    assert "layers 0, 4" in index.message
    assert {name.split(".")[2] for name in index.modules} == {"0", "4"}
    assert "MTP depth 0" in mtp.message
    assert all(name.startswith("mtp.layers.0.") for name in mtp.modules)


def test_case_pipeline_index_without_a_pipeline(planner: Planner) -> None:
    plan, findings = planner("num_layers=8", recipe=str(CASES / "pipeline_index.yaml"))
    assert findings == ()
    assert {m.global_layer for m in plan.modules if m.training == "bf16"} == {0, 7}


def test_case_fp4_mtp(planner: Planner) -> None:
    path = str(CASES / "fp4_mtp.yaml")
    fp4 = ("fp8=null", "fp4=e2m1", "fp4_recipe=nvfp4", "mtp_num_layers=1")
    plan, findings = planner(*MOE, "moe_grouped_gemm=true", *fp4, recipe=path)
    experts = [m for m in plan.modules if m.name.startswith("mtp.") and ".experts." in m.name]
    assert len(experts) == 2
    assert {(m.training, m.rule and str(m.rule.name)) for m in experts} == {("bf16", "mtp_experts")}
    assert {m.training for m in plan.modules if m.mtp_depth is None} == {"nvfp4"}
    assert codes(findings) == ["QS253", "QS153"]
    effect = findings[0]
    assert (effect.severity, effect.location and effect.location.line) == ("warning", 6)
    assert "no effect on 2 of 2 modules" in effect.message
    assert "override_nonquantized_autocast: true" in effect.remedy
    assert set(effect.modules) == {m.name for m in experts}


def test_the_key_that_is_named_makes_the_rule_act(planner: Planner) -> None:
    text = (CASES / "fp4_mtp.yaml").read_text()
    text = text.replace("nvfp4}", "nvfp4, override_nonquantized_autocast: true}")
    fp4 = ("fp8=null", "fp4=e2m1", "fp4_recipe=nvfp4", "mtp_num_layers=1")
    plan, findings = planner(*MOE, "moe_grouped_gemm=true", *fp4, recipe=text)
    experts = [m for m in plan.modules if m.name.startswith("mtp.") and ".experts." in m.name]
    assert {m.training for m in experts} == {"nvfp4"}
    assert "QS253" not in codes(findings)


def test_case_enabled_string_is_applied(planner: Planner) -> None:
    plan, findings = planner(recipe=str(CASES / "enabled_string.yaml"))
    assert codes(findings) == ["QS151"]
    assert {m.training for m in rows(plan, "linear_proj")} == {"bf16"}
    assert {m.training for m in rows(plan, "linear_qkv")} == {"tensorwise"}


def test_case_not_enabled_is_not_applied(planner: Planner) -> None:
    plan, findings = planner(recipe=str(CASES / "not_enabled.yaml"))
    assert codes(findings) == ["QS114"]
    assert {(m.training, m.rule) for m in plan.modules} == {("tensorwise", None)}


def test_case_shadowed(planner: Planner) -> None:
    plan, findings = planner("fp8=null", recipe=str(CASES / "shadowed.yaml"))
    assert codes(findings) == ["QS115"]
    assert {(m.training, m.rule and m.rule.name) for m in plan.modules} == {
        ("blockwise", "everything")
    }


def test_shadowed_on_the_model_by_several_rules(planner: Planner) -> None:
    text = recipe(("*.mlp.*", "bf16"), ("*attention*", "bf16"), ("*.linear_*", "block"))
    plan, findings = planner(recipe=text)
    item = only(findings, "QS115")
    assert "'r2'" in item.message
    assert "'r0'" in item.message
    assert "'r1'" in item.message
    assert len(item.modules) == len(plan.modules)


def test_dead_patterns_say_why(planner: Planner) -> None:
    rules = [("*.LINEAR_QKV", "bf16"), ("linear_proj", "bf16"), ("*.in_proj", "bf16")]
    _, findings = planner(recipe=recipe(*rules))
    dead = [item for item in findings if item.code == "QS201"]
    assert [item.location and item.location.line for item in dead] == [7, 8, 9]
    assert "*.linear_qkv" in dead[0].remedy
    assert "*linear_proj*" in dead[1].remedy
    assert "drop the rule" in dead[2].remedy


def test_dead_on_one_stage_alone_is_no_fault(planner: Planner) -> None:
    _, findings = planner(
        PP2, "num_layers_in_first_pipeline_stage=1", recipe=recipe(("*.layers.2.*", "bf16"))
    )
    assert codes(findings) == ["QS251"]
    assert "layer 3" in findings[0].message


def test_nothing_quantized(planner: Planner) -> None:
    text = recipe(("*", "block")).replace(", override_nonquantized_autocast: true", "")
    plan, findings = planner("fp8=null", recipe=text)
    assert {m.training for m in plan.modules} == {"bf16"}
    assert codes(findings) == ["QS202", "QS253"]
    _, findings = planner(recipe=recipe(("*", "bf16")))
    assert codes(findings) == ["QS202"]
    assert "fp8: e4m3" in findings[0].message


def test_a_rule_that_asks_for_what_is_there(planner: Planner) -> None:
    _, findings = planner("fp8=null", recipe=recipe(("*.linear_fc1", "block"), ("*", "bf16")))
    item = only(findings, "QS253")
    assert "'r1'" in item.message
    assert item.remedy == "Drop the rule"
    _, findings = planner(recipe=recipe(("*.linear_fc1", "bf16")))
    assert findings == ()


def test_the_other_override(planner: Planner) -> None:
    text = recipe(("*.linear_fc1", "bf16")).replace(
        "training_recipe: {}", "training_recipe: {override_quantized_autocast: false}"
    )
    plan, findings = planner(recipe=text)
    item = only(findings, "QS253")
    assert "override_quantized_autocast: true" in item.remedy
    assert {m.training for m in plan.modules} == {"tensorwise"}


@pytest.mark.skipif("fp8_param" not in RECIPE_FIELDS, reason="no recipe field fp8_param")
def test_quantized_parameters_that_no_name_reaches(planner: Planner) -> None:
    text = recipe(("*.linear_fc1", "block")).replace("blockwise,", "blockwise, fp8_param: true,")
    plan, findings = planner("fp8=null", recipe=text)
    item = only(findings, "QS254")
    assert {m.storage for m in rows(plan, "linear_fc1")} == {"bf16"}
    assert len(item.modules) == 4


def test_first_and_last_layers(planner: Planner) -> None:
    _, findings = planner("num_layers_at_start_in_bf16=2")
    assert codes(findings) == ["QS255"]
    _, findings = planner(
        "num_layers_at_start_in_bf16=2", "first_last_layers_bf16=true", "mtp_num_layers=1"
    )
    item = only(findings, "QS256")
    assert item.location is not None
    assert item.location.file == "--set first_last_layers_bf16=true"
    assert all(name.startswith("mtp.") for name in item.modules)
    _, findings = planner("first_last_layers_bf16=true")
    assert findings == ()


def test_evaluation_in_another_precision(planner: Planner) -> None:
    configs = (
        BF16_CONFIG + "  half:\n    transformer_engine_config_type: TEQuantizationParams\n"
        "    training_recipe: {fp8_quantization_recipe: tensorwise}\n    evaluation_recipe: {}\n"
    )
    text = recipe(("*.linear_fc1", "half"), configs=configs)
    _, findings = planner("recompute_granularity=selective", "recompute_modules=[mlp]", recipe=text)
    assert "bf16 instead of tensorwise" in only(findings, "QS257").message
    _, findings = planner(recipe=text)
    assert "QS257" not in codes(findings)


def test_other_than_the_global_recipe(planner: Planner) -> None:
    text = recipe(("*.linear_fc1", "block"))
    _, findings = planner(recipe=text)
    item = only(findings, "QS259")
    assert "asks for blockwise, the model's own recipe is tensorwise" in item.message
    _, findings = planner("fp8_recipe=blockwise", "fp8=hybrid", recipe=text)
    assert "format e4m3, the model's own is hybrid" in only(findings, "QS259").message
    _, findings = planner("fp8_recipe=blockwise", recipe=text)
    assert "QS259" not in codes(findings)


@pytest.mark.skipif("mlp_chunks_for_training" not in FIELDS, reason="no MLP chunks")
def test_repeated_modules(planner: Planner) -> None:
    _, findings = planner("mlp_chunks_for_training=4")
    item = only(findings, "QS260")
    assert "8 modules" in item.message
    assert item.location is not None
    assert item.location.file == "--set mlp_chunks_for_training=4"
    _, findings = planner("mlp_chunks_for_training=4", "disable_parameter_transpose_cache=true")
    assert findings == ()
    _, findings = planner("mlp_chunks_for_training=4", "gradient_accumulation_fusion=false")
    assert findings == ()


@pytest.mark.skipif("use_transformer_engine_op_fuser" not in FIELDS, reason="no op fuser")
def test_a_fused_mlp(planner: Planner) -> None:
    text = recipe(("*.linear_fc1", "bf16"))
    _, findings = planner("use_transformer_engine_op_fuser=true", recipe=text)
    assert len(only(findings, "QS258").modules) == 8
    assert len(only(findings, "QS261").modules) == 8
    _, findings = planner("use_transformer_engine_op_fuser=true")
    assert codes(findings) == ["QS261"]


def test_every_code_that_needs_a_model_has_its_test() -> None:
    files = (Path(__file__), Path(__file__).with_name("test_expect.py"))
    text = "".join(path.read_text() for path in files)
    assert [code for code in CODES if code > "QS2" and f'"{code}"' not in text] == []
