# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Recipes: every fault at its line, every match as Megatron's own parser makes it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.quant_state import commands
from megatron.quant_state.findings import CODES, Finding
from megatron.quant_state.globs import covers, glob_matches
from megatron.quant_state.recipe import Choice
from megatron.quant_state.recipe_lint import LintedRecipe, lint_parsed
from megatron.quant_state.recipe_reader import parse_recipe

CASES = Path(__file__).parent / "cases"

GOOD = """\
configs:
  bf16:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {}
  block:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe:
      fp8_quantization_recipe: blockwise
      override_nonquantized_autocast: true
    evaluation_recipe: {}
matchers:
  qkv:
    enabled: true
    type: glob
    pattern: "*.linear_qkv"
    config: bf16
  rest: {enabled: true, type: glob, pattern: "*", config: block}
"""


def lint(text: str, file: str = "r.yaml") -> LintedRecipe:
    return lint_parsed(parse_recipe(text, file))


def found(text: str) -> list[tuple[str, int | None]]:
    findings = lint(text).findings
    return [(item.code, item.location.line if item.location else None) for item in findings]


def case(name: str) -> tuple[LintedRecipe, Finding]:
    linted = lint((CASES / name).read_text(), name)
    assert len(linted.findings) == 1
    return linted, linted.findings[0]


def test_a_good_recipe_has_no_findings() -> None:
    assert found(GOOD) == []


def test_case_not_enabled() -> None:
    linted, item = case("not_enabled.yaml")
    assert (item.code, item.severity, str(item.location)) == (
        "QS114",
        "error",
        "not_enabled.yaml:6:3",
    )
    assert "'keep_attention_output'" in item.message
    assert "'enabled'" in item.message
    assert linted.recipe is not None
    assert linted.recipe.rule_for("decoder.layers.0.self_attention.linear_proj") is None


def test_case_enabled_string() -> None:
    linted, item = case("enabled_string.yaml")
    assert (item.code, item.severity) == ("QS151", "warning")
    assert str(item.location) == "enabled_string.yaml:7:5"
    assert linted.recipe is not None
    rule = linted.recipe.rule_for("decoder.layers.0.self_attention.linear_proj")
    assert rule is not None
    assert rule.name == "keep_attention_output"


def test_case_shadowed() -> None:
    linted, item = case("shadowed.yaml")
    assert (item.code, item.severity) == ("QS115", "error")
    assert "'down_projection' (shadowed.yaml:11:3" in item.message
    assert "'everything' (shadowed.yaml:9:3" in item.message
    assert linted.recipe is not None
    rule = linted.recipe.rule_for("decoder.layers.3.mlp.linear_fc2")
    assert rule is not None
    assert rule.name == "everything"


def test_cases_that_need_a_model_have_no_errors() -> None:
    assert found((CASES / "pipeline_index.yaml").read_text()) == []
    assert found((CASES / "fp4_mtp.yaml").read_text()) == [("QS153", 6)]


