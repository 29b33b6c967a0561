# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Real Megatron objects from descriptions, on the reference engine; and what Megatron refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.quant_state import megatron_config
from megatron.quant_state.build import (
    build_ddp,
    build_model,
    build_optimizer,
    build_transformer_config,
    check_model,
    connect_schedule,
    initialize_single_process,
)
from megatron.quant_state.errors import InputError
from megatron.quant_state.megatron_config import load_recipe, megatron_version
from megatron.quant_state.model import ModelDescription, load_model
from megatron.quant_state.twin import build_twin

FIELDS = {f.name for f in dataclasses.fields(TransformerConfig)}
REPEATED_MTP = "mtp_use_repeated_layer" in FIELDS
CHUNKS = "mlp_chunks_for_training" in FIELDS

DENSE = """\
vocab_size: 1000
seq_length: 64
position_embedding_type: rope
transformer_config:
  num_layers: 2
  hidden_size: 256
  num_attention_heads: 8
  num_query_groups: 4
  gradient_accumulation_fusion: true
  add_bias_linear: false
  fp8: e4m3
  fp8_recipe: tensorwise
"""

RECIPE = """\
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  block:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: blockwise, override_nonquantized_autocast: true}
matchers:
  qkv: {type: glob, pattern: "*.linear_qkv", config: bf16, enabled: true}
  fc1: {type: glob, pattern: "*.1.mlp.linear_fc1", config: block, enabled: true}
"""


@pytest.fixture(scope="module", autouse=True)
def _process() -> None:
    initialize_single_process()


@pytest.fixture(autouse=True)
def _no_earlier_mtp_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    # Megatron keeps them for the process, in the size of the first model that had MTP.
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})


@pytest.fixture
def dense(tmp_path: Path) -> str:
    path = tmp_path / "dense.yaml"
    path.write_text(DENSE)
    return str(path)


def twin_of(name: str, overrides: list[str] | None = None) -> ModelDescription:
    full = load_model(name, overrides or [])
    check_model(full)
    return build_twin(full).description


def kinds(model: torch.nn.Module, suffix: str) -> list[str]:
    return [type(m).__name__ for n, m in model.named_modules() if n.endswith(suffix)]


def train(description: ModelDescription, steps: int = 2) -> list[float]:
    """Losses of a few steps with DDP, Megatron's schedule and its optimizer."""
    initialize_single_process()
    model = build_model(description)
    ddp = build_ddp(model, description)
    optimizer = build_optimizer([ddp], description)
    connect_schedule([ddp], optimizer)
    length, vocabulary = description.seq_length, description.vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, length + 1), generator=generator)
    losses = []

    def forward_step(_: Any, chunk: Any) -> Any:
        positions = torch.arange(length)[None]
        mask = torch.ones(1, length)
        out = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:], loss_mask=mask)
        return out, lambda loss: (loss.mean(), {"loss": loss.detach().mean()})

    for _ in range(steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[ddp],
            num_microbatches=description.num_microbatches,
            seq_length=length,
            micro_batch_size=1,
            forward_only=False,
        )
        assert all(torch.isfinite(p.main_grad).all() for p in model.parameters())
        assert optimizer.step()[0]
        losses.append(float(reports[0]["loss"]))
    return losses


