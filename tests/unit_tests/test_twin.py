# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The twin: what it keeps, what it cuts, what it never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.quant_state.errors import InputError
from megatron.quant_state.model import ModelDescription, load_model, shipped_models
from megatron.quant_state.twin import FUSED_KERNELS, build_twin

# Whatever decides which rule a module gets, how often it runs and what is recomputed.
STRUCTURE = (
    "num_layers",
    "moe_layer_freq",
    "mtp_num_layers",
    "mtp_use_repeated_layer",
    "mlp_chunks_for_training",
    "recompute_granularity",
    "recompute_modules",
    "recompute_method",
    "fp8",
    "fp4",
    "fp8_recipe",
    "fp8_param",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "multi_latent_attention",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
    "moe_router_score_function",
    "moe_router_load_balancing_type",
    "moe_router_enable_expert_bias",
    "gradient_accumulation_fusion",
    "qk_layernorm",
    "gated_linear_unit",
    "normalization",
    "hidden_dropout",
    "attention_dropout",
)


def description(parallel: dict[str, Any] | None = None, **config: Any) -> ModelDescription:
    config = {"num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, **config}
    return ModelDescription(
        name="m",
        source="m.yaml",
        transformer_config=config,
        vocab_size=50000,
        seq_length=4096,
        parallel=parallel or {},
    )


@pytest.mark.parametrize("name", shipped_models())
def test_structure_is_kept_and_every_change_is_recorded(name: str) -> None:
    full = load_model(name, ["mlp_chunks_for_training=4", "first_last_layers_bf16=true"])
    twin = build_twin(full)
    for field in STRUCTURE:
        before, after = (d.transformer_config.get(field) for d in (full, twin.description))
        assert before == after, field
    recorded = {change.field for change in twin.changes}
    assert len(recorded) == len(twin.changes)
    assert all(change.reason and change.full != change.twin for change in twin.changes)
    small = twin.description.to_dict()
    for key, value in full.to_dict().items():
        if key in ("transformer_config", "parallel", "ddp", "optimizer"):
            prefix = "" if key == "transformer_config" else f"{key}."
            names = set(value) | set(small[key])
            different = {prefix + n for n in names if value.get(n) != small[key].get(n)}
            assert different <= recorded
        elif value != small[key]:
            assert key in recorded


def test_deepseek_widths() -> None:
    config = build_twin(load_model("deepseek-v3")).description.transformer_config
    widths = {
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    }
    assert {name: config[name] for name in widths} == widths
    assert config["bf16"] is False
    assert config["moe_permute_fusion"] is False


def test_query_groups_keep_their_ratio() -> None:
    twin = build_twin(load_model("qwen3-30b-a3b")).description.transformer_config
    assert (twin["num_attention_heads"], twin["num_query_groups"]) == (16, 2)
    wide = description(num_attention_heads=64, num_query_groups=2)
    twin = build_twin(wide).description.transformer_config
    assert (twin["num_attention_heads"], twin["num_query_groups"]) == (16, 1)


def test_parallel_sizes_become_one_process() -> None:
    full = load_model("deepseek-v3")
    twin = build_twin(full)
    assert set(twin.description.parallel.values()) == {1}
    reasons = {c.field: c.reason for c in twin.changes}
    assert "one process" in reasons["parallel.pipeline_model_parallel_layout"]
    kept = build_twin(full, keep_pipeline=True).description.parallel
    assert kept["pipeline_model_parallel_size"] == 16
    assert kept["expert_model_parallel_size"] == 1


def test_a_tiny_model_is_left_alone() -> None:
    tiny = ModelDescription(
        name="tiny",
        source="tiny.yaml",
        transformer_config={
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "ffn_hidden_size": 64,
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 32,
            "moe_router_topk": 1,
        },
        vocab_size=100,
        seq_length=16,
        optimizer={"optimizer": "adam"},
    )
    twin = build_twin(tiny)
    assert twin.changes == ()
    assert twin.description == tiny


def test_fused_kernels_are_switched_off_only_where_they_were_on() -> None:
    switches = dict.fromkeys(FUSED_KERNELS, True)
    twin = build_twin(description(**switches))
    config = twin.description.transformer_config
    assert not any(config.get(name) for name in FUSED_KERNELS)
    assert set(FUSED_KERNELS) <= {change.field for change in twin.changes}
    assert not set(FUSED_KERNELS) & set(build_twin(description()).description.transformer_config)


def test_fields_that_need_more_than_one_process_go_back_to_their_default() -> None:
    full = description(
        parallel={"tensor_model_parallel_size": 8, "sequence_parallel": True},
        overlap_moe_expert_parallel_comm=True,
        delay_wgrad_compute=True,
        cp_comm_type="p2p",
        moe_token_dispatcher_type="flex",
        moe_enable_deepep=True,
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=["attn"],
    )
    twin = build_twin(full).description
    assert twin.parallel == {"tensor_model_parallel_size": 1, "sequence_parallel": False}
    config = twin.transformer_config
    assert config["overlap_moe_expert_parallel_comm"] is False
    assert config["moe_token_dispatcher_type"] == "alltoall"
    assert config["cuda_graph_impl"] == "none"
    assert "cp_comm_type" not in config
    assert "cuda_graph_modules" not in config


def test_blocks_of_32_get_widths_of_32(tmp_path: Path) -> None:
    twin = build_twin(load_model("deepseek-v3", ["fp8_recipe=mxfp8"])).description
    assert twin.transformer_config["kv_lora_rank"] == 32
    assert twin.transformer_config["qk_pos_emb_head_dim"] == 32


def test_many_chunks_get_a_sequence_to_chunk() -> None:
    twin = build_twin(load_model("deepseek-v3", ["mlp_chunks_for_training=16"])).description
    assert twin.seq_length == 128


def test_a_width_that_is_no_number_is_refused_at_its_place() -> None:
    full = load_model("deepseek-v3", ["hidden_size=wide"])
    with pytest.raises(InputError, match=r"^--set hidden_size=wide: hidden_size: expected an int"):
        build_twin(full)


@given(
    hidden=st.integers(1, 300).map(lambda n: 16 * n),
    heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32, 40, 96]),
    ratio=st.sampled_from([None, 1, 2, 3, 4, 8, 16, 32]),
    experts=st.sampled_from([None, 1, 2, 6, 8, 64, 96, 512]),
    topk=st.sampled_from([None, 1, 2, 6, 22]),
    groups=st.sampled_from([None, 1, 2, 3, 4, 8, 16]),
)
def test_divisibility_holds_and_nothing_grows(
    hidden: int,
    heads: int,
    ratio: int | None,
    experts: int | None,
    topk: int | None,
    groups: int | None,
) -> None:
    config: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": heads}
    if ratio is not None and heads % ratio == 0:
        config["num_query_groups"] = heads // ratio
    if experts is not None:
        config["num_moe_experts"] = experts
        if topk is not None and topk <= experts:
            config["moe_router_topk"] = topk
        if groups is not None and experts % groups == 0 and "moe_router_topk" in config:
            config["moe_router_num_groups"] = groups
            config["moe_router_group_topk"] = max(1, groups // 2)
    twin = build_twin(description(**config)).description.transformer_config
    for name, value in config.items():
        assert twin[name] <= value, name
    assert twin["num_attention_heads"] % twin.get("num_query_groups", 1) == 0
    head = twin.get("kv_channels", twin["hidden_size"] // twin["num_attention_heads"])
    assert 1 <= head <= 16 or head == hidden // heads
    if experts is not None:
        topk = twin.get("moe_router_topk", 2)
        assert topk <= max(experts, 2)
        if "moe_router_num_groups" in twin:
            assert twin["num_moe_experts"] % twin["moe_router_num_groups"] == 0
            assert twin["moe_router_group_topk"] <= twin["moe_router_num_groups"]
