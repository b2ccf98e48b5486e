"""Statistics from elsewhere into a model."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normkit.calibration.fingerprint import of_weights
from normkit.calibration.result import Calibration, LayerChange
from normkit.calibration.snapshot import Snapshot
from normkit.calibration.statistics import Statistics
from normkit.calibration.subjects import subjects_of
from normkit.calibration.writing import Writer
from normkit.errors import OptionError
from normkit.inspection.keepers import Keeper

# kinds whose statistics are the same: those of each channel of the input
PLAIN = {
    *("bn", "sync_bn", "split_bn", "iabn", "frozen_bn", "input_norm", "ghost_bn", "shifted_bn"),
    *("bnet", "iebn", "bcn", "gbgn", "batch_renorm", "dn"),
}


def apply_statistics(
    model: nn.Module,
    statistics: Statistics,
    *,
    where: Any = None,
    prior: float = 0.0,
    frozen: bool = False,
) -> Calibration:
    """Write statistics, such as those of a file or of several merged, into a model.

    Every norm that has statistics must be in the model with the same kind and size; norms of the
    model without any stay as they are. With ``prior`` they are mixed with those that the model
    has, as if these came from so many images. Statistics that were measured with other weights are
    a warning. Returns a Calibration, whose undo() takes it back.
    """
    subjects = subjects_of(model, where, frozen)
    matched = _matched(subjects.keepers, statistics, chosen=where is not None)
    _warn_of_others(model, statistics)
    before = Snapshot(keeper.norm for keeper in matched)
    writer = Writer(matched, prior)
    images = max(statistics.images, 1)
    layers = []
    try:
        tallies = {
            keeper: writer.mixed(keeper, statistics[keeper.path].to(_device(keeper)), images)
            for keeper in matched
        }
        for keeper, tally in tallies.items():
            keeper.checked(tally)
        for keeper, tally in tallies.items():
            keeper.write(tally, batches=1)
            old = writer.start[keeper][0].cpu(), writer.start[keeper][1].cpu()
            new = [t.detach().cpu().clone() for t in keeper.held()]
            values = int(statistics[keeper.path].count.min())
            change = LayerChange(keeper.path, keeper.kind, values, old, (new[0], new[1]))
            layers.append(replace(change, eps=keeper.eps))
    except BaseException:
        before.restore()
        raise
    without = {k.path: "no statistics for it" for k in subjects.keepers if k not in tallies}
    return Calibration(
        model,
        tuple(layers),
        statistics,
        before,
        what="given statistics",
        left={**subjects.left, **without},
    )


def _warn_of_others(model: nn.Module, statistics: Statistics) -> None:
    """Statistics belong to the weights they were measured with: old ones are a common mistake."""
    if statistics.weights and statistics.weights != of_weights(model):
        warnings.warn(
            "The statistics were measured with other weights than the model has, where norms get "
            "other inputs. Do they belong to this checkpoint? nk.diagnose shows how well they fit.",
            stacklevel=3,
        )


def _matched(
    keepers: tuple[Keeper, ...], statistics: Statistics, chosen: bool
) -> tuple[Keeper, ...]:
    """The norms that the statistics are for; an error if one of them is missing or another kind."""
    known = {keeper.path: keeper for keeper in keepers}
    missing = [path for path in statistics if path not in known]
    if missing and not chosen:
        raise OptionError(
            f"The statistics are of a norm {missing[0]!r} that the model does not have, or that is "
            f"frozen; so are {len(missing)} of {len(statistics)}. The model has "
            f"{', '.join(list(known)[:3])}, ..."
        )
    matched = tuple(keeper for keeper in keepers if keeper.path in statistics)
    if not matched:
        raise OptionError("The statistics are of none of the norms that were chosen.")
    for keeper in matched:
        kind = statistics.kinds[keeper.path]
        if kind != keeper.kind and not {kind, keeper.kind} <= PLAIN:
            raise OptionError(
                f"{keeper.path} is {keeper.kind} in the model, the statistics are of {kind}."
            )
    return matched


def _device(keeper: Keeper) -> torch.device:
    return next(iter(keeper.buffers.values())).device