# What is replaced in GOOD, by what, and the one finding that follows with its line.
MALFORMED = {
    "open bracket": ("training_recipe: {}\n  block", "training_recipe: {\n  block", "QS101", 6),
    "tab": ("  qkv:\n", "\tqkv:\n", "QS101", 12),
    "tag": ("config: bf16", "config: !ruby bf16", "QS101", 16),
    "duplicate rule": ("  rest:", "  qkv:", "QS102", 17),
    "duplicate key": ("config: bf16\n", "config: bf16\n    config: block\n", "QS102", 17),
    "rules in a list": (GOOD[GOOD.index("matchers:") :], "matchers: [a]\n", "QS103", 11),
    "config is text": ("  bf16:\n    trans", "  bf16: x\n  other:\n    trans", "QS103", 2),
    "top key": ("configs:", "notes: x\nconfigs:", "QS104", 1),
    "matchers misspelt": ("matchers:", "matcher:", "QS104", 11),
    "enabled misspelt": ("    enabled: true", "    enable: true", "QS104", 13),
    "pattern misspelt": ('pattern: "*.l', 'patern: "*.l', "QS104", 15),
    "evaluation misspelt": ("    evaluation_recipe", "    eval_recipe", "QS104", 10),
    "recipe key": ("fp8_quantization_recipe", "fp8_recipe", "QS104", 8),
    "no matchers": (GOOD[GOOD.index("matchers:") :], "", "QS105", 1),
    "empty matchers": (GOOD[GOOD.index("matchers:") :], "matchers:\n", "QS105", 11),
    "no type": ("    type: glob\n", "", "QS106", 12),
    "no pattern": ('    pattern: "*.linear_qkv"\n', "", "QS106", 12),
    "no config": ("    config: bf16\n", "", "QS106", 12),
    "no config type": (
        "    transformer_engine_config_type: TEQuantizationParams\n",
        "",
        "QS106",
        2,
    ),
    "no training recipe": ("    training_recipe: {}\n", "", "QS106", 2),
    "regex": ("type: glob\n", "type: regex\n", "QS107", 14),
    "config type": (": TEQuantizationParams", ": TEQuantParams", "QS107", 3),
    "recipe name": ("blockwise", "blockwize", "QS108", 8),
    "fp8_format": ("override_nonquantized_autocast: true", "fp8_format: e5m2", "QS108", 9),
    "config name": ("config: bf16", "config: bf61", "QS109", 16),
    "training null": ("training_recipe: {}", "training_recipe:", "QS110", 4),
    "evaluation null": ("evaluation_recipe: {}", "evaluation_recipe: null", "QS110", 10),
    "delayed": ("blockwise", "delayed", "QS111", 8),
    "fp8 and fp4": ("blockwise", "mxfp8\n      fp4_quantization_recipe: nvfp4", "QS112", 9),
    "custom": ("blockwise", "custom", "QS113", 8),
    "no enabled": ("    enabled: true\n", "", "QS114", 12),
    "shadowed": ('"*.linear_qkv"', '"**"', "QS115", 17),
    "switch is text": ("autocast: true", 'autocast: "false"', "QS116", 9),
    "pattern is a number": ('"*.linear_qkv"', "7", "QS116", 15),
    "config is a list": ("config: bf16", "config: [bf16]", "QS116", 16),
    "enabled is text": ("    enabled: true", "    enabled: 'no'", "QS151", 13),
    "open index": ('"*.linear_qkv"', '"*.layers.1*"', "QS152", 15),
    "wrapper prefix": ('"*.linear_qkv"', '"module.decoder.*"', "QS153", 15),
    "capital": ('"*.linear_qkv"', '"*.Linear_qkv"', "QS154", 15),
    "kitchen": ("transformer_engine_config_type", "kitchen_config_type", "QS155", 2),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_each_fault_is_one_finding_at_its_line(name: str) -> None:
    old, new, code, line = MALFORMED[name]
    assert old in GOOD
    assert found(GOOD.replace(old, new, 1)) == [(code, line)]


def test_every_code_of_the_recipe_alone_has_its_test() -> None:
    tested = {code for _, _, code, _ in MALFORMED.values()}
    assert tested == {code for code in CODES if code < "QS2"}


@pytest.mark.parametrize(
    "text", ["", "- a\n", "just text\n", "null\n", "a: *b\n", "\x01", "? [1]\n"]
)
def test_what_is_no_recipe_at_all_is_one_error(text: str) -> None:
    findings = lint(text).findings
    assert [item.severity for item in findings] == ["error"]


def test_all_faults_are_shown_together() -> None:
    text = GOOD.replace("blockwise", "delayed").replace("config: bf16", "config: bf61")
    assert found(text.replace("    enabled: true\n", "")) == [
        ("QS111", 8),
        ("QS114", 12),
        ("QS109", 15),
    ]


def test_the_nearest_right_name_is_given() -> None:
    findings = lint(GOOD.replace("fp8_quantization_recipe", "fp8_quantisation_recipe")).findings
    assert findings[0].remedy == "Did you mean 'fp8_quantization_recipe'?"


@pytest.mark.parametrize(
    ("first", "second", "covered"),
    [
        ("*", "", True),
        ("*", "*.linear_fc2", True),
        ("*.linear_fc2", "*", False),
        ("*.linear_fc?", "*.linear_fc[12]", True),
        ("*.linear_fc[12]", "*.linear_fc?", False),
        ("*.linear_fc[!12]", "*.linear_fc3", True),
        ("*mlp*", "*.mlp.experts.*", True),
        ("*.mlp.*", "*mlp*", False),
        ("a[", "a[", True),
        ("*a*b*c*", "xa*bb*cx", True),
    ],
)
def test_covers(first: str, second: str, covered: bool) -> None:
    assert covers(first, second) is covered


PATTERNS = st.lists(
    st.sampled_from(["*", "?", ".", "a", "b", "1", "[ab]", "[!a]", "[", "]", "layers", "10"]),
    max_size=6,
).map("".join)
PATHS = st.lists(st.sampled_from(["a", "b", "1", ".", "layers", "10"]), max_size=6).map("".join)


@given(PATTERNS, PATTERNS, PATHS)
def test_a_covered_pattern_matches_no_more(first: str, second: str, path: str) -> None:
    if covers(first, second) and glob_matches(path, second):
        assert glob_matches(path, first)


def maybe(value: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(value), st.just(value), st.just(value), JUNK)


JUNK = st.sampled_from([None, "", "x", 0, 1, True, False, [], ["a"], {}, {"a": 1}])
CHOICES = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "fp8_quantization_recipe": st.sampled_from(["blockwise", "mxfp8", "delayed", "custom"]),
            "fp4_quantization_recipe": st.sampled_from(["nvfp4", "custom", None]),
            "custom_recipe_factory": st.just("a.b.c"),
            "override_quantized_autocast": st.booleans(),
            "unknown": st.just(1),
        },
    ),
    JUNK,
)
CONFIGS = st.one_of(
    st.fixed_dictionaries(
        {
            "transformer_engine_config_type": maybe("TEQuantizationParams"),
            "training_recipe": CHOICES,
        },
        optional={"evaluation_recipe": CHOICES, "unknown": st.just(1)},
    ),
    JUNK,
)
GOOD_CONFIG = st.just(
    {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.sampled_from([True, True, True, False, "false", "", 0, 1, None]),
        "type": maybe("glob"),
        "pattern": st.one_of(PATTERNS, JUNK),
        "config": maybe("c"),
        "unknown": st.just(1),
    },
)
GOOD_RULES = st.builds(
    lambda enabled, pattern, config: {
        "enabled": enabled,
        "type": "glob",
        "pattern": pattern,
        "config": config,
    },
    st.sampled_from([True, True, "false", False, 0]),
    PATTERNS,
    st.sampled_from(["c", "d"]),
)
NAMES = st.sampled_from(["r", "s", "t", "u"])


