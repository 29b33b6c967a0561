# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Results as tables for a terminal; the same text when piped, without colour."""

from __future__ import annotations

import io
import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.quant_state.rehearse import Rehearsal
from megatron.quant_state.reporters.rehearsal import (
    TITLES,
    ReplayRow,
    replay_rows,
    summary_rows,
    verdict_sentence,
    wrong_rows,
)

__all__ = ["render_rehearsal"]

# Wide enough for a folded parameter name; a narrower terminal wraps.
_PIPED_WIDTH = 120


def render_rehearsal(rehearsal: Rehearsal, *, color: bool = False) -> str:
    """The rehearsal as text that ends with a line break.

    Args:
        rehearsal: the result.
        color: with terminal colours, at the terminal's width.
    """
    buffer = io.StringIO()
    width = Console(file=sys.stdout).width if color else _PIPED_WIDTH
    console = Console(
        file=buffer, width=width, force_terminal=color, no_color=not color, highlight=False
    )
    versions = ", ".join(f"{name} {value}" for name, value in rehearsal.versions.items())
    console.print(
        Text(
            f"{rehearsal.model}: twin trained for {rehearsal.steps} steps of "
            f"{rehearsal.num_microbatches} microbatches on the reference engine ({versions})"
        )
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title in TITLES.values():
        table.add_column(title, justify="right")
    for row in summary_rows(rehearsal):
        table.add_row(*row)
    console.print(table)
    for run_name, title in TITLES.items():
        rows = wrong_rows(getattr(rehearsal, run_name), rehearsal.steps)
        if not rows:
            continue
        table = Table(
            title=f"{title}: relative error of main_grad against the truth",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("parameter", overflow="fold")
        table.add_column("", justify="right")
        for step in range(1, rehearsal.steps + 1):
            table.add_column(f"step {step}", justify="right")
        for item in rows:
            errors = ["" if error is None else f"{error:.3g}" for error in item.errors]
            table.add_row(Text(item.name), f"x{item.count}" if item.count > 1 else "", *errors)
        console.print(table)
    for run_name, title in TITLES.items():
        replays = replay_rows(getattr(rehearsal, run_name))
        if replays:
            console.print(Text(f"{title}: replays in another precision than the forward's"))
            console.print(_replays(replays))
    sentence = Text(verdict_sentence(rehearsal))
    sentence.stylize("bold green" if rehearsal.verdict == "exact" else "bold red")
    console.print(sentence)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def _replays(rows: list[ReplayRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("module", overflow="fold")
    for header in ("", "forward", "replay", "replays"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        count = f"x{row.count}" if row.count > 1 else ""
        table.add_row(Text(row.name), count, row.forward, row.replay, str(row.calls))
    return table
