# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Worker of ``test_parallel.py``: every rank trains every case, rank 0 writes a JSON line a case.

``torchrun --nproc-per-node N tests/gpu/parallel.py OUT [CASE ...]``, for any N that is even.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.gpu import gpt
from tests.gpu.gpt import DISTRIBUTED, MOE, MTP, PRECISION, Model, describe, train, wrong

LAYERS = ("num_layers=4", "num_microbatches=4")
TP = ("tensor_model_parallel_size={half}", "sequence_parallel=true")
PP = ("pipeline_model_parallel_size={half}", *LAYERS)
VPP = (*PP, "virtual_pipeline_model_parallel_size=2")
EP = ("expert_model_parallel_size={half}", *MOE)
#: Name to overrides and precision; {half} is the number of ranks in a group.
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "dp-distributed-tensorwise": ((*DISTRIBUTED, *MTP), "tensorwise"),
    "dp-distributed-blockwise": ((*DISTRIBUTED, *MTP), "blockwise"),
    "dp-distributed-fp8_param": ((*DISTRIBUTED, *MTP), "fp8_param"),
    "tp-sp-tensorwise": ((*TP, *MTP), "tensorwise"),
    "tp-sp-blockwise": ((*TP, *MTP), "blockwise"),
    "tp-sp-delayed": ((*TP, *MTP), "delayed"),
    "pp-1f1b-tensorwise": ((*PP, *MTP), "tensorwise"),
    "pp-1f1b-blockwise": ((*PP, *MTP), "blockwise"),
    "pp-interleaved-tensorwise": ((*VPP, *MTP), "tensorwise"),
    "pp-interleaved-bf16": ((*VPP, *MTP), "bf16"),
    "ep-tensorwise": ((*EP, *MTP), "tensorwise"),
    "ep-blockwise": ((*EP, *MTP), "blockwise"),
}


def build_parallel(description: Any, **options: Any) -> Model:
    """The chunks of this rank."""
    from megatron.core import parallel_state

    stages: list[dict[str, Any]] = []
    chunks = description.parallel.get("virtual_pipeline_model_parallel_size")
    for index in range(chunks or 1):
        stage = index if chunks else None
        at = {"ignore_virtual": False, "vp_stage": stage}
        stages.append(
            {
                "pre_process": parallel_state.is_pipeline_first_stage(**at),
                "post_process": parallel_state.is_pipeline_last_stage(**at),
                "vp_stage": stage,
            }
        )
    return gpt.build_trained(description, stages=stages, **options)


def sizes_of(overrides: tuple[str, ...]) -> dict[str, int]:
    parallel = dict(describe(*overrides).parallel)
    sizes = {name: size for name, size in parallel.items() if name.endswith("_size")}
    return {name: size for name, size in sizes.items() if size is not None}


def compare(overrides: tuple[str, ...], precision: str) -> dict[str, Any]:
    """Counts of wrong gradients of this rank, over two steps."""
    gpt.initialize(**sizes_of(overrides))
    options: dict[str, Any] = {"precision": precision, "build_it": build_parallel}
    right = train("truth", *overrides, **options)
    again = train("truth", *overrides, **options)
    found = train("quant_state", *overrides, **options)
    no_cache = train("no_cache", *overrides, **options) if precision != "delayed" else right
    release = train("release", *overrides, right=right, **options)
    return {
        "gradients": len(right[0].main_grads),
        "truth_again": [len(names) for names in wrong(again, right)],
        "no_cache": [len(names) for names in wrong(no_cache, right)],
        "quant_state": [len(names) for names in wrong(found, right)],
        "release": [len(names) for names in wrong(release, right)],
    }


class Said(logging.Handler):
    """What the layer said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fsdp_steps(run: str, fused: bool) -> tuple[list[float], list[torch.Tensor], list[str]]:
    """Losses and this rank's final weights under Megatron-FSDP, and what the layer said."""
    import importlib

    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from megatron.quant_state import build

    importlib.import_module("megatron.quant_state.weight_cache")._said_overwrite_main_grad = False
    gpt.initialize(tensor_model_parallel_size=1)
    extra = ("disable_parameter_transpose_cache=true",) if run == "no_cache" else ()
    fusion = f"gradient_accumulation_fusion={str(fused).lower()}"
    description = describe(*MTP, *PRECISION["tensorwise"], fusion, *extra)
    said = Said()
    logger = logging.getLogger("megatron.quant_state.weight_cache")
    logger.setLevel(logging.WARNING)
    logger.addHandler(said)
    with gpt.running(run):
        gpt.initialize()
        model = build.build_model(description, device=gpt.DEVICE)
        config = model.config
        ddp_config = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        chunk = FullyShardedDataParallel(config, ddp_config, Float16Module(config, model))
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
            ),
            [chunk],
        )
        config.grad_scale_func = optimizer.scale_loss
        config.no_sync_func = chunk.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        trained = Model(description, [chunk], [model], optimizer)
        losses = []
        for step in range(1, 4):
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses.append(gpt.run_schedule(trained, step))
            optimizer.step()
        weights = [
            getattr(parameter, "_local_tensor", parameter).detach().float().clone()
            for parameter in model.parameters()
        ]
    logger.removeHandler(said)
    return losses, weights, said.lines


def compare_fsdp(fused: bool) -> dict[str, Any]:
    right = fsdp_steps("no_cache", fused=False)
    again = fsdp_steps("no_cache", fused=False)
    found = fsdp_steps("quant_state", fused=fused)
    release = fsdp_steps("release", fused=fused)

    def differing(one: Any, other: Any) -> int:
        return sum(not torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))

    return {
        "gradients": len(right[1]),
        "losses": [right[0], found[0], release[0]],
        "truth_again": [differing(again, right)],
        "no_cache": [0],
        "quant_state": [differing(found, right)],
        "release": [differing(release, right)],
        "said": found[2],
    }


def all_cases(half: int) -> dict[str, Callable[[], dict[str, Any]]]:
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, (overrides, precision) in CASES.items():
        filled = tuple(text.format(half=half) for text in overrides)
        cases[name] = lambda o=filled, p=precision: compare(o, p)
    cases["fsdp-unfused"] = lambda: compare_fsdp(False)
    cases["fsdp-fused"] = lambda: compare_fsdp(True)
    return cases


def gathered(value: dict[str, Any]) -> list[dict[str, Any]]:
    everybody: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, value)
    return everybody


def main(arguments: list[str]) -> int:
    out, wanted = Path(arguments[0]), arguments[1:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    limit = timedelta(seconds=90)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=limit)
    ranks = torch.distributed.get_world_size()
    logging.getLogger().setLevel(logging.ERROR)
    for name, case in all_cases(2 if ranks % 2 == 0 else 1).items():
        if wanted and name not in wanted:
            continue
        start = time.perf_counter()
        try:
            found = case()
        except Exception:
            # The other ranks are likely to have failed alike; a hang ends by the launcher's limit.
            found = {"error": traceback.format_exc()}
        everybody = gathered(found)
        line = {"case": name, "seconds": round(time.perf_counter() - start, 1), "ranks": everybody}
        if torch.distributed.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line)[:1500], flush=True)
        gpt.reset()
        gc.collect()
        torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
