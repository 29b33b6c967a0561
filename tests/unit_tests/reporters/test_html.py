# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The rehearsal as one page that loads nothing."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from megatron.quant_state.reporters.html import render_rehearsal
from megatron.quant_state.twin import Change
from tests.unit_tests.reporters.rehearsals import LOST, rehearsal, run

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Tags, attributes, rows of table cells; every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_what_is_said() -> None:
    page = Page(render_rehearsal(rehearsal(run(*LOST))))
    assert ["wrong main_grads, step 2", "466 of 1692", "0 of 1692"] in page.rows
    folded = "decoder.layers.[3-60].mlp.experts.linear_fc1.weight[0-7]"
    first = page.rows.index(["parameter", "count", "step 1", "step 2"])
    assert page.rows[first + 1 : first + 4] == [
        ["decoder.layers.0.mlp.linear_fc2.weight", "1", "", "0.75"],
        [folded, "464", "0.5", "0.5"],
        ["mtp.layers.0.eh_proj.weight", "1", "0.25", "0.125"],
    ]
    assert ["hidden_size", "7168", "64", "width decides nothing"] in page.rows
    assert "Rehearsal of some-model: exact" in page.text
    assert "torch 2.11.0, megatron-core 0.19.2." in page.text
    assert "exact: all 1692 main_grads of all 2 steps" in page.text
    assert page.text.count("relative error of main_grad") == 1


def test_errors_that_are_no_numbers() -> None:
    wrong = run(("a.weight", 1, math.inf), ("a.weight", 2, math.nan))
    page = Page(render_rehearsal(rehearsal(quant_state=wrong)))
    assert ["a.weight", "1", "inf", "nan"] in page.rows
    assert "with quant_state: relative error of main_grad" in page.text
    assert "Rehearsal of some-model: wrong" in page.text


HOSTILE = "<script>alert('x')</script>&amp;\"'"


def test_whatever_a_name_holds_is_text() -> None:
    plain = Page(render_rehearsal(rehearsal(run(("a", 1, 0.5)))))
    text = render_rehearsal(
        rehearsal(
            run((HOSTILE, 1, 0.5)),
            model=HOSTILE,
            versions={HOSTILE: HOSTILE},
            changes=(Change(HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
        )
    )
    page = Page(text)
    assert page.tags == plain.tags
    assert page.attributes == plain.attributes
    assert "<script" not in text
    assert [HOSTILE] * 4 in page.rows
    assert [HOSTILE, "1", "0.5", ""] in page.rows
    assert page.text.count(HOSTILE) == 9


@pytest.mark.parametrize("lost", [(), LOST])
def test_nothing_is_loaded(lost: tuple[tuple[str, int, float], ...]) -> None:
    text = render_rehearsal(rehearsal(run(*lost)))
    page = Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not page.attributes & {"src", "href", "srcset", "onload", "style", "action"}
    assert not re.search(r"//|url\(|@import|@font-face", text)


def test_a_whole_page_in_light_and_dark() -> None:
    text = render_rehearsal(rehearsal())
    assert text.startswith("<!DOCTYPE html>\n")
    assert text.endswith("</html>\n")
    assert '<meta charset="utf-8">' in text
    assert "color-scheme: light dark" in text


def test_the_engine_is_named() -> None:
    real = rehearsal(versions={"torch": "2.11.0", "transformer-engine": "2.20.2"})
    for result, engine in ((rehearsal(), "the reference engine"), (real, "Transformer Engine")):
        words = " ".join(render_rehearsal(result).split())
        assert f"2 steps of 2 microbatches on {engine}" in words


def test_the_same_bytes_twice() -> None:
    assert render_rehearsal(rehearsal(run(*LOST))) == render_rehearsal(rehearsal(run(*LOST)))
