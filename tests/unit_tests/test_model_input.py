# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Models from a launch script's flags and from functions."""

from __future__ import annotations

import json
import shlex
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from megatron.quant_state import build, commands, foreign_model, model_input
from megatron.quant_state.errors import InputError
from megatron.quant_state.model import error_from_json, load_model
from megatron.quant_state.model_input import is_function, model_of_flags, model_of_function
from megatron.quant_state.plan import make_plan
from megatron.quant_state.twin import build_twin
from tests.unit_tests.planning import BF16_CONFIG, DENSE, Planner

RECIPE = BF16_CONFIG + (
    'matchers:\n  qkv: {enabled: true, type: glob, pattern: "*.linear_qkv", config: bf16}\n'
)
FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 --vocab-size 1000
    --bf16 --fp8-format e4m3 --fp8-recipe tensorwise --disable-bias-linear
    --position-embedding-type rope --train-iters 1 --lr 1e-4 --hidden-dropout 0
    --attention-dropout 0
""")
DEEPSEEK = shlex.split("""
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 129280 --micro-batch-size 1
    --bf16 --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0
    --mscale-all-dim 1.0 --num-experts 256 --moe-layer-freq '([0]*3+[1]*58)'
    --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-score-function sigmoid
    --moe-router-pre-softmax --moe-grouped-gemm --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-router-load-balancing-type
    seq_aux_loss --moe-token-dispatcher-type alltoall --mtp-num-layers 1 --fp8-format e4m3
    --fp8-recipe blockwise --recompute-granularity selective --recompute-modules mla_up_proj
    mlp --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout 'Et*3|(tt|)*29m|L'
    --expert-model-parallel-size 64 --train-iters 1 --lr 1e-4
