# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What `quant-state plan` costs: time and memory of a large model, and of one ten times as wide.

Run as `.venv/bin/python tools/benchmark_plan.py [MODEL] [--repeats N]`. Time is CPU time of all
processes, so that other work on the machine counts little, with the wall clock beside it. Memory
is the largest sum over the processes, sampled. Exits 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.quant_state.model import load_model
from megatron.quant_state.plan import Plan, make_plan

WIDTHS = (
    "hidden_size",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "kv_channels",
    "qk_head_dim",
    "v_head_dim",
)
MOST_SECONDS, MOST_META_SECONDS, MOST_GIGABYTES, MOST_GROWTH = 30.0, 5.0, 2.0, 0.10


@dataclass
class Cost:
    wall: float
    cpu: float
    meta: float
    gigabytes: float
    parameters: int


def resident() -> int:
    """Bytes of this process and of those that it started."""
    pages = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if os.getpid() in (int(entry.name), parent):
                pages += int((entry / "statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return pages * resource.getpagesize()


def measure(model: str, overrides: list[str]) -> Cost:
    stages: list[float] = []
    peak = [0]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], resident())

    def note(what: str) -> None:
        if what.startswith("full model"):
            stages.append(time.monotonic())

    sampler = threading.Thread(target=sample)
    sampler.start()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    try:
        plan: Plan = make_plan(load_model(model, overrides), None, note)
    finally:
        done.set()
        sampler.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # The first stage's own time is not seen: as long as the mean of the others.
    meta = (stages[-1] - stages[0]) * len(stages) / max(1, len(stages) - 1)
    parameters = sum(plan.totals.parameters.values())
    return Cost(time.monotonic() - start, cpu, meta, peak[0] / 1e9, parameters)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="deepseek-v3")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    config = load_model(args.model).transformer_config
    wider = [f"{name}={10 * config[name]}" for name in WIDTHS if config.get(name)]
    costs: dict[str, list[Cost]] = {"as it is": [], "10 x wide": []}
    for _ in range(args.repeats):
        # In turn, so that a busy spell of the machine hits both.
        costs["as it is"].append(measure(args.model, []))
        costs["10 x wide"].append(measure(args.model, wider))
    print(f"{args.model}: median of {args.repeats}")
    for name, runs in costs.items():
        wall, cpu, meta, size = (
            statistics.median(getattr(run, key) for run in runs)
            for key in ("wall", "cpu", "meta", "gigabytes")
        )
        print(
            f"{name:>10}: {wall:6.1f} s wall, {cpu:6.1f} s CPU, meta build {meta:5.1f} s, "
            f"{size:5.2f} GB, {runs[0].parameters / 1e9:.1f} B parameters"
        )
    least = {name: min(run.cpu for run in runs) for name, runs in costs.items()}
    growth = least["10 x wide"] / least["as it is"] - 1
    print(f"CPU time of the wide one: {growth:+.1%} (at most {MOST_GROWTH:+.0%})")
    base = costs["as it is"]
    failed = [
        what
        for what, value, most in (
            ("seconds", min(run.wall for run in base), MOST_SECONDS),
            ("seconds of the meta build", min(run.meta for run in base), MOST_META_SECONDS),
            ("gigabytes", max(run.gigabytes for run in base), MOST_GIGABYTES),
            ("growth", growth, MOST_GROWTH),
        )
        if value > most
    ]
    print(f"over the limit: {', '.join(failed)}" if failed else "within all limits")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
