"""Words and numbers for a page. Whatever comes from a model or a user goes through here."""

from __future__ import annotations

import html
import math


def escaped(value: object) -> str:
    """Text that cannot become markup, in elements and in quoted attributes."""
    return html.escape(str(value), quote=True)


def breaking(path: str) -> str:
    """A path, escaped, that a narrow column breaks behind a point rather than within a name."""
    return escaped(path).replace(".", ".<wbr>")


def number(value: float | int | str | bool | None) -> str:
    """A number with three digits, escaped; words stay words."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e5 or size < 1e-3:
        return f"{value:.1e}".replace("e+0", "e").replace("e-0", "e−").replace("-", "−")
    return f"{value:.3g}".replace("-", "−") if size < 1000 else f"{value:,.0f}"


def percent(value: float) -> str:
    if not math.isfinite(value):
        return number(value)
    return f"{100 * value:.0f} %" if value >= 0.0995 or value == 0 else f"{100 * value:.2g} %"


def words(name: str) -> str:
    """An identifier as words: "output_error" is "output error"."""
    return escaped(name.replace("_", " "))
