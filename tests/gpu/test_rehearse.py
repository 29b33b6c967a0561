# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A rehearsal on real kernels gives the verdicts of one on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.gpu.gpt import REAL

pytestmark = pytest.mark.skipif(not REAL, reason="needs Transformer Engine on a GPU")

MODEL = """\
vocab_size: 32000
seq_length: 2048
position_embedding_type: rope
transformer_config:
  num_layers: 4
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  kv_channels: 128
  add_bias_linear: false
  normalization: RMSNorm
  hidden_dropout: 0.0
  attention_dropout: 0.0
  bf16: true
  gradient_accumulation_fusion: true
"""
DEEPSEEK = "deepseek-v3-mtp2"
Results = dict[str, list[dict[str, Any]]]
MTP = ("mtp_num_layers=2", "mtp_use_repeated_layer=true")
CASES: dict[str, tuple[str, ...]] = {
    "mtp-blockwise": (*MTP, "fp8=e4m3", "fp8_recipe=blockwise"),
    "mtp-tensorwise": (*MTP, "fp8=hybrid", "fp8_recipe=tensorwise"),
    "mtp-delayed": (*MTP, "fp8=hybrid", "fp8_recipe=delayed"),
    "mtp-bf16": MTP,
    "chunks-tensorwise": ("mlp_chunks_for_training=4", "fp8=hybrid", "fp8_recipe=tensorwise"),
    "no-repeats": ("fp8=hybrid", "fp8_recipe=tensorwise"),
}


def rehearsals(model: str, engines: tuple[str, ...], *overrides: str) -> list[dict[str, Any]]:
    """The command on each engine, at the same time; its JSON."""
    started = []
    for engine in engines:
        command = [sys.executable, "-m", "megatron.quant_state", "rehearse", model]
        command += ["--engine", engine, "--format", "json", "--steps", "2"]
        command += [word for text in overrides for word in ("--set", text)]
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, env=environment, **pipes))
    found = []
    for process in started:
        out, errors = process.communicate(timeout=400)
        assert process.returncode in (0, 1), errors[-3000:]
        found.append(json.loads(out))
    return found


def wrong_names(rehearsal: dict[str, Any], run: str) -> set[tuple[str, int]]:
    return {(row["name"], row["step"]) for row in rehearsal["runs"][run]["wrong"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every case, several at a time: most of each is imports."""
    path = tmp_path_factory.mktemp("rehearse") / "model.yaml"
    path.write_text(MODEL)
    both = ("reference", "transformer-engine")
    with ThreadPoolExecutor(max_workers=4) as pool:
        waiting = {
            case: pool.submit(rehearsals, str(path), both, *overrides)
            for case, overrides in CASES.items()
        }
        waiting[DEEPSEEK] = pool.submit(rehearsals, DEEPSEEK, both[1:])
        return {case: future.result() for case, future in waiting.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_verdicts_are_those_of_the_cpu(results: Results, case: str) -> None:
    cpu, gpu = results[case]
    for rehearsal in (cpu, gpu):
        assert rehearsal["verdict"] == "exact"
        assert wrong_names(rehearsal, "quant_state") == set()
    lost = [wrong_names(rehearsal, "release") for rehearsal in (gpu, cpu)]
    if case == "mtp-delayed":
        # With the first step's scales of one, small gradients round to zero, and zero is not lost.
        assert {name for name, _ in lost[0]} == {name for name, _ in lost[1]}
    else:
        assert lost[0] == lost[1]
    assert bool(wrong_names(gpu, "release")) is (case != "no-repeats")
    assert gpu["runs"]["quant_state"]["stale_reads"] == 0
    for key in ("weight_quantizations", "weight_quantizations_least"):
        assert gpu["runs"]["quant_state"][key] == cpu["runs"]["quant_state"][key]


def test_deepseek_v3_with_two_mtp_depths(results: Results) -> None:
    (found,) = results[DEEPSEEK]
    assert found["verdict"] == "exact"
    assert wrong_names(found, "quant_state") == set()
    lost = wrong_names(found, "release")
    assert lost
    assert all(name.startswith("mtp.") for name, _ in lost)
