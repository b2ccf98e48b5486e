"""Options of layers: which there are, what they may be, and how a layer says them."""

from __future__ import annotations

import inspect
import math
from numbers import Real
from operator import index
from typing import Any, ClassVar

from torch import nn

from normkit.errors import OptionError, nearest


def positive(value: Any, option: str, owner: str) -> int:
    """A positive integer, of Python or of any library that has its own."""
    number = 0 if isinstance(value, bool) or not hasattr(value, "__index__") else index(value)
    if number < 1:
        raise OptionError(f"{owner} expects {option} to be a positive integer, got {value!r}.")
    return number


class Configured(nn.Module):
    """A module whose keyword-only arguments are its options, kept as attributes of their names."""

    withheld: ClassVar[frozenset[str]] = frozenset()  # options of a base class without meaning here
    channels: int

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Every keyword option of the class, those of its bases included."""
        result: dict[str, inspect.Parameter] = {}
        for ancestor in cls.__mro__:
            if ancestor is Configured:
                break
            if "__init__" in vars(ancestor):
                for name, option in inspect.signature(
                    vars(ancestor)["__init__"]
                ).parameters.items():
                    if option.kind is inspect.Parameter.KEYWORD_ONLY:
                        result.setdefault(name, option)
        return {name: option for name, option in result.items() if name not in cls.withheld}

    def defaults(self) -> dict[str, Any]:
        """The value of each option if only the others were given."""
        return {name: option.default for name, option in self.options().items()}

    def extra_repr(self) -> str:
        """The channels, and every option that is not at its default."""
        parts = [str(self.channels)]
        for name, default in self.defaults().items():
            value = getattr(self, name, default)
            if name not in ("device", "dtype") and value != default:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)

    @property
    def _title(self) -> str:
        return type(self).__name__

    def _choice(self, option: str, value: Any, known: tuple[Any, ...]) -> Any:
        """The value of an option that must be one of a few."""
        if value not in known:
            hint = nearest(str(value), [str(k) for k in known])
            raise OptionError(f"{self._title} got {option}={value!r}. {hint}")
        return value

    def _positive(self, option: str, value: Any) -> int:
        """The value of an option that must be a positive integer."""
        return positive(value, option, self._title)

    def _number(self, option: str, value: Any, least: float | None = None) -> float:
        """The value of an option that must be a finite number, and not below another."""
        finite = isinstance(value, Real) and math.isfinite(value)
        if not finite or (least is not None and value < least):
            wanted = f"a finite {option}" if least is None else f"{option} ≥ {least}"
            raise OptionError(f"{self._title} expects {wanted}, got {value!r}.")
        return float(value)

    def _withhold(self, **given: tuple[Any, Any]) -> None:
        """Refuse options, given with their defaults, that would silently do nothing here."""
        for option, (value, default) in given.items():
            if option in self.withheld and value != default:
                raise OptionError(f"{self._title} has no option {option!r}.")
