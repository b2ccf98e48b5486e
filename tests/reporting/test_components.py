"""The style sheet, the charts and the texts that all pages share."""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from normkit.errors import MissingExtra
from normkit.reporting import render
from normkit.reporting.charts import (
    ARROWS,
    EDGE,
    FOREST_WIDTH,
    Series,
    bar_list,
    forest_row,
    forest_scale,
    heat_map,
    line_chart,
)
from normkit.reporting.page import TEMPLATES, template_environment
from normkit.reporting.text import number, percent

CSS = (TEMPLATES / "style.css").read_text(encoding="utf-8")


def drawn(component: str, data: object) -> str:
    """A component as it stands in a page; an error if its tags do not match."""
    components = template_environment().get_template("components.html").module
    markup = str(getattr(components, component)(data))
    ElementTree.fromstring(f"<div>{markup.replace('<wbr>', '')}</div>")
    return markup


def test_every_colour_is_in_both_schemes_and_paper_is_light() -> None:
    light, dark = re.findall(r":root(?::not\(.printing\))? \{(.*?)\}", CSS, flags=re.DOTALL)[:2]
    used = set(re.findall(r"var\((--\w+)", CSS)) - {"--tone", "--strength"}
    assert used <= set(re.findall(r"(--\w+):", light))
    assert used <= set(re.findall(r"(--\w+):", dark))
    assert re.search(r"@media screen and \(prefers-color-scheme: dark\) \{\s*:root:not\(", CSS)
    assert "url(" not in CSS
    assert "@import" not in CSS


def test_a_missing_jinja2_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "jinja2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"Some page needs jinja2.*normkit\[report\]"):
        render("page.html", Path(), what="Some page")


def drawn_lines(*given: Any, **options: Any) -> str:
    return drawn("line_chart", line_chart(*given, **options))


def test_lines_lie_where_their_values_are() -> None:
    svg = drawn_lines([Series("s", [0.0, 5.0, 10.0])], ["a", "b", "c"], label="l")
    dots = re.findall(r'<circle class="dot-one" cx="([\d.]+)" cy="([\d.]+)"', svg)
    x, y = zip(*((float(a), float(b)) for a, b in dots), strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.11)  # rounded to a tenth
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.11)
    assert y[0] > y[2]  # up is more


def test_a_logarithmic_axis_has_decades_of_equal_height() -> None:
    svg = drawn_lines([Series("s", [0.1, 1.0, 10.0])], ["a", "b", "c"], label="l", logarithmic=True)
    y = [float(v) for v in re.findall(r'cy="([\d.]+)"', svg)]
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.11)


def test_missing_and_infinite_values() -> None:
    svg = drawn_lines([Series("s", [1.0, None, math.inf, math.nan, 2.0])], list("abcde"), label="l")
    assert svg.count("<circle") == 2
    assert svg.count("l8 8m0 -8l-8 8") == 2  # crosses
    assert "nan" not in svg.replace("NaN", "")


@pytest.mark.parametrize("values", [[0.0], [1e-12], [1e12], [math.inf]])
@pytest.mark.parametrize("logarithmic", [True, False])
def test_odd_ranges(values: list[float], logarithmic: bool) -> None:
    svg = drawn_lines(
        [Series("s", values)], ["a"], label="l", logarithmic=logarithmic, bounds=(0.5,)
    )
    assert "nan" not in svg


def test_a_heat_map_has_a_cell_for_each_pair() -> None:
    cosines = [[1.0, 0.5, -0.5], [0.5, 1.0, 0.0], [-0.5, 0.0, 1.0]]
    svg = drawn("heat_map", heat_map(cosines, "l"))
    assert svg.count("h1v1h-1z") == 7  # all but the two that are 0
    strong = re.search(r'fill-opacity="1.0" d="([^"]+)"', svg)
    assert strong is not None
    assert strong[1].count("M") == 3
    assert re.search(r'class="negative" fill-opacity="0.5" d="M2 0', svg)
    assert drawn("heat_map", heat_map([[math.nan]], "l"))


def test_bars_are_as_long_as_their_values() -> None:
    bars = bar_list({"a": 0.25, "b.c": 1.0, "d": math.nan}, bound=0.5)
    text = drawn("bar_list", bars)
    assert re.findall(r"width:([\d.]+)%", text) == ["25.0", "100.0", "100.0"]
    assert text.count("bar bad") == 2  # above the bound, or not a number
    assert text.count('style="left:50.0%"') == 3  # the bound
    few = bar_list({"a": 4.0, "b": 1000.0}, bound=8.0, below=True, logarithmic=True)
    assert [bar.bad for bar in few.bars] == [True, False]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (0.12345, "0.123"),
        (1234.5, "1,234"),
        (-0.5, "−0.5"),
        (1e-5, "1.0e−5"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (True, "yes"),
        (None, "–"),
        ("<b>", "<b>"),
    ],
)
def test_numbers(value: Any, said: str) -> None:
    assert number(value) == said


def test_shares() -> None:
    assert (percent(0.5), percent(0.0123), percent(0.0)) == ("50 %", "1.2 %", "0 %")


def test_forest_rows_of_like_size_are_shown_whole() -> None:
    to = forest_scale([(-0.01, 0.02), (0.0, 0.03), (None, float("nan"))])
    assert EDGE < to(-0.01) < to(0.0) < to(0.03) < FOREST_WIDTH - EDGE


def test_one_forest_row_far_out_does_not_shrink_the_others() -> None:
    """With instance norm at −38 points, all other rows were dots on the zero line."""
    usual = [(-0.01, 0.02)] * 4
    to = forest_scale([*usual, (-0.40, -0.38)])
    assert to(0.02) - to(-0.01) > FOREST_WIDTH / 6
    far = forest_row([-0.39], -0.39, (-0.40, -0.38), to, margin=0.0, label="")
    assert far.arrows == ARROWS[0]
    assert (far.mean, far.dots) == (None, ""), "no stroke at the edge, where it is not"
    near = forest_row([0.0], 0.0, (-0.01, 0.02), to, margin=0.0, label="")
    assert near.arrows == ""


@pytest.mark.parametrize("rows", [[], [(0.0, 0.0)], [(None,)], [(0.5, 0.7)], [(0.0,), (5.0,)]])
def test_zero_is_always_on_a_forest_plot(rows: list[tuple[float | None, ...]]) -> None:
    to = forest_scale(rows)
    assert EDGE <= to(0.0) <= FOREST_WIDTH - EDGE
    assert to.low < 0 < to.high
