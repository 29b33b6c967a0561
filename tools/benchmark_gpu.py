#!/usr/bin/env python3
# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What the layer costs on Transformer Engine's kernels, against the release, side by side.

`python3 tools/benchmark_gpu.py [--parts call,step,count,recompute] [--json FILE]`, on a GPU.

One process switches between the two by setting the patched attributes, so that model, allocator
and clocks are the same, and takes them in turns; a ratio is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
import transformer_engine
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import autocast as te_autocast

from megatron.quant_state import build, install, te_probe
from megatron.quant_state.model import ModelDescription, load_model

te_probe.provide_fused_weight_gradient()

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.extensions import transformer_engine as wrappers  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

GPT = """\
vocab_size: 8192
seq_length: 4096
position_embedding_type: rope
transformer_config:
  num_layers: 2
  hidden_size: 8192
  ffn_hidden_size: 32768
  num_attention_heads: 64
  normalization: RMSNorm
  add_bias_linear: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
  bf16: true
  gradient_accumulation_fusion: true
  fp8: hybrid
  fp8_recipe: tensorwise
ddp:
  grad_reduce_in_fp32: true
"""
WORKAROUND = "disable_parameter_transpose_cache"


class Switch:
    """Puts the layer's patches in place and takes them away, in a few microseconds."""

    def __init__(self) -> None:
        with install() as installation:
            self._patches = installation.patches

    def set(self, layer: bool) -> None:
        for item in self._patches:
            value = item.after if layer else item.before
            if value is not None:
                setattr(item.owner, item.patch.method, value)
            elif item.patch.method in item.owner.__dict__:
                delattr(item.owner, item.patch.method)

    @contextmanager
    def on(self, layer: bool) -> Iterator[None]:
        self.set(layer)
        try:
            yield
        finally:
            self.set(False)


def pairs(times: dict[str, list[float]], against: str = "release") -> dict[str, Any]:
    """Median of each, and the median of the ratios to what was measured beside it."""
    found: dict[str, Any] = {}
    for name, values in times.items():
        ratios = sorted(a / b for a, b in zip(values, times[against], strict=True))
        found[name] = {
            "median": statistics.median(values),
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        }
    return found


def linear(kind: str, size: int, **fields: Any) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=size,
        num_attention_heads=1,
        params_dtype=torch.bfloat16,
        bf16=True,
        add_bias_linear=False,
        gradient_accumulation_fusion=True,
        **fields,
    )
    common: dict[str, Any] = {
        "config": config,
        "init_method": functools.partial(torch.nn.init.normal_, std=0.02),
        "bias": False,
        "skip_bias_add": False,
    }
    if kind == "TELinear":
        common |= {"parallel_mode": "duplicated", "skip_weight_param_allocation": False}
    else:
        common |= {"gather_output": False, "is_expert": False}
    layer = getattr(wrappers, kind)(size, size, **common)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    return layer


