# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The sequence `chunks`: a GPT without MTP whose MLPs run four times in a microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.quant_state import install
from megatron.quant_state.build import (
    build_ddp,
    build_model,
    build_optimizer,
    connect_schedule,
)
from megatron.quant_state.megatron_config import megatron_version
from megatron.quant_state.model import load_model
from tests.unit_tests.wrappers import fresh_engine, random, reference

pytestmark = pytest.mark.skipif(
    "mlp_chunks_for_training" not in {f.name for f in dataclasses.fields(TransformerConfig)},
    reason=f"megatron-core {megatron_version()} has no mlp_chunks_for_training; 0.18 has",
)

GPT = """\
vocab_size: 128
seq_length: 64
position_embedding_type: rope
num_microbatches: 2
transformer_config:
  num_layers: 2
  hidden_size: 64
  ffn_hidden_size: 256
  num_attention_heads: 4
  add_bias_linear: false
  gradient_accumulation_fusion: true
  hidden_dropout: 0.0
  attention_dropout: 0.0
  fp8: hybrid
  fp8_recipe: tensorwise
  mlp_chunks_for_training: 4
"""
STEPS = 3
CHUNKED = {
    f"decoder.layers.{layer}.mlp.{linear}.weight"
    for layer in (0, 1)
    for linear in ("linear_fc1", "linear_fc2")
}


@pytest.fixture(autouse=True)
def _fresh_engine() -> Iterator[None]:
    with fresh_engine():
        yield


def train(path: Path, *overrides: str) -> list[dict[str, torch.Tensor]]:
    """main_grad of every parameter in each step, with DDP, the schedule and the optimizer.

    The optimizer steps on gradients of a seed, so that runs keep equal weights whatever they
    computed and a step's error is its own.
    """
    path.write_text(GPT)
    description = load_model(str(path), overrides)
    torch.manual_seed(1)
    model = build_model(description)
    chunk = build_ddp(model, description)
    optimizer = build_optimizer([chunk], description)
    connect_schedule([chunk], optimizer)
    length = description.seq_length

    def forward_step(batches: Any, chunk: Any) -> Any:
        tokens = next(batches)
        positions = torch.arange(length)[None]
        mask = torch.ones(1, length)
        out = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:], loss_mask=mask)
        return out, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    results = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(128, (2, 1, length + 1), generator=generator)
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reference.counters.reset()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(tokens),
            model=[chunk],
            num_microbatches=2,
            seq_length=length,
            micro_batch_size=1,
            forward_only=False,
        )
        results.append({n: p.main_grad.clone() for n, p in model.named_parameters()})
        for index, parameter in enumerate(model.parameters()):
            parameter.main_grad.copy_(random(*parameter.shape, seed=100 * step + index))
        optimizer.step()
    return results


def errors(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of the main_grads whose bits differ."""
    assert found.keys() == right.keys()
    return {
        name: float((found[name] - right[name]).norm() / right[name].norm())
        for name in right
        if not torch.equal(found[name], right[name])
    }


def test_chunks(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    right = train(path, "disable_parameter_transpose_cache=true")
    assert not any(torch.equal(right[0][name], right[1][name]) for name in CHUNKED)
    with install():
        steps = train(path)
        # The last step: eight linears, each quantized once.
        assert reference.counters.weight_quantizations == 8
        assert reference.counters.stale_reads == 0
    for step, expected in zip(steps, right, strict=True):
        assert errors(step, expected) == {}
    # The negative control.
    release = train(path)
    for step, expected in zip(release, right, strict=True):
        lost = errors(step, expected)
        assert lost.keys() == CHUNKED
        assert all(0.55 <= error <= 0.63 for error in lost.values())


def test_without_chunks_the_release_is_right(tmp_path: Path) -> None:
    """What the chunks alone are to blame for."""
    path = tmp_path / "gpt.yaml"
    once = ("mlp_chunks_for_training=1",)
    right = train(path, "disable_parameter_transpose_cache=true", *once)
    for step, expected in zip(train(path, *once), right, strict=True):
        assert errors(step, expected) == {}
