# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The choice of what a rehearsal computes on, as far as a machine without a GPU can show it."""

from __future__ import annotations

import pytest

from megatron.quant_state.model import load_model, shipped_models
from megatron.quant_state.twin import build_twin

WIDTHS = (
    "hidden_size",
    "ffn_hidden_size",
    "kv_channels",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "v_head_dim",
)


@pytest.mark.parametrize("name", shipped_models())
def test_a_twin_for_real_kernels_is_wider_and_in_the_models_precision(name: str) -> None:
    full = load_model(name)
    cpu, gpu = (build_twin(full, on_gpu=on_gpu).description for on_gpu in (False, True))
    assert full.transformer_config["bf16"] is True
    assert gpu.transformer_config["bf16"] is True
    assert cpu.transformer_config["bf16"] is False
    for width in WIDTHS:
        value = full.transformer_config.get(width)
        if value is None:
            continue
        small, large = cpu.transformer_config[width], gpu.transformer_config[width]
        assert small <= large <= value
        assert large == min(value, 8 * small)
        # Blocks of 128, or a head that is the model's own.
        assert large % 128 == 0 or large == value
    assert gpu.seq_length == min(full.seq_length, 8 * cpu.seq_length)
    assert gpu.vocab_size == min(full.vocab_size, 8 * cpu.vocab_size)


@pytest.mark.parametrize("name", shipped_models())
def test_structure_is_the_same_on_both(name: str) -> None:
    full = load_model(name)
    cpu, gpu = (build_twin(full, on_gpu=on_gpu).description for on_gpu in (False, True))
    different = {
        key
        for key in {*cpu.transformer_config, *gpu.transformer_config}
        if cpu.transformer_config.get(key) != gpu.transformer_config.get(key)
    }
    assert different <= {*WIDTHS, "qk_pos_emb_head_dim", "bf16"}
    assert cpu.parallel == gpu.parallel
    assert cpu.num_microbatches == gpu.num_microbatches


def test_without_a_gpu_the_real_engine_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.quant_state.commands import EXIT_BAD_INPUT, main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = main(["rehearse", "deepseek-v3-mtp2", "--engine", "transformer-engine"])
    assert code == EXIT_BAD_INPUT
    assert "--engine transformer-engine: found no GPU" in capsys.readouterr().err


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.quant_state.commands import EXIT_BAD_INPUT, main

    assert main(["rehearse", "deepseek-v3", "--engine", "cuda"]) == EXIT_BAD_INPUT
    assert "transformer-engine" in capsys.readouterr().err