""")


def ask_here(job: Path, workers: Mapping[str, Sequence[str]], progress: Any) -> Any:
    """``workers.run_workers`` in this process."""
    (part,) = workers
    code = foreign_model.main([str(job), part])
    event = json.loads((job / part / "events.jsonl").read_text())
    if code != 0:
        raise error_from_json(event["error"])
    return {part: [event]}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_input, "run_workers", ask_here)


def needs_training() -> None:
    pytest.importorskip("megatron.training.arguments", reason="this wheel has no megatron.training")


def test_flags_make_the_plan_of_the_same_description(planner: Planner) -> None:
    needs_training()
    for more, overrides in (
        ([], []),
        (["--pipeline-model-parallel-size", "2"], ["pipeline_model_parallel_size=2"]),
        (
            ["--fp8-recipe", "blockwise", "--mtp-num-layers", "1"],
            ["fp8_recipe=blockwise", "mtp_num_layers=1"],
        ),
    ):
        described, _ = planner("share_embeddings_and_output_weights=true", *overrides)
        made = make_plan(model_of_flags([*FLAGS, *more]), None)
        assert made.modules == described.modules
        assert made.totals == described.totals
        assert made.stages == described.stages


def test_deepseeks_flags(planner: Planner) -> None:
    needs_training()
    found, known = model_of_flags(DEEPSEEK), load_model("deepseek-v3")
    assert found.vocab_size == known.vocab_size
    assert found.parallel["pipeline_model_parallel_layout"] == "Et*3|(tt|)*29m|L"
    assert found.parallel["expert_model_parallel_size"] == 64
    for name in (
        "num_moe_experts",
        "moe_router_topk",
        "multi_latent_attention",
        "q_lora_rank",
        "recompute_modules",
        "fp8",
        "fp8_recipe",
        "mtp_num_layers",
        "activation_func",
        "moe_grouped_gemm",
    ):
        assert found.transformer_config[name] == known.transformer_config[name]
    twin = build.build_transformer_config(build_twin(found).description)
    assert twin.moe_layer_freq == [0] * 3 + [1] * 58


def test_the_recipe_of_the_flags_and_where_a_field_was_said(planner: Planner) -> None:
    needs_training()
    path = planner.file(RECIPE, "r.yaml")
    found = model_of_flags([*FLAGS, "--te-precision-config-file", path])
    assert found.recipe == path
    assert str(found.location_of("num_layers")) == "--num-layers"
    assert str(found.location_of("fp8")) == "--fp8-format"
    other = planner.file(RECIPE, "other.yaml")
    found = model_of_flags([*FLAGS, "--te-precision-config-file", path], recipe=other)
    assert found.recipe == other
    assert model_of_flags(FLAGS, ["num_layers=3"]).transformer_config["num_layers"] == 3
    with pytest.raises(InputError, match="--te-precision-config-file: no such file"):
        model_of_flags([*FLAGS, "--te-precision-config-file", "gone.yaml"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nope"], "launch flags: unrecognized arguments: --nope"),
        (["--num-layers", "many"], "invalid int value"),
        (["--num-attention-heads", "7"], "launch flags: Megatron refuses the flags: "),
        (["--pipeline-model-parallel-size", "3"], "pipeline"),
    ],
)
def test_bad_flags_exit_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    needs_training()
    assert commands.main(["plan", "--", *FLAGS, *flags]) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert streams.out == ""


def test_the_command_line_is_left_as_it_was() -> None:
    needs_training()
    before = list(sys.argv)
    with pytest.raises(InputError):
        model_of_flags(["--nope"])
    assert sys.argv == before


def test_a_model_and_flags_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["plan", "deepseek-v3", "--", *FLAGS]) == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.fixture
def builders(monkeypatch: pytest.MonkeyPatch, planner: Planner) -> types.ModuleType:
    module = types.ModuleType("my_models")
    path = planner.file(DENSE, "dense.yaml")

    def dense() -> Any:
        return build.build_model(load_model(path, ["fp8_recipe=blockwise"]), device="meta")

    module.dense = dense  # type: ignore[attr-defined]
    module.wrapped = lambda: types.SimpleNamespace(module=dense())  # type: ignore[attr-defined]
    module.nothing = lambda: None  # type: ignore[attr-defined]
    module.exits = lambda: sys.exit(0)  # type: ignore[attr-defined]
    module.takes = lambda config: config  # type: ignore[attr-defined]
    module.several = lambda: [dense(), dense()]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_models", module)
    return module


@pytest.mark.parametrize("name", ["my_models:dense", "my_models:wrapped"])
def test_a_function_makes_the_plan_of_its_model(
    planner: Planner, builders: types.ModuleType, name: str
) -> None:
    described, _ = planner("fp8_recipe=blockwise")
    made = make_plan(model_of_function(name), None)
    assert made.modules == described.modules
    assert made.totals == described.totals


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_models:gone", "has no attribute 'gone'"),
        ("no_such_module_here:gone", "No module named"),
        ("my_models:nothing", "expected a GPTModel, found NoneType"),
        ("my_models:several", "returned 2 model chunks"),
        # Not exit code 0 of a process that said nothing.
        ("my_models:exits", "the function raised SystemExit: 0 ("),
        ("my_models:takes", "the function raised TypeError: "),
    ],
)
def test_functions_that_give_no_model(
    builders: types.ModuleType, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert commands.main(["plan", name]) == 2
    assert message in capsys.readouterr().err


def test_a_module_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "raising_models.py"
    file.write_text("import sys\n\nraise ValueError('not\\ntoday')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert commands.main(["plan", "raising_models:build"]) == 2
    said = f"importing raising_models raised ValueError: not today ({file}:3)\n"
    assert capsys.readouterr().err == f"quant-state: error: raising_models:build: {said}"


def test_what_names_a_function() -> None:
    assert is_function("package.module:build")
    assert not any(map(is_function, ("deepseek-v3", "a.yaml", "c:/a.yaml", "C:\\a.yaml", "a:b:c")))