def host_times(
    switch: Switch, layer: Any, x: torch.Tensor, *, armed: bool, rounds: int = 60, calls: int = 150
) -> dict[str, Any]:
    """Host time of a forward call, in µs, in turns; the GPU is kept idle, nothing waits for it."""
    times: dict[str, list[float]] = {"release": [], "quant_state": [], "release again": []}
    for index in range(rounds + 2):
        for name in list(times) if index % 2 else list(times)[::-1]:
            with switch.on(name == "quant_state"):
                # Python specialises code anew after a class was changed; a training run has none.
                taken = [one_call(layer, x, armed) for _ in range(calls)][calls // 3 :]
            if index >= 2:
                times[name].append(statistics.median(taken) / 1000)
    return pairs(times)


def one_call(layer: Any, x: torch.Tensor, armed: bool) -> int:
    if armed:
        layer.__dict__["is_first_microbatch"] = True
    start = time.perf_counter_ns()
    out = layer(x)
    taken = time.perf_counter_ns() - start
    del out
    return taken


def call(switch: Switch) -> dict[str, Any]:
    """Host time of one forward call, in µs; every call but the first of a step."""
    found = {}
    gc.disable()
    for kind in ("TELinear", "TELayerNormColumnParallelLinear"):
        for precision in ("tensorwise", "bf16"):
            fields = {"fp8": "hybrid", "fp8_recipe": "tensorwise"} if precision != "bf16" else {}
            layer = linear(kind, 256, **fields)
            x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            with autocast(precision != "bf16"):
                found[f"{kind}, {precision}"] = host_times(switch, layer, x, armed=False)
    gc.enable()
    return found


def armed_call(switch: Switch) -> dict[str, Any]:
    """The same for the first call of a step, which refreshes the cached weight."""
    layer = linear("TELinear", 256, fp8="hybrid", fp8_recipe="tensorwise")
    x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gc.disable()
    with autocast():
        found = host_times(switch, layer, x, armed=True)
    gc.enable()
    return found


def profile(switch: Switch) -> dict[str, Any]:
    """Where the layer's host time goes, by function, in µs a call (the profiler adds its own)."""
    import cProfile
    import pstats

    layer = linear("TELinear", 256, fp8="hybrid", fp8_recipe="tensorwise")
    x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    calls = 500
    found: dict[str, Any] = {}
    for armed in (False, True):
        with autocast(), switch.on(True):
            for _ in range(20):
                one_call(layer, x, armed)
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(calls):
                one_call(layer, x, armed)
            profiler.disable()
        rows = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        for (file, line, name), (_, count, own, total, _) in sorted(
            rows.items(), key=lambda item: -item[1][3]
        )[:45]:
            where = f"{'armed ' if armed else ''}{Path(file).name}:{line} {name}"
            found[where] = (
                f"{count / calls:5.1f} x {own / calls * 1e6:7.2f} {total / calls * 1e6:7.2f}"
            )
    return found


def autocast(enabled: bool = True) -> Any:
    return te_autocast(enabled=enabled, recipe=recipes.Float8CurrentScaling())


def described(*overrides: str) -> ModelDescription:
    path = Path("/tmp/quant_state_benchmark.yaml")
    path.write_text(GPT)
    return load_model(str(path), list(overrides))


def model_of(*overrides: str) -> tuple[Any, Any, ModelDescription]:
    description = described(*overrides)
    build.initialize_single_process(1234)
    model = build.build_model(description, device="cuda")
    chunk = build.build_ddp(model, description)
    build.connect_schedule([chunk])
    return model, chunk, description


def one_step(chunk: Any, description: ModelDescription, microbatches: int) -> None:
    """Zeroed gradients, then Megatron's schedule; no optimizer, which would dilute the ratio."""
    length = description.seq_length
    tokens = torch.ones(1, length, dtype=torch.int64, device="cuda")
    positions = torch.arange(length, device="cuda")[None]
    mask = torch.ones(1, length, device="cuda")

    def forward_step(_: Any, chunk: Any) -> Any:
        out = chunk(tokens, positions, None, labels=tokens, loss_mask=mask)
        return out, lambda losses: (losses.mean(), {})

    chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=[chunk],
        num_microbatches=microbatches,
        seq_length=length,
        micro_batch_size=1,
        forward_only=False,
    )


def step(switch: Switch) -> dict[str, Any]:
    """Step time in ms of steps in a row, and peak memory in MiB; the GPT keeps the GPU busy."""
    model, chunk, description = model_of()
    linears = [m for m in model.modules() if hasattr(m, WORKAROUND)]
    modes = ("release", "quant_state", "release again", "workaround")

    def set_mode(mode: str) -> None:
        switch.set(mode == "quant_state")
        for layer in linears:
            setattr(layer, WORKAROUND, mode == "workaround")
            if mode == "workaround":
                layer._fp8_workspaces.clear()

    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for microbatches, rounds, in_a_row in ((1, 7, 10), (4, 5, 4)):
        times: dict[str, list[float]] = {mode: [] for mode in modes}
        peaks: dict[str, float] = {}
        for index in range(rounds):
            for mode in modes if index % 2 else modes[::-1]:
                set_mode(mode)
                # Not timed: copies that the workaround dropped are made anew, and Python has
                # specialised its code again after the classes were changed.
                for _ in range(3):
                    one_step(chunk, description, microbatches)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                for _ in range(in_a_row):
                    one_step(chunk, description, microbatches)
                torch.cuda.synchronize()
                times[mode].append(1000 * (time.perf_counter() - start) / in_a_row)
                peaks[mode] = torch.cuda.max_memory_allocated() / 2**20
        measured = pairs(times)
        for mode in modes:
            measured[mode]["peak_mib"] = peaks[mode]
            measured[mode]["peak_ratio"] = peaks[mode] / peaks["release"]
        found[f"{microbatches} microbatches"] = measured
    set_mode("release")
    found["kernels"] = kernels(set_mode, chunk, description)
    set_mode("release")
    return found


def kernels(
    set_mode: Callable[[str], None], chunk: Any, description: ModelDescription
) -> dict[str, Any]:
    """Time of the GPU's kernels in a step of one microbatch, in ms: all, and products alone.

    A gradient that is accumulated is read before it is written, and one that overwrites is not.
    """
    found: dict[str, Any] = {}
    for mode in ("release", "quant_state", "workaround"):
        set_mode(mode)
        for _ in range(2):
            one_step(chunk, description, 1)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(10):
                one_step(chunk, description, 1)
            torch.cuda.synchronize()
        times: dict[str, float] = {"all": 0.0, "products": 0.0}
        for event in profiler.key_averages():
            taken = event.self_device_time_total / 1000 / 10
            times["all"] += taken
            if any(word in event.key for word in ("gemm", "nvjet", "cutlass", "xmma")):
                times["products"] += taken
        found[mode] = times
    for name in ("all", "products"):
        print(f"  kernels, {name}: {[(m, round(t[name], 3)) for m, t in found.items()]}")
    return found