def test_config_class_dtype_and_converted_values() -> None:
    config = build_transformer_config(load_model("deepseek-v3", ["moe_permute_fusion=false"]))
    assert type(config) is MLATransformerConfig
    assert config.params_dtype is config.pipeline_dtype is torch.bfloat16
    assert config.activation_func is torch.nn.functional.silu
    assert config.moe_layer_freq == [0] * 3 + [1] * 58
    assert config.use_cpu_initialization
    twin = build_transformer_config(twin_of("qwen3-30b-a3b", ["layernorm_epsilon=1e-5"]))
    assert type(twin) is TransformerConfig
    assert twin.params_dtype is torch.float32
    assert twin.layernorm_epsilon == 1e-5


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-mtp2", "qwen3-30b-a3b"])
def test_twins_of_the_shipped_models_have_the_full_models_modules(name: str) -> None:
    if name == "deepseek-v3-mtp2" and not REPEATED_MTP:
        pytest.skip(f"megatron-core {megatron_version()} has no repeated MTP layer")
    model = build_model(twin_of(name))
    layers = len(model.decoder.layers)
    moe = kinds(model.decoder, ".mlp").count("MoELayer")
    if name == "qwen3-30b-a3b":
        assert (layers, moe) == (48, 48)
        assert not hasattr(model, "mtp")
    else:
        assert (layers, moe) == (61, 58)
        assert len(model.mtp.layers) == 1
        assert kinds(model, "linear_q_up_proj") == ["TELayerNormColumnParallelLinear"] * 62
    grouped = kinds(model.decoder, ".mlp.experts.linear_fc1")
    assert grouped == ["TEColumnParallelGroupedLinear"] * moe


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["fp8=null"],
        ["fp8_recipe=blockwise"],
        ["fp8_recipe=delayed"],
        ["bf16=true", "pipeline_model_parallel_size=2", "tensor_model_parallel_size=2"],
        ["mtp_num_layers=1", "recompute_granularity=selective"],
        ["recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"],
        ["ddp.use_distributed_optimizer=true"],
        ["ddp.overlap_grad_reduce=true", "optimizer.optimizer=sgd", "optimizer.lr=1e-2"],
        ["share_embeddings_and_output_weights=true"],
        ["num_moe_experts=16", "moe_layer_freq=[0,1]", "moe_token_dispatcher_type=alltoall"],
        ["normalization=LayerNorm", "add_bias_linear=true", "position_embedding_type=none"],
    ],
    ids=lambda overrides: ",".join(overrides) or "dense",
)
def test_a_dense_model_and_its_variants_train(dense: str, overrides: list[str]) -> None:
    first, second = train(twin_of(dense, overrides))
    assert second < first


@pytest.mark.skipif(not CHUNKS, reason="this megatron-core has no mlp_chunks_for_training")
def test_mlp_chunks_train(dense: str) -> None:
    first, second = train(twin_of(dense, ["mlp_chunks_for_training=4"]))
    assert second < first


def test_a_step_of_the_moe_mla_mtp_twin() -> None:
    pattern = "moe_layer_freq=[0,1]"
    small = ["parallel={}", "num_layers=2", pattern, "mtp_num_layers=2", "num_microbatches=1"]
    if REPEATED_MTP:
        small.append("mtp_use_repeated_layer=true")
    assert len(train(twin_of("deepseek-v3", small), steps=1)) == 1


