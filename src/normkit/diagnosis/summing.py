"""From what was watched to numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from normkit.core.moments import Moments
from normkit.diagnosis.gating import is_frozen
from normkit.diagnosis.measurements import Measurements, Record
from normkit.diagnosis.measures import gradient_factor, stat_diff, under_represented
from normkit.diagnosis.measures.scale import drift_rms
from normkit.diagnosis.measures.shift import esm_and_error, wide
from normkit.diagnosis.standardizing import group_count
from normkit.diagnosis.watching import Watch
from normkit.inspection import Site
from normkit.layers.bcn import BCN
from normkit.layers.ubn import UBN

Number = Tensor | float
WITH_GROUPS = ("gn", "ln", "pn", "rms", "bcn", "bgn", "gbgn")  # channels share statistics
SHARED = (
    "bgn",
    "gbgn",
    "ibn",
    "bcn",
    "sn",
    "ssn",
    "dn",
)  # not divided by their own deviation alone


def summed(
    watches: Iterable[Watch],
    kept: Mapping[str, Moments | None],
    sizes: Iterable[int],
    wanted: frozenset[str],
    start: Mapping[str, Tensor] | None,
) -> Measurements:
    """All measures that were asked for and have a meaning for a layer.

    ``kept`` are the running statistics to judge, from before anything was changed.
    """
    records: list[Record] = []
    found = Measurements(records, tuple(sizes))
    for watch in watches:
        path, got = watch.site.path, watch.channels.total
        if got is None:
            continue
        running, expected = kept[path], watch.expected.total
        numbers, channels = numbers_of(watch, running, start)
        found.calls[path], found.inputs[path] = watch.calls, _cpu(got)
        if running is not None and expected is not None:
            found.running[path], found.expected[path] = _cpu(running), _cpu(expected)
        if watch.matrix is not None:
            found.matrices[path] = watch.matrix
        found.channels[path] = {name: value.cpu() for name, value in channels.items()}
        records += [Record(path, n, float(v)) for n, v in numbers.items() if n in wanted]
    return found


def numbers_of(
    watch: Watch, running: Moments | None, start: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Number], dict[str, Tensor]]:
    """The measures of one layer, scalars on its device, and values per channel."""
    if watch.channels.total is None:
        return {}, {}
    numbers, channels = _of_inputs(watch, watch.channels.total)
    expected = watch.expected.total
    if running is not None and expected is not None and watch.reader is not None:
        stored = watch.reader.stored(expected)  # the variance unbiased where the layer's is
        numbers.update(_of_shift(watch.site, running, stored, channels))
    numbers.update(_of_outputs(watch, channels))
    numbers.update(_of_ubn(watch))
    if start is not None:
        numbers.update(drifts(watch.site, start))
    return numbers, channels


def _of_shift(
    site: Site, running: Moments, expected: Moments, channels: dict[str, Tensor]
) -> dict[str, Tensor]:
    shift, error = esm_and_error(running, expected, site.eps or 0.0)
    channels["output_error"] = error
    return {"esm_mean": shift.mean, "esm_std": shift.std, "output_error": error.mean()}


def _of_inputs(watch: Watch, got: Moments) -> tuple[dict[str, Number], dict[str, Tensor]]:
    """Measures of channel statistics, and those of them that are per channel."""
    site, norm = watch.site, watch.norm
    numbers: dict[str, Number] = {}
    channels = {"mean": got.mean[0], "var": got.var[0]}
    groups = group_count(site, got.mean.shape[1])
    if site.kind in WITH_GROUPS:
        given = got
        if isinstance(norm, BCN):  # the groups are of what its batch norm gives
            given = got.after(norm.running().standardizing(norm.eps).then(norm.weight, norm.bias))
        mean, var = given.mean[0], given.var[0]
        numbers["stat_diff"] = stat_diff(mean, var, groups).mean()
        channels["under_represented"] = under_represented(mean, var, groups)
        numbers["under_represented"] = wide(channels["under_represented"]).mean()
    divisor, weight = shared_variance(site, got, groups), getattr(norm, "weight", None)
    if divisor is not None and (weight is None or weight.shape == divisor.shape):
        factor = gradient_factor(weight, divisor, site.eps or 0.0)
        channels["gradient_factor"] = factor
        numbers["gradient_factor"] = factor.abs().mean()
    return numbers, channels


def shared_variance(site: Site, got: Moments, groups: int) -> Tensor | None:
    """The variance that each channel is divided by, (C,), from that of each channel."""
    size = got.mean.shape[1]
    if site.kind in ("gn", "ln"):
        each = size // groups
        return Moments(got.mean, got.var, 1).pooled(channels=each).var[0].repeat_interleave(each)
    if site.kind == "in" or (site.tracked and site.kind not in SHARED):
        return got.var[0]
    return None


def _of_outputs(watch: Watch, channels: dict[str, Tensor]) -> dict[str, Number]:
    numbers: dict[str, Number] = {}
    if watch.highest is not None:
        channels["dead"] = watch.highest <= 0
        numbers["dead"] = wide(channels["dead"]).mean()
    if watch.at_bounds is not None:
        channels["saturated"] = watch.at_bounds
        numbers["saturated"] = wide(watch.at_bounds).mean()
    for name, share in (("beyond_6", watch.beyond), ("gate_saturation", watch.gates)):
        if share.of:
            numbers[name] = share.sum / share.of
    if watch.condensation is not None:
        numbers["condensation"] = watch.condensation
    return numbers


def _of_ubn(watch: Watch) -> dict[str, Tensor]:
    frozen = is_frozen(watch.norm)
    if frozen is None or not isinstance(watch.norm, UBN):
        return {}
    return {"frozen": wide(frozen), "score": watch.norm.score}


def drifts(site: Site, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far weight and bias are from a state_dict of the start; nothing for names it lacks."""
    found = {}
    for name, parameter in site.module.named_parameters():
        key = f"{site.path}.{name}" if site.path else name
        last = name.rpartition(".")[2]
        if last in ("weight", "bias") and key in start and start[key].shape == parameter.shape:
            found[f"{last}_drift"] = drift_rms(parameter, start[key])
    return found


def _cpu(moments: Moments) -> Moments:
    """Moments on the CPU."""
    count = moments.count.cpu() if isinstance(moments.count, Tensor) else moments.count
    return Moments(moments.mean.cpu(), moments.var.cpu(), count)
