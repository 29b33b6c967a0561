# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Several GPUs: data, tensor, pipeline and expert parallel, and Megatron-FSDP.

One launch trains every case, on as many GPUs as there are, rounded down to an even number.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.gpt import REAL

GPUS = torch.cuda.device_count() // 2 * 2 if REAL else 0
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs or more")

WORKER = Path(__file__).with_name("parallel.py")
CASES = (
    "dp-distributed-tensorwise",
    "dp-distributed-blockwise",
    "dp-distributed-fp8_param",
    "tp-sp-tensorwise",
    "tp-sp-blockwise",
    "tp-sp-delayed",
    "pp-1f1b-tensorwise",
    "pp-1f1b-blockwise",
    "pp-interleaved-tensorwise",
    "pp-interleaved-bf16",
    "ep-tensorwise",
    "ep-blockwise",
)


#: Launched at the same time, so that a hang of one takes no other along.
LAUNCHES = (
    [case for case in CASES if case.startswith(("dp", "tp"))],
    [case for case in CASES if case.startswith(("pp-1f1b", "ep"))],
    [case for case in CASES if case.startswith("pp-interleaved")],
    ["fsdp-unfused", "fsdp-fused"],
)


def launch(out: Path, cases: list[str]) -> str:
    """Trains the cases; the end of what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={GPUS}", str(WORKER), str(out), *cases]
    try:
        done = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired as error:
        return f"took too long: {str(error.stderr)[-3000:]}"
    return (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parallel")
    outs = [folder / f"{index}.jsonl" for index in range(len(LAUNCHES))]
    with ThreadPoolExecutor(max_workers=len(LAUNCHES)) as pool:
        printed = list(pool.map(launch, outs, LAUNCHES))
    found = {}
    for out, text in zip(outs, printed, strict=True):
        # For the report of a test that fails.
        print(text)
        for line in out.read_text().splitlines() if out.exists() else []:
            values = json.loads(line)
            found[values["case"]] = values["ranks"]
    return found


def of(results: dict[str, Any], case: str) -> list[dict[str, Any]]:
    assert case in results, f"the worker ended before {case}"
    ranks: list[dict[str, Any]] = results[case]
    errors = [rank["error"] for rank in ranks if "error" in rank]
    assert not errors, errors[0]
    return ranks


@pytest.mark.parametrize("case", CASES)
def test_every_rank_exact(results: dict[str, Any], case: str) -> None:
    ranks = of(results, case)
    for rank in ranks:
        assert rank["truth_again"] == rank["no_cache"] == rank["quant_state"] == [0, 0]
    # The MTP layer is on the last pipeline stage alone.
    lost = [any(rank["release"]) for rank in ranks]
    assert any(lost) if case.startswith("pp") else all(lost)


def test_megatron_fsdp_exact(results: dict[str, Any]) -> None:
    """Without fusion every gradient goes through autograd, and nothing can be overwritten."""
    for rank in of(results, "fsdp-unfused"):
        assert rank["truth_again"] == rank["quant_state"] == [0]
        assert rank["said"] == []


def test_megatron_fsdp_with_fusion_is_said(results: dict[str, Any]) -> None:
    """``overwrite_main_grad`` overrides the flag, so a repeated module loses gradient."""
    for rank in of(results, "fsdp-fused"):
        assert rank["release"] != [0]
        assert any("overwrite_main_grad" in line for line in rank["said"])
