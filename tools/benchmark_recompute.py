#!/usr/bin/env python3
# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Host time of a recomputed region, forward and backward, with the layer against without.

On a CPU, with the reference engine:
    .venv/bin/python -m megatron.quant_state.reference tools/benchmark_recompute.py [--json FILE]
On a GPU, with Transformer Engine, for the time that the host takes to launch it all:
    .venv/bin/python tools/benchmark_recompute.py [--json FILE]

The region runs under the same autocast in both, in its forward and around its backward: so the
replay of the release, too, runs in the precision of the forward, and the two compute the same.
Under delayed scaling they do not: only the layer keeps a forward's scales for its replay, which
copies them twice.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import DotProductAttention, Linear, autocast

from megatron.quant_state.build import initialize_single_process
from megatron.quant_state.install import install

ROUNDS = 300
CALLS = 5
TARGET = 1.02
ROW = "  {:<12} {:<12} {:>10} {:>10} {:>10} {:>8}"
#: What surrounds the region; None is no autocast, where the layer does nothing.
RECIPES = {
    "bf16": None,
    "tensorwise": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
    "delayed": recipes.DelayedScaling,
}
GPU = torch.cuda.is_available() and not hasattr(sys.modules["transformer_engine"], "reference")
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
HIDDEN, TOKENS = (1024, 128) if GPU else (64, 64)


class Mlp(torch.nn.Module):
    """Two linears [hidden, hidden] with fused weight gradients: what `mlp` recomputes."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "bias": False,
            "fuse_wgrad_accumulation": True,
            "params_dtype": DTYPE,
            "device": DEVICE,
        }
        self.fc1 = Linear(HIDDEN, HIDDEN, **options)
        self.fc2 = Linear(HIDDEN, HIDDEN, **options)
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros(HIDDEN, HIDDEN, device=DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        out: torch.Tensor = self.fc2(torch.nn.functional.silu(self.fc1(x, False)), False)
        return out


class CoreAttention(torch.nn.Module):
    """Attention without parameters: what `core_attn` recomputes, and the least that a region is."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HIDDEN // 32
        self.attention = DotProductAttention(self.heads, 32, attention_dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        qkv = x.view(TOKENS, 1, self.heads, 32)
        out: torch.Tensor = self.attention(qkv, qkv, qkv)
        return out.view(TOKENS, HIDDEN)


def region(module: torch.nn.Module, recipe: Any, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """Forward, replay and backward of one region."""
    with autocast(enabled=recipe is not None, recipe=recipe):
        out = tensor_parallel.checkpoint(module, False, x)
        out.backward(gradient)


def microseconds(*arguments: Any) -> float:
    """Host time of one region, mean of CALLS; what the GPU still has to do is not waited for."""
    region(*arguments)
    if GPU:
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        region(*arguments)
    return (time.perf_counter_ns() - start) / CALLS / 1000


def measure(module: torch.nn.Module, recipe_class: Any) -> dict[str, float]:
    """Release and layer in turns in one process; medians of all rounds."""
    recipe = None if recipe_class is None else recipe_class()
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE, dtype=DTYPE).requires_grad_()
    arguments = (module, recipe, x, torch.ones_like(x))
    release, with_layer = [], []
    for _ in range(ROUNDS):
        # Installing empties the processor's caches, so it comes before either.
        with install():
            pass
        release.append(microseconds(*arguments))
        with install():
            with_layer.append(microseconds(*arguments))
    pairs = list(zip(with_layer, release, strict=True))
    ratios = [a / b for a, b in pairs]
    return {
        "release_us": statistics.median(release),
        "quant_state_us": statistics.median(with_layer),
        "added_us": statistics.median(a - b for a, b in pairs),
        "ratio": statistics.median(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if not GPU:
        initialize_single_process()
    where = torch.cuda.get_device_name() if GPU else "the reference engine"
    figures: dict[str, Any] = {"where": where, "target": TARGET, "regions": {}}
    print(f"one region on {where}, forward and backward: median of {ROUNDS} pairs")
    print(ROW.format("region", "autocast", "release", "layer", "added", "ratio"))
    for name, kind in (("mlp", Mlp), ("core_attn", CoreAttention)):
        for precision, recipe_class in RECIPES.items():
            found = measure(kind(), recipe_class)
            figures["regions"][f"{name}, {precision}"] = found
            times = [f"{found[key]:.1f} µs" for key in ("release_us", "quant_state_us", "added_us")]
            print(ROW.format(name, precision, *times, f"{found['ratio']:.3f}"))
    worst = max(found["ratio"] for found in figures["regions"].values())
    print(f"largest ratio {worst:.3f}, target {TARGET}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
