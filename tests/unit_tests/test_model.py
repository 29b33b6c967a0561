# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Model descriptions: what is read, where each field came from, and every kind of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.quant_state.errors import InputError, Location
from megatron.quant_state.located_yaml import parse_yaml
from megatron.quant_state.model import (
    ModelDescription,
    error_from_json,
    error_to_json,
    load_model,
    shipped_models,
)

GOOD = """\
architecture: gpt
vocab_size: 1000
seq_length: 64
transformer_config:
  num_layers: 2
  hidden_size: 64
  num_attention_heads: 4
parallel:
  tensor_model_parallel_size: 2
ddp: {bucket_size: 100}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    return path


def refusal(*arguments: object, **options: object) -> InputError:
    with pytest.raises(InputError) as caught:
        load_model(*arguments, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value


def test_shipped_models_by_name() -> None:
    assert shipped_models() == ("deepseek-v3", "deepseek-v3-mtp2", "qwen3-30b-a3b")
    v3 = load_model("deepseek-v3")
    config = v3.transformer_config
    assert (config["num_layers"], config["hidden_size"], config["num_moe_experts"]) == (
        61,
        7168,
        256,
    )
    assert v3.multi_latent_attention
    assert v3.vocab_size == 129280
    mtp2 = load_model("deepseek-v3-mtp2")
    changed = {k for k, v in mtp2.transformer_config.items() if config.get(k) != v}
    assert changed == {"mtp_num_layers", "mtp_use_repeated_layer"}


def test_layout_of_the_shipped_models_holds_every_layer() -> None:
    for name in ("deepseek-v3", "deepseek-v3-mtp2"):
        description = load_model(name)
        layout = description.parallel["pipeline_model_parallel_layout"]
        stages = layout.replace("(tt|)*29", "tt|" * 29).replace("t*3", "ttt").split("|")
        sizes = description.parallel
        assert len(stages) == (
            sizes["pipeline_model_parallel_size"] * sizes["virtual_pipeline_model_parallel_size"]
        )
        assert "".join(stages).count("t") == 61
        assert "".join(stages).count("m") == description.transformer_config["mtp_num_layers"]


def test_every_field_knows_where_it_was_said(model: Path) -> None:
    description = load_model(str(model), ["num_layers=3", "num_microbatches=5"])
    assert description.location_of("hidden_size") == Location(str(model), 6, 3)
    assert description.location_of("transformer_config.hidden_size") == Location(str(model), 6, 3)
    assert description.location_of("ddp.bucket_size") == Location(str(model), 10, 7)
    assert str(description.location_of("num_layers")) == "--set num_layers=3"
    assert str(description.location_of("num_microbatches")) == "--set num_microbatches=5"
    assert description.location_of("micro_batch_size") is None


def test_extends_names_the_base_files_places(tmp_path: Path, model: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: mine.yaml\ntransformer_config:\n  num_layers: 7\nvocab_size: 10\n")
    description = load_model(str(child))
    assert description.transformer_config["num_layers"] == 7
    assert description.transformer_config["hidden_size"] == 64
    assert description.vocab_size == 10
    assert description.location_of("num_layers") == Location(str(child), 3, 3)
    assert description.location_of("hidden_size") == Location(str(model), 6, 3)


def test_overrides_reach_every_section_and_take_yaml(model: Path) -> None:
    description = load_model(
        str(model),
        [
            "recompute_modules=[core_attn, mlp]",
            "fp8=null",
            "mtp_use_repeated_layer=true",
            "vocab_size=50",
            "ddp.bucket_size=null",
            "optimizer.lr=1e-5",
            "parallel.tensor_model_parallel_size=4",
            "pipeline_model_parallel_size=2",
            "moe_layer_freq=([0]*1+[1]*1)",
            "num_layers=8",
            "num_layers=9",
        ],
    )
    config = description.transformer_config
    assert config["recompute_modules"] == ["core_attn", "mlp"]
    assert config["fp8"] is None
    assert config["mtp_use_repeated_layer"] is True
    assert config["moe_layer_freq"] == "([0]*1+[1]*1)"
    assert config["num_layers"] == 9
    assert description.vocab_size == 50
    assert description.ddp == {"bucket_size": None}
    assert description.optimizer == {"optimizer": "adam", "lr": "1e-5"}
    assert description.parallel == {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
    }


def test_rotary_base_of_an_override_goes_where_the_attention_reads_it(model: Path) -> None:
    assert load_model(str(model), ["rotary_base=500"]).rotary_base == 500
    mla = load_model("deepseek-v3", ["rotary_base=500"])
    assert mla.transformer_config["rotary_base"] == 500
    assert mla.rotary_base == 10000


def test_exponents_without_a_dot_are_numbers(model: Path) -> None:
    model.write_text(GOOD + "rotary_base: 1e6\n")
    assert load_model(str(model)).rotary_base == 1_000_000


def test_options_win_over_overrides(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("matchers: {}\nconfigs: {}\n")
    description = load_model(
        str(model), ["num_microbatches=5"], recipe=str(recipe), num_microbatches=3
    )
    assert description.num_microbatches == 3
    assert description.recipe == str(recipe)
    assert str(description.location_of("recipe")) == f"--recipe {recipe}"


def test_recipe_of_a_file_is_relative_to_the_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text("matchers: {}\n")
    model.write_text(GOOD + "recipe: recipe.yaml\n")
    monkeypatch.chdir("/")
    assert load_model(str(model)).recipe == str(tmp_path / "recipe.yaml")
    assert load_model(str(model), ["recipe=null"]).recipe is None


def test_a_description_is_frozen_and_survives_json(model: Path) -> None:
    description = load_model(str(model), ["num_layers=3"])
    with pytest.raises(AttributeError):
        description.vocab_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        description.transformer_config["num_layers"] = 4  # type: ignore[index]
    again = ModelDescription.from_dict(json.loads(json.dumps(description.to_dict())))
    assert again == description
    assert again.location_of("num_layers") == description.location_of("num_layers")


def test_errors_survive_json() -> None:
    for location in (None, Location("a.yaml"), Location("a.yaml", 3, 4)):
        error = error_from_json(json.loads(json.dumps(error_to_json(InputError("x", location)))))
        assert (error.message, error.location) == ("x", location)


# Faults of the file: text, where, and what the message says.
FILE_FAULTS = [
    ("", "", "the file is empty"),
    ("# nothing\n", "", "the file is empty"),
    ("- a\n", "", "expected a mapping of model fields, found a list"),
    ("four\n", "", "expected a mapping of model fields, found a single value"),
    ("a: [1\n", ":2:1", "malformed YAML: while parsing a flow sequence"),
    ("a: 1\n\tb: 2\n", ":2:1", "malformed YAML"),
    ("a: b: c\n", ":1:5", "malformed YAML: mapping values are not allowed here"),
    ("a: 1\n---\nb: 2\n", ":2:1", "malformed YAML: expected a single document"),
    ("a: \x07\n", ":1:4", "malformed YAML: character #x0007 is not allowed"),
    ("a: *nowhere\n", ":1:4", "malformed YAML: found undefined alias"),
    ("a: &a [*a]\n", "", "malformed YAML: nested too deeply, or a value that contains itself"),
    ("a: " + "[" * 5000, "", "malformed YAML"),
    ("a: !!python/object:os.system {}\n", ":1:4", "!!python/object:os.system cannot be used here"),
    ("a: !!int four\n", ":1:4", "'four' is no !!int"),
    ("? [a]\n: 1\n", ":1:3", "a key must be plain text"),
    (GOOD + "vocab_size: 5\n", ":11:1", "duplicate key 'vocab_size', first given at line 2"),
    (GOOD + "vocabsize: 5\n", ":11:1", "unknown key 'vocabsize': did you mean 'vocab_size'?"),
    (GOOD + "qqq: 5\n", ":11:1", "unknown key 'qqq': Known keys: architecture, "),
    (GOOD.replace("gpt", "mamba"), ":1:1", "architecture: expected 'gpt', found \"mamba\""),
    (GOOD.replace("1000", "four"), ":2:1", 'vocab_size: expected an integer, found "four"'),
    (GOOD.replace("1000", "true"), ":2:1", "vocab_size: expected an integer, found true"),
    (GOOD.replace("1000", "1.5"), ":2:1", "vocab_size: expected an integer, found 1.5"),
    (GOOD.replace("1000", "0"), ":2:1", "vocab_size: expected a number greater than 0, found 0"),
    (GOOD.replace("vocab_size: 1000\n", ""), "", "'vocab_size' is missing"),
    ("vocab_size: 3\nseq_length: 3\n", "", "'transformer_config' is missing"),
    (GOOD + "rope_scaling: 1\n", ":11:1", "rope_scaling: expected true or false, found 1"),
    (GOOD + "rotary_base: [1]\n", ":11:1", "rotary_base: expected a number, found [1]"),
    (GOOD + "position_embedding_type: alibi\n", ":11:1", "expected 'learned_absolute', 'rope'"),
    (GOOD + "optimizer: adam\n", ":11:1", "optimizer: expected a mapping of fields"),
    (GOOD + "optimizer: 2026-01-01\n", ":11:1", "optimizer: expected a mapping of fields"),
    (GOOD.replace("num_layers", "layers"), ":4:1", "transformer_config lacks 'num_layers'"),
    (GOOD.replace("num_layers: 2", "num_layers: 0"), ":5:3", "expected at least 1, found 0"),
    (GOOD.replace("tensor_m", "tensr_m"), ":9:3", "did you mean 'tensor_model_parallel_size'?"),
    (GOOD.replace("size: 2", "size: -2"), ":9:3", "parallel.tensor_model_parallel_size: expected"),
    (
        GOOD.replace("  num_layers", "  expert_model_parallel_size: 2\n  num_layers"),
        ":5:3",
        "'expert_model_parallel_size' belongs under parallel:, not transformer_config:",
    ),
    (
        GOOD.replace("  num_layers", "  multi_latent_attention: true\n  num_layers")
        + "rotary_base: 5\n",
        ":12:1",
        "multi-latent attention reads 'rotary_base' from transformer_config: move it",
    ),
    (GOOD + "recipe: gone.yaml\n", ":11:1", "no such file"),
    (GOOD + "recipe: .\n", ":11:1", "expected a file, found a directory"),
    ("extends: mine.yaml\n", ":1:1", "extends: 'mine.yaml' extends this file in turn"),
    ("extends: gone.yaml\n", ":1:1", "no such file"),
    ("extends: [a]\n", ":1:1", "extends: expected a model name or a file, found ['a']"),
    ("extends: deepseek-v2\n", ":1:1", "no model 'deepseek-v2': did you mean 'deepseek-v3'?"),
]


@pytest.mark.parametrize(("text", "place", "words"), FILE_FAULTS)
def test_a_bad_file_gives_one_message_with_its_place(
    model: Path, text: str, place: str, words: str
) -> None:
    model.write_text(text)
    message = str(refusal(str(model)))
    assert message.startswith(f"{model}{place}: ")
    assert words in message


# Faults of an option; the place is the option itself.
OPTION_FAULTS = [
    ("num_layers", "expected FIELD=VALUE"),
    ("=4", "expected FIELD=VALUE"),
    ("ddp.=4", "expected FIELD=VALUE"),
    ("num_layers=", "no value for num_layers; write num_layers=null for none"),
    ("num_layers=[1", "malformed YAML"),
    ("num_layers=0", "num_layers: expected at least 1, found 0"),
    ("vocab_size=four", 'vocab_size: expected an integer, found "four"'),
    ("vocab_size=null", "vocab_size: expected an integer, found null"),
    ("dpp.bucket_size=4", "unknown field 'dpp.bucket_size': did you mean 'ddp.bucket_size'?"),
    ("a.b.c=4", "unknown field 'a.b.c'"),
    ("parallel.pipeline_size=2", "unknown key 'pipeline_size'"),
    ("parallel=4", "parallel: expected a mapping of fields, found 4"),
    ("architecture=mamba", "architecture: expected 'gpt'"),
    ("recipe=gone.yaml", "no such file 'gone.yaml'"),
]


@pytest.mark.parametrize(("override", "words"), OPTION_FAULTS)
def test_a_bad_override_gives_one_message_that_quotes_it(
    model: Path, override: str, words: str
) -> None:
    message = str(refusal(str(model), [override]))
    assert message.startswith(f"--set {override}: ")
    assert words in message


def test_a_bad_option_is_quoted(model: Path) -> None:
    assert str(refusal(str(model), num_microbatches=0)).startswith("--microbatches 0: ")
    assert str(refusal(str(model), recipe="gone")) == (
        "--recipe gone: no such file 'gone'; check the path"
    )


def test_names_that_are_no_model(tmp_path: Path) -> None:
    message = str(refusal("deepseek"))
    assert message == (
        "no model 'deepseek': did you mean 'deepseek-v3'? Expected a YAML file or one of "
        "deepseek-v3, deepseek-v3-mtp2, qwen3-30b-a3b"
    )
    assert "no such file" in str(refusal("gone.yaml"))
    assert "found a directory" in str(refusal(str(tmp_path)))
    assert "not a file name" in str(refusal("a\0b.yaml"))


def test_a_file_that_is_not_utf8_names_the_line(model: Path) -> None:
    model.write_bytes(b"a: 1\nb: \xff\n")
    assert str(refusal(str(model))) == (
        f"{model}:2: not UTF-8 text (byte 0xff); save the file as UTF-8"
    )


def test_merge_keys_anchors_and_a_byte_order_mark() -> None:
    text = "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\nc: *a\n"
    document = parse_yaml(text, "f")
    assert document.value == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}
    assert document.locations["b", "y"] == Location("f", 4, 3)


def test_aliases_cannot_blow_up() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for n in range(1, 12):
        text += f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n"
    with pytest.raises(InputError, match="more than 100000 values"):
        parse_yaml(text, "f")


def test_needs_neither_torch_nor_megatron_core() -> None:
    code = (
        "import sys\n"
        "from megatron.quant_state.model import load_model\n"
        "from megatron.quant_state.twin import build_twin\n"
        "build_twin(load_model('deepseek-v3'))\n"
        "print(sorted({'torch', 'megatron.core', 'numpy'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