def recipes(rules: Any, configs: Any) -> Any:
    return st.fixed_dictionaries(
        {
            "configs": st.fixed_dictionaries({"c": configs, "d": GOOD_CONFIG}),
            "matchers": st.dictionaries(NAMES, rules, min_size=1),
        }
    )


@pytest.fixture(scope="module")
def megatron() -> Any:
    pytest.importorskip("transformer_engine")
    from megatron.core.extensions.transformer_engine import TEQuantizationParams
    from megatron.core.quantization import quant_config

    def match(document: Any, paths: list[str]) -> list[Any]:
        """The config key of each path, by Megatron; raises what Megatron raises."""
        recipe = quant_config.RecipeConfig.from_config_dict(document)
        contexts = [quant_config.MatchContext(path, None) for path in paths]
        for key, values in recipe.configs.items():
            config = quant_config.QuantizationConfig(values, contexts[0], key)
            TEQuantizationParams.parse_from_config(config)
        for context in contexts:
            recipe.match(context)
        return [recipe.match_to_config_key(context) for context in contexts]

    return match


@settings(max_examples=300, deadline=None)
@given(document=recipes(GOOD_RULES, GOOD_CONFIG), paths=st.lists(PATHS, min_size=1, max_size=5))
def test_every_match_is_megatrons(megatron: Any, document: Any, paths: list[str]) -> None:
    recipe = lint(yaml.safe_dump(document, sort_keys=False)).recipe
    empty = any(r["pattern"] == "" and r["enabled"] for r in document["matchers"].values())
    if empty:
        assert recipe is None
        return
    assert recipe is not None
    rules = [recipe.rule_for(path) for path in paths]
    assert [rule.config if rule else None for rule in rules] == megatron(document, paths)


@settings(max_examples=500, deadline=None)
@given(document=recipes(RULES, CONFIGS), path=PATHS)
def test_what_megatron_refuses_is_an_error_and_the_rest_matches_alike(
    megatron: Any, document: Any, path: str
) -> None:
    linted = lint(yaml.safe_dump(document, sort_keys=False))
    try:
        expected = megatron(document, [path])
    except Exception:
        assert any(item.severity == "error" for item in linted.findings)
        assert linted.recipe is None
        return
    if linted.recipe is not None:
        rule = linted.recipe.rule_for(path)
        assert [rule.config if rule else None] == expected


def test_the_known_keys_are_megatrons(megatron: Any) -> None:
    from megatron.core.enums import Fp4Recipe, Fp8Recipe
    from megatron.core.extensions.transformer_engine import TEQuantizationRecipe

    from megatron.quant_state import recipe_reader

    theirs = {f.name: f.default for f in fields(TEQuantizationRecipe)}
    known = recipe_reader._known_choice_keys()
    assert set(known) == set(theirs)
    assert {name: getattr(Choice(), name) for name in known} == theirs
    values = recipe_reader._VALUES
    assert {*values["fp8_quantization_recipe"], "delayed"} == {str(r.value) for r in Fp8Recipe}
    assert set(values["fp4_quantization_recipe"]) == {str(r.value) for r in Fp4Recipe}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("not_enabled.yaml", 1),
        ("shadowed.yaml", 1),
        ("enabled_string.yaml", 0),
        ("pipeline_index.yaml", 0),
        ("gone.yaml", 2),
        ("", 2),
    ],
)
def test_exit_codes(name: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["lint", str(CASES / name)]) == code
    streams = capsys.readouterr()
    assert (streams.err != "") is (code == 2)
    assert (streams.out != "") is (code != 2)


def test_malformed_yaml_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: [\n")
    assert commands.main(["lint", str(path)]) == 1
    assert f"{path}:2:1: error QS101: malformed YAML" in capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CASES / "not_enabled.yaml")
    assert commands.main(["lint", path, "--format", "json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["schema"], printed["errors"], printed["warnings"]) == (
        "quant-state/lint/1",
        1,
        0,
    )
    item = printed["findings"][0]
    assert (item["code"], item["file"], item["line"], item["column"]) == ("QS114", path, 6, 3)


def test_the_documentation_lists_every_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    for code, (severity, title) in CODES.items():
        assert f"| {code} | {severity} | {title} |" in text
