"""calibrate: running statistics that are those of the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from normkit.calibration.changing import change_statistics
from normkit.calibration.feeding import Feed, Forward
from normkit.calibration.measured import Measured
from normkit.calibration.result import Calibration
from normkit.calibration.subjects import subjects_of
from normkit.calibration.sweeping import layerwise, progressive, side_by_side
from normkit.calibration.verdict import Metric
from normkit.errors import OptionError, nearest

MODES: dict[str, Callable[..., list[Measured]]] = {
    "progressive": progressive,
    "layerwise": layerwise,
}


def calibrate(
    model: nn.Module,
    batches: Any,
    *,
    where: Any = None,
    mode: str = "progressive",
    together: bool = False,
    images: int | None = None,
    until: float | None = None,
    forward: Forward | None = None,
    metric: Metric | None = None,
    higher_is_better: bool = True,
    frozen: bool = False,
    note: str = "",
) -> Calibration:
    """Give the norms of a model the statistics that their inputs have on these batches.

    The statistics are those of all values together: every batch counts by its size, in float64,
    whatever its number, size or order; a norm that runs several times in a forward gets those of
    all its runs. The model runs in eval mode, so that nothing drops out, and nothing else of it
    changes: not its mode, its other buffers, momentum, or torch's random numbers.

        mode="progressive"   norm after norm from the input on; each sees its input as it comes
                             through the new statistics below. A pass for each norm, up to it. The
                             model is in agreement with itself afterwards.
        mode="layerwise"     one pass; each norm's input is what it is with the old statistics.
                             For statistics that are nearly right, and for merging several.
        together=True        progressive in one pass over all batches side by side: much faster,
                             but what they hold between two norms is in memory at the same time.
        images               stop after so many; a loader may be shorter.
        until=0.01           stop when the standard error of each channel's mean is below 1 % of its
                             standard deviation, and that of its variance below 1 % of it.
        metric               a function of the model; it is called before and after, and if its
                             value has become worse the old statistics come back.
        where, frozen        which norms, as in ``select``; those that are frozen stay so, unless
                             frozen=True.

    A batch is a tensor, a tuple whose first part is the input, or a mapping of keyword arguments;
    for detectors, a list of images. ``forward(model, batch)`` replaces that. In progressive mode
    the batches are gone through several times: an iterator that cannot is kept in memory. A batch
    whose values are not finite is left out, with a warning. If anything fails, the loader included,
    the model is what it was.

    Returns a Calibration: print it, keep ``.statistics``, or take it back with ``.undo()``.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    >>> done = nk.calibrate(model, [torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]])])
    >>> model[0].running_mean.item(), model[0].running_var.item()  # of 1, 2 and 6
    (3.0, 7.0)
    >>> done.undo()
    >>> model[0].running_mean.item()
    0.0
    """
    subjects = subjects_of(model, where, frozen)
    return change_statistics(
        model,
        Feed(model, batches, forward, images),
        subjects,
        sweep=sweep_of(mode, together),
        mode=mode,
        until=_bound(until),
        metric=metric,
        higher_is_better=higher_is_better,
        note=note,
    )


def sweep_of(mode: str, together: bool) -> Callable[..., list[Measured]]:
    """How to go through the norms."""
    if mode not in MODES:
        raise OptionError(f"calibrate got mode={mode!r}. {nearest(str(mode), MODES)}")
    if together and mode != "progressive":
        raise OptionError(f"together=True is for mode='progressive', got mode={mode!r}.")
    return side_by_side if together else MODES[mode]


def _bound(until: float | None) -> float | None:
    if until is not None and not (math.isfinite(until) and until > 0):
        raise OptionError(f"calibrate expects until to be a positive number, got {until!r}.")
    return until
