# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Results as one HTML page that works offline, in light and in dark."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from megatron.quant_state.rehearse import Rehearsal
from megatron.quant_state.reporters.rehearsal import (
    TITLES,
    replay_rows,
    summary_rows,
    verdict_sentence,
    wrong_rows,
)

__all__ = ["render_rehearsal"]


def render_rehearsal(rehearsal: Rehearsal) -> str:
    """The rehearsal as a page without scripts and without anything to load."""
    environment = Environment(
        loader=PackageLoader("megatron.quant_state.reporters"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    wrong = [
        (title, wrong_rows(getattr(rehearsal, name), rehearsal.steps))
        for name, title in TITLES.items()
    ]
    replays = [(title, replay_rows(getattr(rehearsal, name))) for name, title in TITLES.items()]
    return environment.get_template("rehearsal.html.j2").render(
        rehearsal=rehearsal,
        titles=list(TITLES.values()),
        summary=summary_rows(rehearsal),
        wrong=[(title, rows) for title, rows in wrong if rows],
        replays=[(title, rows) for title, rows in replays if rows],
        sentence=verdict_sentence(rehearsal),
    )
