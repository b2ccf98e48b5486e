"""docs/evidence.svg: the differences behind every claim about accuracy, in one picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from normkit.reporting.charts import ForestScale, forest_scale
from tools.evidence.claims import ALL
from tools.evidence.evidence import Evidence
from tools.evidence.judge import CONTRADICTED, FAILS, HOLDS, ClaimRow
from tools.evidence.results import RESULTS
from tools.evidence.words import POINTS, where

COLOURS = {HOLDS: "#15803d", CONTRADICTED: "#b91c1c", FAILS: "#b45309"}
OTHER = "#64748b"
LEFT, WIDTH, RIGHT, LINE, TOP = 510, 380, 150, 17, 58  # pixels


def evidence_figure(folder: Path = RESULTS) -> str:
    """A line for each comparison: its interval, the mean, and what it says of the claim."""
    rows = list(_rows(Evidence(folder)))
    scale = forest_scale([(100 * row.low, 100 * row.high) for _, row in rows])
    width, height = LEFT + WIDTH + RIGHT, TOP + LINE * len(rows) + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="system-ui, sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="#fff"/>',
            *_head(scale, height),
            *_bands([label[0] for label, _ in rows], width),
            *(_line(label, row, scale, TOP + LINE * i) for i, (label, row) in enumerate(rows)),
            "</svg>",
            "",
        ]
    )


def _rows(evidence: Evidence) -> Iterator[tuple[str, ClaimRow]]:
    """Those in points of accuracy that have an interval."""
    for claim, rows in zip(ALL, evidence.rows, strict=True):
        if claim.measure and claim.measure not in POINTS:
            continue
        for row in rows:
            if row.pairs and math.isfinite(row.low) and math.isfinite(row.high):
                more = f", epoch {claim.epoch}" if claim.epoch else ""
                more += ", fewer points lost" if claim.measure else ""
                more += " after adaptation" if claim.measure.endswith("_adapted") else ""
                compared = f"{row.variant} against {row.baseline}"
                yield f"{claim.file}: {compared}, {where(row.cell)}{more}", row


def _head(scale: ForestScale, height: int) -> Iterator[str]:
    yield (
        '<text x="10" y="20" font-size="13" font-weight="600">Differences in test accuracy, '
        "points, with their intervals; to the right the first is better</text>"
    )
    for i, answer in enumerate([*COLOURS, "not shown, or unstable"]):
        yield _mark(answer, 16 + 100 * i, 36)
        yield f'<text x="{25 + 100 * i}" y="40">{answer}</text>'
    step = 5 if scale.high - scale.low < 60 else 10
    for value in range(math.ceil(scale.low / step) * step, math.floor(scale.high) + 1, step):
        x = _at(scale, value)
        colour = "#111" if value == 0 else "#e2e8f0"
        yield f'<path d="M{x} {TOP - 8}V{height - 20}" stroke="{colour}"/>'
        text = f"{value:+d}" if value else "0"
        yield f'<text x="{x}" y="{height - 8}" text-anchor="middle">{text}</text>'


def _bands(letters: list[str], width: int) -> Iterator[str]:
    """Every other letter on a ground of its own."""
    for i, letter in enumerate(dict.fromkeys(letters)):
        if i % 2:
            top = TOP + LINE * letters.index(letter) - LINE / 2
            height = LINE * letters.count(letter)
            yield (
                f'<rect x="0" y="{top}" width="{width}" height="{height}" '
                'fill="#64748b" fill-opacity="0.08"/>'
            )


def _line(label: str, row: ClaimRow, scale: ForestScale, y: int) -> str:
    """What lies beyond the scale is cut off: the number at the end says how far it goes."""
    colour = COLOURS.get(row.answer, OTHER)
    low, mean, high = (_at(scale, 100 * v) for v in (row.low, row.difference, row.high))
    text = label if len(label) <= 88 else f"{label[:87]}…"
    lost = row.lost + row.baseline_lost  # of the others alone the mean says little
    many = f"n {row.pairs}, {lost} lost" if lost else f"n {row.pairs}"
    return (
        f'<text x="10" y="{y + 4}">{escape(text)}</text>'
        f'<path d="M{low} {y}H{high}" stroke="{colour}" stroke-width="2"/>'
        f"{_mark(row.answer, mean, y)}"
        f'<text x="{LEFT + WIDTH + 8}" y="{y + 4}" fill="{colour}">'
        f"{100 * row.difference:+.1f}  ({many})</text>"
    )


def _mark(answer: str, x: float, y: int) -> str:
    """Square where a claim fails: colours alone do not tell everybody."""
    colour = COLOURS.get(answer, OTHER)
    if answer in (CONTRADICTED, FAILS):
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5}" width="7" height="7" fill="{colour}"/>'
    return f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>'


def _at(scale: ForestScale, value: float) -> float:
    share = (min(max(value, scale.low), scale.high) - scale.low) / (scale.high - scale.low)
    return round(LEFT + WIDTH * share, 1)