def test_the_same_seed_gives_the_same_weights(dense: str) -> None:
    weights = []
    for _ in range(2):
        initialize_single_process(seed=5)
        weights.append([p.detach() for p in build_model(twin_of(dense)).parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_rules_reach_the_modules(dense: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    twin = twin_of(dense, [f"recipe={tmp_path / 'recipe.yaml'}"])
    ruled = {
        name: module.te_quant_params.training_recipe.fp8_quantization_recipe
        for name, module in build_model(twin).named_modules()
        if getattr(module, "te_quant_params", None) is not None
    }
    assert set(ruled) == {
        "decoder.layers.0.self_attention.linear_qkv",
        "decoder.layers.1.self_attention.linear_qkv",
        "decoder.layers.1.mlp.linear_fc1",
    }
    assert ruled["decoder.layers.0.self_attention.linear_qkv"] is None
    assert ruled["decoder.layers.1.mlp.linear_fc1"] == "blockwise"


def test_the_full_model_on_the_meta_device() -> None:
    full = load_model("qwen3-30b-a3b", ["parallel={}", "moe_permute_fusion=false"])
    model = build_model(full, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == 30_532_122_624


def test_main_grads_and_the_kind_of_optimizer_follow_ddp(dense: str) -> None:
    for sharded in (True, False):
        twin = twin_of(dense, [f"ddp.use_distributed_optimizer={str(sharded).lower()}"])
        model = build_model(twin)
        ddp = build_ddp(model, twin)
        assert all(p.main_grad.shape == p.shape for p in model.parameters())
        config = build_optimizer([ddp], twin).config
        assert config.use_distributed_optimizer is sharded


# Overrides of deepseek-v3 that this Megatron refuses; the place is the last override.
REFUSED = [
    (["vocabsize=3"], "unknown field 'vocabsize'", "did you mean 'vocab_size'?"),
    (["num_layerss=3"], "unknown field 'num_layerss'", "did you mean 'num_layers'?"),
    (["_cpu_offloading_context=3"], "unknown field", "MLATransformerConfig of megatron-core"),
    (["num_layers=four"], "num_layers: expected an integer, found 'four'", ""),
    (["num_layers=true"], "num_layers: expected an integer, found true", ""),
    (["num_layers=2.5"], "num_layers: expected an integer, found 2.5", ""),
    (["hidden_size=null"], "hidden_size: expected an integer, found null", ""),
    (["hidden_size={a: 1}"], "hidden_size: expected an integer, found {'a': 1}", ""),
    (["bf16=1"], "bf16: expected true or false, found 1", ""),
    (["layernorm_epsilon=small"], "layernorm_epsilon: expected a number, found 'small'", ""),
    (["layernorm_epsilon=true"], "layernorm_epsilon: expected a number, found true", ""),
    (["fp8_recipe=7"], "fp8_recipe: expected ", "found 7"),
    (["activation_func=swish"], "activation_func: expected one of silu, gelu, relu", "'swish'"),
    (["params_dtype=float99"], "params_dtype: expected a dtype (bf16, fp16 or fp32)", ""),
    (["attention_backend=flashh"], "attention_backend: expected one of flash, fused", "'flashh'"),
    (["recompute_modules=core_attn"], "recompute_modules: expected a list (each text) or", ""),
    (["recompute_modules=[core_atn]"], "recompute_modules: megatron-core", "{'core_atn'}"),
    (["window_size=[1]"], "window_size: expected a list of 2 or null, found [1]", ""),
    (["moe_layer_freq=foo"], "moe_layer_freq: expected an integer or a list", "found 'foo'"),
    (["moe_layer_freq=([0]*3+[1]*57)"], "a pattern of 60 layers, but num_layers is 61", ""),
    (["init_method=normal"], "an object that a description cannot hold", ""),
    (["quant_recipe=x"], "quant_recipe: name the recipe's file as recipe:", ""),
    (["num_layers=60"], "num_layers: megatron-core", "(see also pipeline_model_parallel_layout, "),
    (["fp4=e2m1"], "fp4 and fp8 cannot be used simultaneously", "(see also fp8, "),
    (["fp8=null", "fp8_param=true"], "fp8_param must be used together with fp8 mode", ""),
    (["num_moe_experts=100"], "num_moe_experts (100) should be divisible by", ""),
    (["expert_model_parallel_size=7"], "num_moe_experts (256) must be a multiple of", "(7)"),
    (["tensor_model_parallel_size=3"], "must be a multiple of tensor_model_parallel_size", ""),
    (["sequence_parallel=true"], "Cannot use sequence parallelism without tensor", ""),
    (["recompute_granularity=full"], 'recompute_method must be "block" or "uniform"', ""),
]


@pytest.mark.parametrize(("overrides", "words", "more"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_megatron_refuses_is_one_line_with_its_place(
    overrides: list[str], words: str, more: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_model(load_model("deepseek-v3", overrides))
    message = str(caught.value)
    assert message.startswith(f"--set {overrides[-1]}: ")
    assert words in message
    assert more in message
    assert "\n" not in message


def test_a_fault_of_the_file_has_line_and_column(dense: str) -> None:
    Path(dense).write_text(DENSE.replace("fp8: e4m3", "q_lora_rank: 3"))
    with pytest.raises(InputError) as caught:
        check_model(load_model(dense))
    assert str(caught.value) == (
        f"{dense}:11:3: q_lora_rank: belongs to multi-latent attention; "
        "set multi_latent_attention: true"
    )
    Path(dense).write_text(DENSE + "  recompute_granularity: selective\n  recompute_modules: [x]\n")
    with pytest.raises(
        InputError, match=r":14:3: recompute_modules: megatron-core [0-9.]+ refuses"
    ):
        check_model(load_model(dense))


def test_a_split_that_does_not_divide_the_layers(dense: str) -> None:
    with pytest.raises(InputError, match=r"^--set pipeline_model_parallel_size=3: .*divisible"):
        check_model(load_model(dense, ["pipeline_model_parallel_size=3"]))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ddp.bucket_sze=3", "did you mean 'bucket_size'?"),
        ("ddp.bucket_size=big", "bucket_size: expected an integer or null, found 'big'"),
        ("ddp.use_megatron_fsdp=true", "only DistributedDataParallel is built"),
        ("optimizer.lrr=3", "unknown field 'lrr': OptimizerConfig of megatron-core"),
        ("optimizer.lr=fast", "lr: expected a number or null, found 'fast'"),
        ("optimizer.use_distributed_optimizer=true", "contradicts the model and ddp, which say"),
    ],
)
def test_faults_of_ddp_and_optimizer(dense: str, override: str, words: str) -> None:
    twin = twin_of(dense, [override])
    model = build_model(twin)
    with pytest.raises(InputError) as caught:
        build_optimizer([build_ddp(model, twin)], twin)
    assert str(caught.value).startswith(f"--set {override}: ")
    assert words in str(caught.value)


def test_an_unknown_optimizer_is_no_traceback(dense: str) -> None:
    twin = twin_of(dense, ["optimizer.optimizer=adamm"])
    model = build_model(twin)
    with pytest.raises(InputError, match=r"refuses: .*adamm"):
        build_optimizer([build_ddp(model, twin)], twin)


RECIPE_FAULTS = [
    ("configs: [1\n", ":2:1: malformed YAML"),
    ("", ": expected a mapping with configs: and matchers:"),
    ("- a\n", ": expected a mapping with configs: and matchers:"),
    (RECIPE.replace("config: bf16", "config: bf17"), ":6:1: no config 'bf17' for the pattern"),
    (RECIPE.replace("glob", "regex"), ":6:1: NotImplementedError: Match type 'regex'"),
    (RECIPE.replace('pattern: "*.linear_qkv", ', ""), ':6:1: GlobMatcher must specify "pattern"'),
    (RECIPE.replace("override_nonq", "override_nq"), ":3:3: config 'block': Field 'override_nq"),
    (RECIPE.replace("blockwise", "delayed"), ":3:3: config 'block': Delayed scaling not in scope"),
    (RECIPE.replace("training_recipe: {}", "recipe: {}"), ":2:3: config 'bf16': "),
    (RECIPE + "matchers: {}\n", ":9:1: duplicate key 'matchers'"),
]


@pytest.mark.parametrize(("text", "words"), RECIPE_FAULTS)
def test_a_bad_recipe_is_one_line_with_its_place(
    dense: str, tmp_path: Path, text: str, words: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(InputError) as caught:
        load_recipe(load_model(dense, recipe=str(recipe)))
    assert str(caught.value).startswith(f"{recipe}{words}")
    assert "\n" not in str(caught.value)


def test_a_field_that_this_version_lacks_may_say_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(megatron_config._NEWER_FIELDS, "a_later_field", ("9.9", False))
    newer = [
        ("a_later_field", "true", "false"),
        ("mtp_use_repeated_layer", "true", "false"),
        ("mlp_chunks_for_training", "4", "1"),
    ]
    for name, asked, default in newer:
        if name in FIELDS:
            continue
        check_model(load_model("qwen3-30b-a3b", [f"{name}={default}"]))
        message = f"{name}: megatron-core {megatron_version()} has no such field; it came with"
        with pytest.raises(InputError, match=message):
            check_model(load_model("qwen3-30b-a3b", [f"{name}={asked}"]))
