# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Processes on the reference engine that write events, and their parent that reads them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.quant_state import reference
from megatron.quant_state.errors import WorkerError
from megatron.quant_state.model import error_from_json

__all__ = ["ENGINES", "Event", "has_transformer_engine", "run_workers"]

_POLL_SECONDS = 0.05
_LAST_LINES = 15

#: What computes: the emulation on the CPU, or the real library on a GPU.
ENGINES = ("reference", "transformer-engine")

#: One line of a worker's events file.
Event = dict[str, Any]


def run_workers(
    job: Path,
    workers: Mapping[str, Sequence[str]],
    progress: Callable[[str, Event], None],
    plain: Collection[str] = (),
    *,
    steps: int = 0,
) -> dict[str, list[Event]]:
    """Run processes at the same time, one thread each.

    Args:
        job: a folder; a worker writes ``{name}/events.jsonl`` there, one JSON object with the key
            ``event`` a line, and ``refused`` with an error where the input is at fault.
        workers: a worker's name to its arguments after ``python``.
        progress: called with a worker's name and each of its events, in order.
        plain: workers that run with whatever ``transformer_engine`` is installed instead.
        steps: number of ``step`` events without which a worker has not done its work.

    Returns:
        The events of each worker.

    Raises:
        InputError: a worker refused the input.
        WorkerError: a worker ended in another way; the message has its last lines.
    """
    # Two workers share two cores; more threads than cores make a small model many times slower.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    events: dict[str, list[Event]] = {name: [] for name in workers}
    running: dict[str, subprocess.Popen[str]] = {}
    started: list[subprocess.Popen[str]] = []
    try:
        for name, arguments in workers.items():
            with (job / f"{name}.log").open("w") as log:
                # A worker ends when its stdin is closed, also by our own death.
                process = (_start if name in plain else reference.start)(
                    arguments,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            running[name] = process
            started.append(process)
        while running:
            time.sleep(_POLL_SECONDS)
            for name, process in list(running.items()):
                # Asked before reading, so that what an ended worker wrote last is read.
                ended = process.poll() is not None
                seen = len(events[name])
                events[name] = _read_events(job / name)
                for event in events[name][seen:]:
                    if event["event"] == "refused":
                        raise error_from_json(event["error"])
                    progress(name, event)
                if ended:
                    _check_end(name, process.returncode, events[name], steps, job)
                    del running[name]
    finally:
        for process in started:
            process.kill()
            # Waits, and closes stdin.
            process.communicate()
    return events


def has_transformer_engine() -> bool:
    """Whether a Transformer Engine is installed, whether or not it can be imported."""
    spec = importlib.util.find_spec("transformer_engine")
    # In a process on the reference engine there is that one.
    ours = os.path.dirname(reference.__file__)
    return spec is not None and not str(spec.origin).startswith(ours)


def _start(arguments: Sequence[str], **popen: Any) -> subprocess.Popen[str]:
    """As ``reference.start``, in a plain Python process."""
    popen["env"] = reference.importing_as_here(popen["env"])
    return subprocess.Popen([sys.executable, *arguments], text=True, **popen)


def _read_events(folder: Path) -> list[Event]:
    path = folder / "events.jsonl"
    if not path.exists():
        return []
    # A last line without its end is still being written.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _check_end(name: str, code: int, events: list[Event], steps: int, job: Path) -> None:
    done = sum(event["event"] == "step" for event in events)
    if code != 0 or done < steps:
        log = (job / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if steps and code >= 0:
            how += f" after {done} of {steps} steps"
        text = "\n  ".join(["", *log.splitlines()[-_LAST_LINES:]])
        raise WorkerError(f"the run '{name}' {how}. Its last lines:{text}")
