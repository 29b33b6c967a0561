# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Results as one HTML page that works offline, in light and in dark."""

from __future__ import annotations

from megatron.quant_state.rehearse import Rehearsal
from megatron.quant_state.reporters.page import render_page
from megatron.quant_state.reporters.rehearsal import (
    TITLES,
    engine_name,
    replay_rows,
    summary_rows,
    verdict_sentence,
    wrong_rows,
)

__all__ = ["render_rehearsal"]


def render_rehearsal(rehearsal: Rehearsal) -> str:
    """The rehearsal as a page without scripts and without anything to load."""
    wrong = [
        (title, wrong_rows(getattr(rehearsal, name), rehearsal.steps))
        for name, title in TITLES.items()
    ]
    replays = [(title, replay_rows(getattr(rehearsal, name))) for name, title in TITLES.items()]
    return render_page(
        "rehearsal.html.j2",
        rehearsal=rehearsal,
        engine=engine_name(rehearsal),
        titles=list(TITLES.values()),
        summary=summary_rows(rehearsal),
        wrong=[(title, rows) for title, rows in wrong if rows],
        replays=[(title, rows) for title, rows in replays if rows],
        sentence=verdict_sentence(rehearsal),
    )
