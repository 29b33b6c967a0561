# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Rehearse a model: train its twin as released, with the layer, and as it should be; compare.

Each run is a process of its own (``train.py``). Gradients are compared byte by byte.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.quant_state.errors import WorkerError
from megatron.quant_state.model import ModelDescription
from megatron.quant_state.replays import Replay
from megatron.quant_state.twin import Change, build_twin
from megatron.quant_state.workers import Event, run_workers

__all__ = ["Rehearsal", "Replay", "Run", "WrongGradient", "rehearse"]


@dataclass(frozen=True)
class WrongGradient:
    """A ``main_grad`` whose bytes differ from the truth's.

    Attributes:
        name: parameter, as ``named_parameters()`` of the unwrapped model names it.
        step: counted from 1.
        relative_error: norm of the difference over norm of the truth; infinite where the truth is
            zero, and NaN where the run has one.
    """

    name: str
    step: int
    relative_error: float


@dataclass(frozen=True)
class Run:
    """What one run did, all steps together.

    Attributes:
        parameters: number of parameters (tensors) that have a gradient.
        wrong: gradients that differ from the truth, in the order of steps and of the model.
        weight_quantizations: roundings of a weight tensor.
        weight_quantizations_least: one a quantized weight a step.
        stale_reads: forwards that used a cached weight other than the current one.
        losses: mean over the microbatches, one a step.
        seconds_per_step: mean, forward to optimizer.
        replays_in_another_precision: modules of recomputed regions whose replay ran in another
            precision than their forward, in the order of steps.
    """

    parameters: int
    wrong: tuple[WrongGradient, ...]
    weight_quantizations: int
    weight_quantizations_least: int
    stale_reads: int
    losses: tuple[float, ...]
    seconds_per_step: float
    replays_in_another_precision: tuple[Replay, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """The answer.

    Attributes:
        model: name of the description.
        steps, num_microbatches: how long was trained.
        versions: of Python and of the libraries that trained.
        changes: what the twin has otherwise than the model.
        release: the release as it is; its optimizer is handed the truth's gradients, so that the
            error of a step is its own.
        quant_state: with the layer installed, on its own gradients.
        truth_is_checked: whether the truth equals a run without any weight cache, bit for bit; None
            under delayed scaling, where that is another computation.
    """

    model: str
    steps: int
    num_microbatches: int
    versions: Mapping[str, str]
    changes: tuple[Change, ...]
    release: Run
    quant_state: Run
    truth_is_checked: bool | None

    @property
    def verdict(self) -> str:
        """``exact`` or ``wrong``.

        Exact when the layer's gradients are the truth bit for bit, and every region was replayed in
        the precision of its forward.
        """
        run = self.quant_state
        exact = not run.wrong and not run.replays_in_another_precision
        return "exact" if exact and self.truth_is_checked is not False else "wrong"


def rehearse(
    description: ModelDescription,
    steps: int,
    progress: Callable[[str, int], None] = lambda run, step: None,
    *,
    engine: str = "reference",
) -> Rehearsal:
    """Train the twin of a model and compare.

    Takes two processes at a time, one thread each.

    Args:
        description: the full model.
        steps: optimizer steps of each run.
        progress: called with a run's name and the number of steps it has done, 0 once it is built.
        engine: one of ``workers.ENGINES``; the real one wants a GPU, and a twin that is wider.

    Raises:
        InputError: there is no such engine here, Megatron refuses the model, or training diverges.
        WorkerError: a run ended in another way; the message has its last lines.
    """
    twin = build_twin(description, on_gpu=engine != "reference")
    delayed = _is_delayed(twin.description)
    with tempfile.TemporaryDirectory(prefix="quant-state-") as folder:
        job = Path(folder)
        given = {
            "full": description.to_dict(),
            "twin": twin.description.to_dict(),
            "steps": steps,
            "engine": engine,
        }
        (job / "job.json").write_text(json.dumps(given))
        # The release follows the truth's gradients, so the truth comes first.
        truths = ["truth"] if delayed else ["truth", "no_cache"]
        events = _train(job, truths, steps, progress, engine)
        names = events["truth"][0]["parameters"]
        _check_finite(job, description, names, steps)
        events |= _train(job, ["release", "quant_state"], steps, progress, engine)
        built = {run: of_run[0] for run, of_run in events.items()}
        for run, event in built.items():
            if event["parameters"] != names or event["weights"] != built["truth"]["weights"]:
                raise WorkerError(f"the runs 'truth' and '{run}' did not start from equal weights")
        checked = None if delayed else not list(_wrong(job, "no_cache", names, steps))
        return Rehearsal(
            model=description.name,
            steps=steps,
            num_microbatches=twin.description.num_microbatches,
            versions=built["truth"]["versions"],
            changes=twin.changes,
            release=_summary(job, "release", events["release"], names, steps),
            quant_state=_summary(job, "quant_state", events["quant_state"], names, steps),
            truth_is_checked=checked,
        )


def _is_delayed(description: ModelDescription) -> bool:
    config = description.transformer_config
    # Delayed is Megatron's default recipe of fp8.
    return bool(config.get("fp8")) and config.get("fp8_recipe", "delayed") == "delayed"


def _train(
    job: Path,
    runs: Sequence[str],
    steps: int,
    progress: Callable[[str, int], None],
    engine: str,
) -> dict[str, list[Event]]:
    """Train at the same time; the events of each run."""

    def tell(run: str, event: Event) -> None:
        progress(run, event.get("step", 0))

    workers = {run: ["-m", "megatron.quant_state.train", str(job), run] for run in runs}
    plain = () if engine == "reference" else runs
    return run_workers(job, workers, tell, plain, steps=steps)


def _gradients(
    job: Path, run: str, parameters: Any, steps: int
) -> Iterator[tuple[int, str, np.ndarray[Any, Any]]]:
    """Step, parameter and its main_grad [numel], fp32, in the order of steps and of the model."""
    for step in range(1, steps + 1):
        flat = np.load(job / run / f"step{step}.npy")
        start = 0
        for name, length in parameters:
            yield step, name, flat[start : start + length]
            start += length


def _check_finite(job: Path, description: ModelDescription, parameters: Any, steps: int) -> None:
    """Refuse a truth with NaN or infinity: runs that agree on those have computed nothing."""
    for step, name, gradient in _gradients(job, "truth", parameters, steps):
        if not np.isfinite(gradient).all():
            message = (
                f"the main_grad of {name} is not finite in step {step} of the truth, so there is "
                "nothing to compare with. If training diverges, lower optimizer.lr or train fewer "
                "steps"
            )
            raise description.error(message, "optimizer.lr")


def _wrong(job: Path, run: str, parameters: Any, steps: int) -> Iterator[WrongGradient]:
    truth = _gradients(job, "truth", parameters, steps)
    found = _gradients(job, run, parameters, steps)
    for (step, name, a), (_, _, b) in zip(truth, found, strict=True):
        if a.tobytes() != b.tobytes():
            yield WrongGradient(name, step, _relative_error(a, b))


def _relative_error(right: Any, found: Any) -> float:
    difference = float(np.linalg.norm(right.astype(np.float64) - found.astype(np.float64)))
    norm = float(np.linalg.norm(right.astype(np.float64)))
    if norm == 0.0 and difference > 0.0:
        return float("inf")
    return difference / norm if norm else difference


def _summary(job: Path, run: str, events: list[Event], parameters: Any, steps: int) -> Run:
    done = [event for event in events if event["event"] == "step"]

    def total(key: str) -> int:
        return sum(int(event[key]) for event in done)

    return Run(
        parameters=len(parameters),
        wrong=tuple(_wrong(job, run, parameters, steps)),
        weight_quantizations=total("weight_quantizations"),
        weight_quantizations_least=total("weight_quantizations_least"),
        stale_reads=total("stale_reads") + total("empty_reads"),
        losses=tuple(event["loss"] for event in done),
        seconds_per_step=sum(event["seconds"] for event in done) / len(done),
        replays_in_another_precision=tuple(
            Replay(**replay)
            for event in done
            for replay in event.get("replays_in_another_precision", ())
        ),
    )
