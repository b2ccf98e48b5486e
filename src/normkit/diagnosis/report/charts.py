"""Charts as SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from normkit.diagnosis.report.text import escaped, number

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 40
LEAST = 0.01  # what a logarithmic axis begins with
LEVELS = 20  # shades of the heat map


class Series(NamedTuple):
    """One line: its name, and a value for each layer; None where there is none."""

    name: str
    values: Sequence[float | None]


def lines(
    series: Sequence[Series],
    names: Sequence[str],
    *,
    label: str,
    logarithmic: bool = False,
    bounds: Sequence[float] = (),
) -> str:
    """Values over the layers in the order in which they run.

    What is not finite is a cross at the top.
    """
    count = len(names)
    shown = [v for s in series for v in s.values if v is not None and math.isfinite(v)]
    top = max([*shown, *bounds, LEAST * 10 if logarithmic else 1e-9])
    ticks = _decades(top) if logarithmic else _round_steps(top)
    top = max(top, ticks[-1])
    place = _logarithmic(top) if logarithmic else lambda v: v / top

    def x(i: int) -> float:
        room = WIDTH - LEFT - RIGHT
        return LEFT + room * (0.5 if count == 1 else i / (count - 1))

    def y(value: float) -> float:
        share = place(value) if math.isfinite(value) else 1.0
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(share, 0.0), 1.0)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(label)}">',
        *(_grid(tick, y(tick)) for tick in ticks),
        *(
            f'<path class="bound" d="M{LEFT} {y(b):.1f}H{WIDTH - RIGHT}"><title>bound '
            f"{number(b)}</title></path>"
            for b in bounds
        ),
        *(_tick(i, x(i)) for i in _some(count)),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        "norm, in the order of the forward pass</text>",
    ]
    for each, kind in zip(series, ("one", "two"), strict=False):
        parts.append(_line(each, names, kind, x, y))
    return "".join([*parts, "</svg>"])


def _line(
    series: Series,
    names: Sequence[str],
    kind: str,
    x: Callable[[int], float],
    y: Callable[[float], float],
) -> str:
    """A line with a dot for each layer; a gap where there is no value."""
    path, dots, pen = [], [], "M"
    for i, value in enumerate(series.values):
        if value is None:
            pen = "M"
            continue
        title = f"<title>{escaped(names[i])}: {escaped(series.name)} {number(value)}</title>"
        if math.isfinite(value):
            path.append(f"{pen}{x(i):.1f} {y(value):.1f}")
            pen = "L"
            dots.append(
                f'<circle class="dot-{kind}" cx="{x(i):.1f}" cy="{y(value):.1f}" r="3.2">'
                f"{title}</circle>"
            )
        else:
            pen = "M"
            a, b = x(i) - 4, TOP
            dots.append(f'<path class="{kind}" d="M{a:.1f} {b}l8 8m0 -8l-8 8">{title}</path>')
    return f'<path class="{kind}" d="{"".join(path)}"/>' + "".join(dots) if path else "".join(dots)


def _grid(value: float, y: float) -> str:
    return (
        f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'
    )


def _tick(index: int, x: float) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{index + 1}</text>'


def _some(count: int) -> list[int]:
    """About eight of the layers, the first and the last among them."""
    step = max(1, math.ceil((count - 1) / 7))
    chosen = list(range(0, count, step))
    if count and chosen[-1] != count - 1:
        if count - 1 - chosen[-1] < step / 2 and len(chosen) > 1:
            chosen.pop()
        chosen.append(count - 1)
    return chosen


def _logarithmic(top: float) -> Callable[[float], float]:
    span = math.log10(top / LEAST)
    return lambda value: math.log10(max(value, LEAST) / LEAST) / span


def _decades(top: float) -> list[float]:
    """Powers of ten, not too many."""
    first, last = round(math.log10(LEAST)), math.ceil(math.log10(top) - 1e-9)
    step = max(1, math.ceil((last - first) / 6))
    return [10.0**k for k in range(first, last + step, step)]


def _round_steps(top: float) -> list[float]:
    """About five round numbers from 0 to above the highest value."""
    rough = top / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= rough)
    return [step * k for k in range(math.ceil(top / step - 1e-9) + 1)]


def heat_map(cosines: Sequence[Sequence[float]], label: str) -> str:
    """Cosines between samples: the stronger the colour the more alike, another if below 0."""
    n = len(cosines)
    shades: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(cosines):
        for j, value in enumerate(row):
            level = round(min(abs(value), 1.0) * LEVELS) if math.isfinite(value) else 0
            if level:
                kind = "hot" if value > 0 else "below"
                shades.setdefault((kind, level), []).append(f"M{j} {i}h1v1h-1z")
    paths = [
        f'<path class="{kind}" fill-opacity="{level / LEVELS:.2f}" d="{"".join(cells)}"/>'
        for (kind, level), cells in sorted(shades.items())
    ]
    return (
        f'<svg viewBox="0 0 {n} {n}" role="img" aria-label="{escaped(label)}" '
        f'shape-rendering="crispEdges" style="max-width:22rem">'
        f'<rect class="cold" width="{n}" height="{n}"/>{"".join(paths)}</svg>'
    )
