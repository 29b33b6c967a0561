# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The map of a plan: layers by kind of module, coloured by precision, as one inline SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.quant_state.plan import PlannedModule

__all__ = ["PRECISION_COLORS", "color_of", "draw_map"]

#: A colour for each precision that reads on white and on black, and for colour-blind eyes (after
#: Okabe and Ito); ``mixed`` is for modules whose calls differ.
PRECISION_COLORS = {
    "bf16": "#8a949e",
    "delayed": "#56b4e9",
    "tensorwise": "#0072b2",
    "blockwise": "#009e73",
    "mxfp8": "#e69f00",
    "nvfp4": "#d55e00",
    "mixed": "#cc79a7",
    "not called": "#b8b0a0",
}

_PREFIX = re.compile(r"^(?:decoder|mtp)\.layers\.\d+\.")
_INNER = re.compile(r"^(?:mtp_model_layer|transformer_layer)\.")
_EXPERT = re.compile(r"\.local_experts\.\d+\.")


@dataclass(frozen=True)
class _Cell:
    column: int
    row: int
    precision: str


def color_of(precision: str | None) -> str:
    """The colour of a precision as a plan names it."""
    if precision is None:
        return PRECISION_COLORS["not called"]
    return PRECISION_COLORS.get(precision, PRECISION_COLORS["mixed"])


def draw_map(modules: Sequence[PlannedModule]) -> str:
    """An ``<svg>`` element: a column a layer, a row a kind of module, a cell in its colour.

    The text takes the page's colour (``currentColor``), so that it reads in light and in dark; the
    same modules give the same bytes.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.collections import PatchCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    columns, rows, cells = _grid(modules)
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "quant-state", "font.size": 8}
    with matplotlib.rc_context(settings):
        width = max(4.0, 2.6 + 0.13 * len(columns))
        figure = Figure(figsize=(width, 0.7 + 0.22 * len(rows)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        patches = [Rectangle((c.column + 0.05, c.row + 0.08), 0.9, 0.84) for c in cells]
        colors = [color_of(cell.precision) for cell in cells]
        axes.add_collection(PatchCollection(patches, facecolors=colors, edgecolors="none"))
        axes.set_xlim(0, max(1, len(columns)))
        axes.set_ylim(max(1, len(rows)), 0)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
        step = max(1, len(columns) // 16)
        numbers = [i for i, name in enumerate(columns) if name.isdigit()]
        others = [i for i, name in enumerate(columns) if not name.isdigit()]
        # A number beside the first MTP layer would run into its name.
        end = others[0] - 1 if others and step > 1 else len(columns)
        shown = [*(i for i in numbers if i % step == 0 and i < end), *others]
        axes.set_xticks([i + 0.5 for i in shown], [columns[i] for i in shown])
        axes.tick_params(length=0, colors=_TEXT)
        axes.set_xlabel("decoder layer, M: MTP", color=_TEXT)
        for spine in axes.spines.values():
            spine.set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue())


# A colour that nothing else has, to find the text by.
_TEXT = "#010203"


def _inline(text: str) -> str:
    """The element alone, in the page's own text colour and no wider than the page."""
    svg = text[text.index("<svg") :].replace(_TEXT, "currentColor")
    label = "Map of layers by kind of module, coloured by precision"
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" class="map" ', 1)


def _grid(modules: Sequence[PlannedModule]) -> tuple[list[str], list[str], list[_Cell]]:
    """Names of columns and rows, and the cells; experts of one layer share one."""
    places: dict[tuple[str, str], set[str]] = {}
    order: dict[tuple[int, int], str] = {}
    for module in modules:
        if module.global_layer is not None:
            order[(0, module.global_layer)] = column = str(module.global_layer)
        elif module.mtp_depth is not None:
            order[(1, module.mtp_depth)] = column = f"M{module.mtp_depth}"
        else:
            order[(2, 0)] = column = "other"
        kind = _INNER.sub("", _PREFIX.sub("", module.name))
        kind = _EXPERT.sub(".local_experts.*.", kind)
        places.setdefault((column, kind), set()).add(module.training or "not called")
    columns = [order[key] for key in sorted(order)]
    rows = list(dict.fromkeys(kind for _, kind in places))
    cells = [
        _Cell(
            columns.index(column), rows.index(kind), next(iter(seen)) if len(seen) == 1 else "mixed"
        )
        for (column, kind), seen in places.items()
    ]
    return columns, rows, cells
