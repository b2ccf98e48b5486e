"""Options of networks that must be numbers of things."""

from __future__ import annotations

from typing import Any

from normkit.errors import OptionError


def positive(option: str, value: Any) -> int:
    """The value of an option that must be a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{option} is to be a positive integer, got {value!r}.")
    return value
