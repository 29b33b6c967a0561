# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What every report of a rehearsal says, whatever it looks like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.quant_state.rehearse import Rehearsal, Run
from megatron.quant_state.reporters.folding import fold_names

__all__ = [
    "TITLES",
    "ReplayRow",
    "WrongRow",
    "engine_name",
    "replay_rows",
    "summary_rows",
    "verdict_sentence",
    "wrong_rows",
]

#: The two runs, by their name in a Rehearsal.
TITLES = {"release": "release", "quant_state": "with quant_state"}


@dataclass(frozen=True)
class WrongRow:
    """Folded parameters whose gradient is wrong.

    Attributes:
        name: folded name.
        count: parameters that it stands for.
        errors: the largest relative error of each step, None for a step in which all are right.
    """

    name: str
    count: int
    errors: tuple[float | None, ...]


@dataclass(frozen=True)
class ReplayRow:
    """Folded modules that were replayed in another precision than their forward ran in.

    Attributes:
        name: folded name.
        count: modules that it stands for.
        forward: precision of the forward.
        replay: precision of the replay.
        calls: number of such replays, all steps together.
    """

    name: str
    count: int
    forward: str
    replay: str
    calls: int


def replay_rows(run: Run) -> list[ReplayRow]:
    """The replays in another precision, in the order in which they were first met."""
    calls: dict[tuple[str, str], dict[str, int]] = {}
    for item in run.replays_in_another_precision:
        of_pair = calls.setdefault((item.forward, item.replay), {})
        of_pair[item.module] = of_pair.get(item.module, 0) + item.calls
    return [
        ReplayRow(folded, len(names), forward, replay, sum(of_pair[name] for name in names))
        for (forward, replay), of_pair in calls.items()
        for folded, names in fold_names(of_pair)
    ]


def engine_name(rehearsal: Rehearsal) -> str:
    """What computed, for a sentence; only a run on the real library names its version."""
    real = "transformer-engine" in rehearsal.versions
    return "Transformer Engine" if real else "the reference engine"


def _replayed_modules(run: Run) -> int:
    return len({item.module for item in run.replays_in_another_precision})


def wrong_rows(run: Run, steps: int) -> list[WrongRow]:
    """The wrong gradients of a run, worst first."""
    errors: dict[str, dict[int, float]] = {}
    for item in run.wrong:
        errors.setdefault(item.name, {})[item.step] = item.relative_error
    rows = []
    for folded, names in fold_names(errors):
        worst = []
        for step in range(1, steps + 1):
            found = [errors[name][step] for name in names if step in errors[name]]
            worst.append(max(found, key=_badness) if found else None)
        rows.append(WrongRow(folded, len(names), tuple(worst)))
    return sorted(rows, key=lambda row: max(map(_badness, row.errors)), reverse=True)


def _badness(error: float | None) -> tuple[bool, float]:
    """Orders errors: NaN compares with nothing and is worse than all, infinity included."""
    if error is None:
        return (False, -1.0)
    return (True, 0.0) if math.isnan(error) else (False, error)


def summary_rows(rehearsal: Rehearsal) -> list[tuple[str, str, str]]:
    """Rows of (what, release, quant_state)."""
    runs = (rehearsal.release, rehearsal.quant_state)

    def row(what: str, values: Sequence[str]) -> tuple[str, str, str]:
        return (what, values[0], values[1])

    rows = []
    for step in range(1, rehearsal.steps + 1):
        wrong = [sum(item.step == step for item in run.wrong) for run in runs]
        texts = [f"{count} of {run.parameters}" for count, run in zip(wrong, runs, strict=True)]
        rows.append(row(f"wrong main_grads, step {step}", texts))
    rows.append(
        row(
            "weight quantizations (least)",
            [f"{run.weight_quantizations} ({run.weight_quantizations_least})" for run in runs],
        )
    )
    rows.append(row("stale reads", [str(run.stale_reads) for run in runs]))
    replayed = [str(_replayed_modules(run)) for run in runs]
    rows.append(row("modules replayed in another precision", replayed))
    losses = [" ".join(f"{loss:.6f}" for loss in run.losses) for run in runs]
    rows.append(row("loss", losses))
    rows.append(row("seconds a step", [f"{run.seconds_per_step:.2f}" for run in runs]))
    return rows


def verdict_sentence(rehearsal: Rehearsal) -> str:
    """One sentence that starts with the verdict."""
    run = rehearsal.quant_state
    if rehearsal.truth_is_checked is False:
        return (
            "wrong: the truth itself differs from a run without any weight cache, so nothing can "
            "be said. Please report this model."
        )
    if run.wrong:
        names = len({item.name for item in run.wrong})
        return f"wrong: {names} of {run.parameters} main_grads differ with quant_state installed"
    if run.replays_in_another_precision:
        return (
            f"wrong: {_replayed_modules(run)} modules are replayed in another precision than their "
            "forward ran in with quant_state installed"
        )
    lost = len({item.name for item in rehearsal.release.wrong})
    release = f"the release gets {lost} wrong" if lost else "so does the release"
    if rehearsal.release.replays_in_another_precision:
        replayed = _replayed_modules(rehearsal.release)
        release += f" and replays {replayed} modules in another precision than their forward's"
    return (
        f"exact: all {run.parameters} main_grads of all {rehearsal.steps} steps equal the truth "
        f"bit for bit with quant_state installed; {release}"
    )
