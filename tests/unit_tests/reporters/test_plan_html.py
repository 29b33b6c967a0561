# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The HTML page of a plan: its structure, and how a real browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from matplotlib.image import imread

from megatron.quant_state.plan import Plan
from megatron.quant_state.reporters.plan_html import render_plan
from megatron.quant_state.reporters.plan_map import PRECISION_COLORS, draw_map
from tests.unit_tests.planning import Planner

INDEX = str(Path(__file__).parent.parent / "cases" / "pipeline_index.yaml")
MODEL = ("num_layers=8", "pipeline_model_parallel_size=2", "mtp_num_layers=1")
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
VOID = {"meta", "br"}

# Runs in the test's copy of the page, which itself has no script.
MEASURE = """<script>
addEventListener("load", () => {
  const outside = [...document.body.querySelectorAll("*")].filter(
    e => !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 1);
  const small = [...document.querySelectorAll("svg text")].filter(
    e => e.getBoundingClientRect().height < 6);
  document.documentElement.dataset.measured = JSON.stringify({
    width: innerWidth, page: document.documentElement.scrollWidth,
    outside: outside.map(e => e.outerHTML.slice(0, 80)), small: small.length,
    map: document.querySelector("svg.map").getBoundingClientRect().width});
});
</script>"""


@pytest.fixture
def page(planner: Planner) -> str:
    return render_plan(*planner(*MODEL, recipe=INDEX))


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(page: str) -> None:
    balance = _Balance()
    balance.feed(page)
    assert balance.open == []
    assert "<script" not in page
    # Names of XML namespaces and of licences are no links.
    assert not re.search(r"""(?:src|href)=["'](?!#)|@import|url\((?!#)""", page)


def test_it_says_what_the_plan_says(page: str, planner: Planner) -> None:
    plan, findings = planner(*MODEL, recipe=INDEX)
    assert f"{len(plan.modules)} Transformer Engine linears on 2 pipeline stages" in page
    for item in findings:
        assert f"<strong>{item.severity} {item.code}</strong> <code>{item.location}</code>" in page
    assert "<td>pp0:0, pp1:0</td>" in page
    assert "<td>first (pipeline_index.yaml:6)</td>" in page
    assert set(re.findall(r'class="swatch" style="background: ([^"]*)"', page)) == {
        PRECISION_COLORS["bf16"],
        PRECISION_COLORS["tensorwise"],
    }


def test_what_the_user_wrote_is_escaped(planner: Planner) -> None:
    text = Path(INDEX).read_text().replace("first:", '"<b>&first":')
    page = render_plan(*planner(*MODEL, recipe=text))
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;first" in page


def cells(plan: Plan) -> dict[str, int]:
    """Cells of the map by precision."""
    svg = ET.fromstring(draw_map(plan.modules))
    collection = svg.find(".//*[@id='PatchCollection_1']")
    assert collection is not None
    styles = [str(path.get("style")) for path in collection.iter() if path.get("style")]
    return {
        name: count
        for name, color in PRECISION_COLORS.items()
        if (count := sum(color in style for style in styles))
    }


def test_the_map_has_a_cell_a_module_in_its_colour(planner: Planner) -> None:
    assert cells(planner(*MODEL, recipe=INDEX)[0]) == {"bf16": 13, "tensorwise": 24}
    assert cells(planner()[0]) == {"tensorwise": 16}


def test_the_map_is_the_same_twice(planner: Planner) -> None:
    plan, _ = planner(*MODEL, recipe=INDEX)
    assert draw_map(plan.modules) == draw_map(plan.modules)


def browse(tmp_path: Path, page: str, width: int, scheme: str) -> tuple[dict[str, Any], Any]:
    """What a real browser measures, and its screenshot [height, width, RGBA], 0 to 1."""
    assert BROWSER is not None
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(page.replace("</body>", f"{MEASURE}</body>"))
    common = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *(f"--window-size={width},1200", f"--user-data-dir={tmp_path / 'profile'}"),
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
    ]
    dumped = subprocess.run(
        [*common, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = re.search(r'data-measured="([^"]*)"', dumped.stdout)
    assert found, dumped.stderr
    subprocess.run(
        [*common, f"--screenshot={picture}", path.as_uri()], capture_output=True, timeout=120
    )
    return json.loads(found[1].replace("&quot;", '"')), imread(str(picture))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_shows_it_without_overflow(
    page: str, tmp_path: Path, width: int, scheme: str
) -> None:
    measured, picture = browse(tmp_path, page, width, scheme)
    assert measured["width"] == width
    assert measured["page"] <= width
    assert measured["outside"] == []
    assert measured["small"] == 0
    background = [round(float(value) * 255) for value in picture[5, 5, :3]]
    assert background == ([255, 255, 255] if scheme == "light" else [22, 25, 29])
    colors = {
        tuple(round(float(v) * 255) for v in pixel[:3])
        for pixel in picture[::3, ::3].reshape(-1, picture.shape[2])
    }
    for name in ("bf16", "tensorwise"):
        value = PRECISION_COLORS[name]
        assert tuple(int(value[i : i + 2], 16) for i in (1, 3, 5)) in colors


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_measurement_sees_an_overflow(page: str, tmp_path: Path) -> None:
    wide = page.replace("<h2>Totals</h2>", '<h2 style="width: 3000px">Totals</h2>')
    measured, _ = browse(tmp_path, wide, 1280, "light")
    assert measured["page"] > 1280
    assert len(measured["outside"]) == 1
