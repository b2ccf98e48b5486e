"""Whether a change of statistics has made a model better or worse."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from normkit.errors import OptionError
from normkit.inspection import undisturbed

Metric = Callable[[nn.Module], float]


def score(model: nn.Module, metric: Metric) -> float:
    """The metric of the model in eval mode; with the same random numbers each time."""
    with undisturbed(model):
        found = metric(model)
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"Expected the metric to give a number, got {type(found).__name__}."
        ) from error


def judged(before: float, after: float, higher_is_better: bool) -> str | None:
    """A reason to go back; None if the metric has not become worse."""
    worse = after < before if higher_is_better else after > before
    if math.isnan(after) and not math.isnan(before):
        return "the metric is not a number any more"
    return f"the metric became worse, {before:.6g} to {after:.6g}" if worse else None
