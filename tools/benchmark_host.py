#!/usr/bin/env python3
# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Host time of the flag's resolution, and of a wrapped call against the release's own.

`.venv/bin/python -m megatron.quant_state.reference tools/benchmark_host.py [--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig, RecipeConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import fp8_autocast

from megatron.quant_state.first_microbatch import _resolve_is_first_microbatch
from megatron.quant_state.install import install

ROUNDS = 100
CALLS = 40
RULE = {
    "transformer_engine_config_type": "TEQuantizationParams",
    "training_recipe": {"fp8_quantization_recipe": "tensorwise"},
}


def linear(**fields: Any) -> Any:
    """A real wrapper of a [64, 64] weight, on the reference engine."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
        **fields,
    )
    layer = TELinear(
        64,
        64,
        parallel_mode="duplicated",
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        skip_bias_add=False,
        skip_weight_param_allocation=False,
    )
    layer.weight.main_grad = torch.zeros(64, 64)
    return layer


def nanoseconds(function: Callable[[], Any], calls: int) -> float:
    """Time of one call, mean of `calls`."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    return (time.perf_counter_ns() - start) / calls


def resolve_ns(layer: Any) -> float:
    """Best of many: what the function itself costs, without what the machine does beside it."""

    def resolve() -> None:
        _resolve_is_first_microbatch(layer, layer.config, True)

    return min(nanoseconds(resolve, 2000) for _ in range(50))


def call_ratio() -> dict[str, float]:
    """Time of a call with the layer over the release's, taken in turns in one process."""
    layer = linear(fp8="hybrid", fp8_recipe="tensorwise")
    x = torch.randn(32, 64)

    def call() -> None:
        layer(x)

    logging.disable()
    times: list[list[float]] = [[], []]
    with fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling()):
        for _ in range(ROUNDS):
            for layered, taken in zip((nullcontext, install), times, strict=True):
                with layered():
                    # Python looks attributes up anew after a class has changed.
                    nanoseconds(call, CALLS)
                    taken.append(nanoseconds(call, CALLS))
    release, with_layer = times
    ratios = [a / b for a, b in zip(with_layer, release, strict=True)]
    return {
        "release_us": statistics.median(release) / 1000,
        "quant_state_us": statistics.median(with_layer) / 1000,
        "ratio": statistics.median(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with_rule = linear(quant_recipe=RecipeConfig([], {}))
    with_rule.finish_init(QuantizationConfig(RULE, MatchContext("linear", None), "rule"))
    figures: dict[str, Any] = {
        "resolve_ns": {
            "bf16": resolve_ns(linear()),
            "fp8": resolve_ns(linear(fp8="hybrid", fp8_recipe="tensorwise")),
            "fp8, disable_parameter_transpose_cache": resolve_ns(
                linear(
                    fp8="hybrid", fp8_recipe="tensorwise", disable_parameter_transpose_cache=True
                )
            ),
            "quant_recipe": resolve_ns(with_rule),
        },
        "call": call_ratio(),
    }
    print("_resolve_is_first_microbatch")
    for name, value in figures["resolve_ns"].items():
        print(f"  {name:<42} {value:7.0f} ns")
    call = figures["call"]
    print("one call of TELinear on the reference engine")
    print(f"  {'release':<42} {call['release_us']:7.1f} µs")
    print(f"  {'with the layer':<42} {call['quant_state_us']:7.1f} µs")
    print(f"  {'ratio, median of ' + str(ROUNDS) + ' pairs':<42} {call['ratio']:7.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
