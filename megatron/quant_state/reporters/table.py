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
    WrongRow,
    engine_name,
    replay_rows,
    summary_rows,
    verdict_sentence,
    wrong_rows,
)

__all__ = ["render_rehearsal"]

# Wide enough for a folded parameter name; a narrower terminal wraps.
_PIPED_WIDTH = 120
# What is left to a name however many steps there are; numbers are never cut.
_LEAST_NAME_WIDTH = 30


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
            f"{rehearsal.num_microbatches} microbatches on {engine_name(rehearsal)} ({versions})"
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
        if rows:
            console.print(Text(f"{title}: relative error of main_grad against the truth"))
            _print_wrong(console, rows, rehearsal.steps, width)
    for run_name, title in TITLES.items():
        replays = replay_rows(getattr(rehearsal, run_name))
        if replays:
            console.print(Text(f"{title}: replays in another precision than the forward's"))
            console.print(_replays(replays))
    sentence = Text(verdict_sentence(rehearsal))
    sentence.stylize("bold green" if rehearsal.verdict == "exact" else "bold red")
    console.print(sentence, soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def _print_wrong(console: Console, rows: list[WrongRow], steps: int, width: int) -> None:
    headers = ["", *(f"step {step}" for step in range(1, steps + 1))]
    lines = [
        [
            f"x{row.count}" if row.count > 1 else "",
            *("" if error is None else f"{error:.3g}" for error in row.errors),
        ]
        for row in rows
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("parameter", overflow="fold")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for row, line in zip(rows, lines, strict=True):
        table.add_row(Text(row.name), *line)
    columns = zip(headers, *lines, strict=True)
    # rich puts three blanks between columns.
    numbers = sum(3 + max(map(len, column)) for column in columns)
    console.width = max(width, numbers + _LEAST_NAME_WIDTH)
    console.print(table)


def _replays(rows: list[ReplayRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("module", overflow="fold")
    for header in ("", "forward", "replay", "replays"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        count = f"x{row.count}" if row.count > 1 else ""
        table.add_row(Text(row.name), count, row.forward, row.replay, str(row.calls))
    return table
