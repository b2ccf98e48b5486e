"""Figures as plain data for the page's script, and what a variant looks like in all of them.

A figure has views (accuracy, loss, …), a view has panels (one for each cell), and a panel has
marks. charts.js makes plotly's traces of them, in the colours of the page, which may be light or
dark, and with the dash and the symbol of each variant: three ways to tell it apart, one of them
without colours. Written as plotly's own JSON the figures would be ten times as large.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Mark = dict[str, Any]
HEIGHT = 320  # pixels
SIGNIFICANT = 5  # digits of the numbers in a page
SPREAD_DIGITS = 3  # of deviations, which nobody reads to more
COLOURS = 8  # besides the grey of the baseline; style.css has them, for light and dark
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "star", "x")
# the same dashes for SVG
STROKES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}


@dataclass(frozen=True)
class VariantStyle:
    """The place of a variant in the key, and its marks."""

    index: int
    name: str
    colour: int  # --v0 is the baseline's
    dash: str
    symbol: str

    @property
    def stroke(self) -> str:
        return STROKES[self.dash]


def variant_styles(names: Sequence[str]) -> dict[str, VariantStyle]:
    """The baseline comes first in ``names``, and is grey."""
    styles = {}
    for index, name in enumerate(names):
        turn, colour = divmod(index - 1, COLOURS) if index else (0, -1)
        dash = "dash" if index == 0 else DASHES[(2 * turn) % len(DASHES)]
        styles[name] = VariantStyle(index, name, colour + 1, dash, SYMBOLS[index % len(SYMBOLS)])
    return styles


@dataclass(frozen=True)
class Panel:
    title: str
    marks: tuple[Mark, ...]
    layout: Mapping[str, Any]
    format: str = ".4~g"  # of values, when one points at them

    def plain(self) -> dict[str, Any]:
        """For JSON. What is the same for all marks is said once: mostly that is x."""
        marks = list(self.marks)
        shared = marks[0].get("x") if marks else None
        if shared is not None:
            marks = [{k: v for k, v in m.items() if k != "x" or v != shared} for m in marks]
        return {
            "title": self.title,
            "marks": marks,
            "x": shared,
            "layout": self.layout,
            "format": self.format,
        }


@dataclass(frozen=True)
class View:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Figure:
    """One card of the page."""

    id: str
    title: str
    about: str
    views: tuple[View, ...]

    def without_empty(self) -> Figure | None:
        """Without empty panels and views; None if nothing is left."""
        views = [
            View(view.title, tuple(panel for panel in view.panels if panel.marks))
            for view in self.views
        ]
        full = tuple(view for view in views if view.panels)
        return replace(self, views=full) if full else None

    def plain(self) -> list[dict[str, Any]]:
        return [
            {"title": view.title, "panels": [panel.plain() for panel in view.panels]}
            for view in self.views
        ]


def mark(
    kind: str,
    style: VariantStyle,
    x: Sequence[Any],
    y: Sequence[float | None],
    std: Sequence[float | None] | None = None,
    **more: Any,
) -> Mark:
    """Values of a variant: a line with a band, points with bars, …; charts.js has the kinds."""
    values = {"k": kind, "v": style.index, "x": short_numbers(x), "y": short_numbers(y), **more}
    if std is not None and any(std):
        values["s"] = [short_number(each or 0.0, SPREAD_DIGITS) for each in std]
    return values


def short_numbers(values: Sequence[Any]) -> list[Any]:
    return [short_number(value) for value in values]


def short_number(value: Any, digits: int = SIGNIFICANT) -> Any:
    """A number short enough for a page; what is not finite is a gap."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return plotly_text(value) if isinstance(value, str) else value


def plotly_text(text: object) -> str:
    """Text for a chart. Plotly reads some markup in texts; what users typed is none."""
    return html.escape(str(text), quote=False)


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": plotly_text(title)}, **more}


def thinned(count: int, most: int) -> list[int]:
    """Places of at most so many points, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})
