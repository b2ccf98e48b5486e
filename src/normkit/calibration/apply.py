"""Statistics into the norms of a model: which norms, how mixed with what they have, from a file."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from normkit.calibration.fingerprint import of_weights
from normkit.calibration.result import BufferSnapshot, Calibration, LayerChange
from normkit.calibration.statistics import Statistics
from normkit.errors import NothingToDo, OptionError
from normkit.inspection import select, survey
from normkit.inspection.checks import refuse_lazy, refuse_meta
from normkit.inspection.kinds import layer_of
from normkit.inspection.statistics import MergedMoments, NormStatistics, statistics_of


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
    norms, left = chosen_norms(model, where, frozen)
    matched = _matched(norms, statistics, chosen=where is not None)
    if statistics.weights and statistics.weights != of_weights(model):  # a common mistake
        warnings.warn(
            "The statistics were measured with other weights than the model has, where norms get "
            "other inputs. Do they belong to this checkpoint? nk.diagnose shows how well they fit.",
            stacklevel=2,
        )
    before = BufferSnapshot(norm.norm for norm in matched)
    writer = StatisticsWriter(matched, prior)
    images = max(statistics.images, 1)
    layers = []
    try:
        given = {
            norm: writer.mixed(norm, statistics[norm.path].to(norm.device), images)
            for norm in matched
        }
        for norm, merged in given.items():
            norm.values(merged)  # all fit, or none is written
        for norm, merged in given.items():
            norm.write(merged, batches=1)
            layers.append(writer.change(norm, int(statistics[norm.path].count.min())))
    except BaseException:
        before.restore()
        raise
    left |= {norm.path: "no statistics for it" for norm in norms if norm not in given}
    return Calibration(model, tuple(layers), statistics, before, what="given statistics", left=left)


def chosen_norms(
    model: nn.Module, where: Any = None, frozen: bool = False
) -> tuple[list[NormStatistics], dict[str, str]]:
    """The norms with running statistics that ``where`` chooses, and by path why others are not.

    None at all is an error. Norms that keep no statistics need no reason.
    """
    sites = survey(model)
    if not len(sites):
        raise NothingToDo(f"{type(model).__name__} has no normalization layers to calibrate.")
    refuse_lazy(model)
    refuse_meta(model)
    norms, left = [], {}
    for site in select(sites, where):
        norm = statistics_of(site.path, site.norm, site.kind) if site.tracked else None
        if norm is None and site.tracked:
            left[site.path] = f"statistics of an unknown form ({site.class_name})"
        elif norm is not None and site.frozen and not frozen:
            left[site.path] = "frozen; frozen=True includes it"
        elif norm is not None:
            norms.append(norm)
    if not norms:
        reasons = "; ".join(f"{path}: {why}" for path, why in list(left.items())[:3])
        raise NothingToDo(
            f"{type(model).__name__} has no running statistics to calibrate"
            f"{f' ({reasons})' if reasons else ''}. Norms such as gn or ln keep none."
        )
    return norms, left


class StatisticsWriter:
    """Writes statistics as if ``prior`` images had given those of the start.

    Prior and measured values are merged like any two sets of data. So the variance of the mixture
    contains how far the two means are apart, which a mixture of variances would leave out.
    """

    def __init__(self, norms: Sequence[NormStatistics], prior: float = 0.0) -> None:
        self.prior = prior
        self.start: dict[NormStatistics, tuple[Tensor, Tensor]] = {n: n.held() for n in norms}

    def mixed(self, norm: NormStatistics, merged: MergedMoments, images: float) -> MergedMoments:
        """Statistics of so many images, with the prior in them."""
        if not self.prior:
            return merged
        before = merged.count * (self.prior / images)  # as many values an image as were measured
        return MergedMoments.from_variance(before, *self.start[norm]).merged(merged)

    def change(
        self, norm: NormStatistics, values: int, errors: Tensor | None = None
    ) -> LayerChange:
        """What has become of a norm since the start."""
        (old_mean, old_var), (mean, var) = self.start[norm], norm.held()
        old, new = (old_mean.cpu(), old_var.cpu()), (mean.cpu(), var.cpu())
        return LayerChange(norm.path, norm.kind, values, old, new, errors, norm.eps)


def _matched(
    norms: Sequence[NormStatistics], statistics: Statistics, chosen: bool
) -> list[NormStatistics]:
    """The norms that the statistics are for; an error if one of them is missing or another kind."""
    paths = [norm.path for norm in norms]
    missing = [path for path in statistics if path not in paths]
    if missing and not chosen:
        raise OptionError(
            f"The statistics are of a norm {missing[0]!r} that the model does not have, or that is "
            f"frozen; so are {len(missing)} of {len(statistics)}. The model has "
            f"{', '.join(paths[:3])}, ..."
        )
    matched = [norm for norm in norms if norm.path in statistics]
    if not matched:
        raise OptionError("The statistics are of none of the norms that were chosen.")
    for norm in matched:
        kind = statistics.kinds[norm.path]
        layers = layer_of(kind), layer_of(norm.kind)
        alike = all(layer is not None and layer.plain_statistics for layer in layers)
        if kind != norm.kind and not alike:
            raise OptionError(
                f"{norm.path} is {norm.kind} in the model, the statistics are of {kind}."
            )
    return matched