def recompute(switch: Switch) -> dict[str, Any]:
    """Forward and backward of a recomputed region of two linears, [4096, 8192], in ms."""
    first = linear("TELayerNormColumnParallelLinear", 8192, fp8="hybrid", fp8_recipe="tensorwise")
    second = linear("TELinear", 8192, fp8="hybrid", fp8_recipe="tensorwise")
    x = torch.randn(4096, 1, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def region(value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = second(first(value)[0])[0]
        return out

    def te_checkpoint(value: torch.Tensor) -> Any:
        return wrappers.te_checkpoint(
            region, False, tensor_parallel.random.get_cuda_rng_tracker, None, value
        )

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "release": lambda value: tensor_parallel.checkpoint(region, False, value),
        "quant_state": lambda value: tensor_parallel.checkpoint(region, False, value),
        "te_checkpoint": te_checkpoint,
        "no recompute": region,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for index in range(24):
        for name in list(ways) if index % 2 else list(ways)[::-1]:
            with switch.on(name == "quant_state"):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(4):
                    with autocast():
                        out = ways[name](x)
                    out.sum().backward()
                torch.cuda.synchronize()
                if index > 3:
                    times[name].append(1000 * (time.perf_counter() - start) / 4)
    return pairs(times)


def count(switch: Switch) -> dict[str, Any]:
    """Quantizations of weights in one step, and how many quantized weights there are."""
    te_probe.install()
    model, chunk, description = model_of(
        "hidden_size=512", "ffn_hidden_size=2048", "seq_length=512"
    )
    found: dict[str, Any] = {}
    for microbatches in (1, 4):
        for mode in ("release", "quant_state", "workaround"):
            switch.set(mode == "quant_state")
            for layer in model.modules():
                if hasattr(layer, WORKAROUND):
                    setattr(layer, WORKAROUND, mode == "workaround")
            for _ in range(2):
                te_probe.counters.reset()
                one_step(chunk, description, microbatches)
            counters = te_probe.counters
            found[f"{mode}, {microbatches} microbatches"] = {
                "weight_quantizations": counters.weight_quantizations,
                "quantized_weights": len(counters.weights_used),
                "per_weight": counters.weight_quantizations / len(counters.weights_used),
            }
    switch.set(False)
    return found


PARTS: dict[str, Callable[[Switch], dict[str, Any]]] = {
    "call": call,
    "armed_call": armed_call,
    "profile": profile,
    "recompute": recompute,
    "step": step,
    # Last: the counting stays in place.
    "count": count,
}


def show(part: str, figures: dict[str, Any]) -> None:
    print(f"{part}: {(PARTS[part].__doc__ or '').splitlines()[0]}")
    for name, value in figures.items():
        if not isinstance(value, dict):
            print(f"  {name:<46} {value}")
        elif "median" in value:
            peak = f"  peak {value['peak_ratio']:.4f}" if "peak_ratio" in value else ""
            print(f"  {name:<46} {value['median']:9.3f}  ratio {value['ratio']:.4f}{peak}")
        elif "per_weight" in value:
            print(f"  {name:<46} {value['per_weight']:.2f} a weight")
        elif name != "kernels":
            print(f"  {name}")
            show_inner(value)


def show_inner(value: dict[str, Any]) -> None:
    for name, inner in value.items():
        peak = f"  peak {inner['peak_ratio']:.4f}" if "peak_ratio" in inner else ""
        low, high = inner["quartiles"]
        spread = f"({low:.4f}-{high:.4f})"
        print(f"    {name:<44} {inner['median']:9.3f}  ratio {inner['ratio']:.4f} {spread}{peak}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--parts",
        default=",".join(name for name in PARTS if name != "profile"),
        help=f"of {', '.join(PARTS)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    build.initialize_single_process(1234)
    switch = Switch()
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "transformer-engine": transformer_engine.__version__,
            "megatron-core": build_version(),
        },
    }
    print(json.dumps(figures))
    wanted = options.parts.split(",")
    for part, measure in PARTS.items():
        if part in wanted:
            figures[part] = measure(switch)
            show(part, figures[part])
            gc.collect()
            torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def build_version() -> str:
    from megatron.quant_state.megatron_config import megatron_version

    return megatron_version()


if __name__ == "__main__":
    sys.exit(main())
