"""Numbers and names in words, for pages and terminals. Templates have this module as ``text``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeGuard

from normkit.core.messages import counted as counted

NONE = "–"


def is_finite(value: float | None) -> TypeGuard[float]:
    """Whether a number says anything: neither None nor NaN nor infinite."""
    return value is not None and math.isfinite(value)


def number(value: float | int | str | bool | None) -> str:
    """A number with three digits; words stay words.

    >>> number(0.12345), number(1234567), number(1e-5), number(True)
    ('0.123', '1,234,567', '1.0e−5', 'yes')
    """
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        return f"{value:.1e}".replace("e+0", "e").replace("e-0", "e−").replace("-", "−")
    return three_digits(value)


def three_digits(value: float | None) -> str:
    """Without an exponent for large numbers; what is not finite is a dash."""
    if not is_finite(value):
        return NONE
    return f"{value:.3g}".replace("-", "−") if abs(value) < 1000 else f"{value:,.0f}"


def percent(share: float) -> str:
    if not math.isfinite(share):
        return number(share)
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.2g} %"


def probability(p: float | None) -> str:
    """A p-value; small ones are not more exact than they are."""
    if not is_finite(p):
        return NONE
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def duration(seconds: float | None) -> str:
    """
    >>> duration(0.25), duration(42.1), duration(3750)
    ('0.25 s', '42 s', '1 h 2 min')
    """
    if not is_finite(seconds):
        return NONE
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours:,} h" + (f" {rest} min" if rest and hours < 24 else "")


def memory(count: float | None) -> str:
    """Bytes, in units of 1024."""
    if not is_finite(count):
        return NONE
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def listed(names: Iterable[object], most: int = 8) -> str:
    """a, b and c; with very many names the last ones are counted."""
    texts = [str(name) for name in names]
    if len(texts) > most:
        texts = [*texts[: most - 1], f"{len(texts) - most + 1} more"]
    return texts[0] if len(texts) == 1 else " and ".join([", ".join(texts[:-1]), *texts[-1:]])


def rough(count: int) -> int:
    """An estimate, not more exact than it is.

    >>> rough(12), rough(42), rough(193)
    (12, 45, 200)
    """
    step = 1 if count <= 20 else 5 if count < 100 else 10 ** (len(str(count)) - 2)
    return -(-count // step) * step
