# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The rehearsal as text for a terminal."""

from __future__ import annotations

import math
import re

import pytest

from megatron.quant_state.reporters.table import render_rehearsal
from tests.unit_tests.reporters.rehearsals import LOST, rehearsal, run


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return re.split(r" {2,}", line.strip())


def test_what_is_said() -> None:
    text = render_rehearsal(rehearsal(run(*LOST)))
    assert text.startswith("some-model: twin trained for 2 steps of 2 microbatches on the referenc")
    assert "(torch 2.11.0, megatron-core 0.19.2)" in " ".join(text.split())
    assert cells(text, "wrong main_grads, step 2")[1:] == ["466 of 1692", "0 of 1692"]
    folded = "decoder.layers.[3-60].mlp.experts.linear_fc1.weight[0-7]"
    assert cells(text, folded) == [folded, "x464", "0.5", "0.5"]
    assert cells(text, "decoder.layers.0")[1:] == ["0.75"]
    assert text.index("linear_fc2") < text.index(folded) < text.index("eh_proj")
    assert "release: relative error of main_grad against the truth" in text
    assert "with quant_state: relative error" not in text
    assert text.rstrip("\n").splitlines()[-1].startswith("exact: all 1692 main_grads")


def test_errors_of_the_layer_are_shown_too() -> None:
    wrong = run(("a.weight", 1, math.inf), ("a.weight", 2, math.nan), ("b.weight", 1, 1.25e-8))
    text = render_rehearsal(rehearsal(quant_state=wrong))
    assert "with quant_state: relative error of main_grad against the truth" in text
    assert cells(text, "a.weight") == ["a.weight", "inf", "nan"]
    assert cells(text, "b.weight") == ["b.weight", "1.25e-08"]
    assert text.rstrip("\n").splitlines()[-1] == (
        "wrong: 2 of 1692 main_grads differ with quant_state installed"
    )


def test_markup_in_names_is_text() -> None:
    odd = "layers.[bold]x[/bold].weight"
    text = render_rehearsal(rehearsal(run((odd, 1, 0.5)), model="[red]m", versions={"[b]": "[/b]"}))
    assert odd in text
    assert text.startswith("[red]m: twin trained")
    assert "([b] [/b])" in text


def test_piped_text_is_plain_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = render_rehearsal(rehearsal(run(*LOST)))
    assert "\x1b" not in plain
    assert all(line == line.rstrip() for line in plain.split("\n"))
    for name, value in (("COLUMNS", "30"), ("FORCE_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert render_rehearsal(rehearsal(run(*LOST))) == plain


def test_colour_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = render_rehearsal(rehearsal(run(*LOST)), color=True)
    assert "\x1b[1;32mexact" in coloured
    uncoloured = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    plain = render_rehearsal(rehearsal(run(*LOST)))
    assert [line.rstrip() for line in uncoloured.splitlines()] == plain.splitlines()


@pytest.mark.parametrize("color", [False, True])
def test_many_steps_lose_no_digit(monkeypatch: pytest.MonkeyPatch, color: bool) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    steps = 30
    errors = [0.123 + step / 1000 for step in range(1, steps + 1)]
    name = LOST[2][0]
    release = run(
        *((name, step, error) for step, error in enumerate(errors, 1)),
        losses=tuple(4 + error for error in errors),
    )
    text = re.sub(
        r"\x1b\[[\d;]*m", "", render_rehearsal(rehearsal(release, steps=steps), color=color)
    )
    assert "…" not in text
    # A long name takes lines of its own rather than digits of others.
    folded, *shown = cells(text, name[:25])
    assert name.startswith(folded)
    assert shown == [f"{error:.3g}" for error in errors]
    assert all(f"{4 + error:.6f}" in text for error in errors)


def test_the_engine_is_named() -> None:
    real = rehearsal(versions={"torch": "2.11.0", "transformer-engine": "2.20.2"})
    for result, engine in ((rehearsal(), "the reference engine"), (real, "Transformer Engine")):
        words = " ".join(render_rehearsal(result).split())
        assert f"2 steps of 2 microbatches on {engine}" in words


def test_the_same_bytes_twice() -> None:
    assert render_rehearsal(rehearsal(run(*LOST))) == render_rehearsal(rehearsal(run(*LOST)))
