"""calibrate and measure: running statistics that are those of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, distributed, nn

from normkit.calibration.apply import StatisticsWriter, chosen_norms
from normkit.calibration.fingerprint import of_state, of_weights
from normkit.calibration.measuring import InputStatistics, Measurement
from normkit.calibration.result import BufferSnapshot, Calibration, LayerChange
from normkit.calibration.statistics import Statistics, StatisticsSource
from normkit.core.processes import Processes
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection import undisturbed
from normkit.inspection.batches import BatchReader, Forward
from normkit.layers.domain_in_use import unseen_domains, use_domain

Metric = Callable[[nn.Module], float]
MODES = ("progressive", "layerwise")  # methods of Measurement


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
    domain: int | None = None,
    all_processes: bool = False,
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
        domain               whose statistics, of layers with several sets; without it, of the one
                             in use. ``calibrate_domains`` does all of them.
        all_processes        the batches are this process's part, as of a DistributedSampler: all
                             processes call this, and get the statistics of all parts together.
                             ``images`` is then of all of them; standard errors are of the part.

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
    norms, left = chosen_norms(model, where, frozen)
    if until is not None and not (math.isfinite(until) and until > 0):
        raise OptionError(f"calibrate expects until to be a positive number, got {until!r}.")
    processes = _all_processes(until, together) if all_processes else None
    if processes is not None and images is not None:
        images = max(1, -(-images // processes.size))
    with nullcontext() if domain is None else use_domain(model, domain):
        return change_statistics(
            Measurement(reader_of(model, batches, forward, images), norms, until, processes),
            left,
            mode=mode,
            together=together,
            metric=metric,
            higher_is_better=higher_is_better,
            note=note,
        )


def _all_processes(until: float | None, together: bool) -> Processes | None:
    """Those of torch.distributed; None if this one is alone."""
    if until is not None or together:
        raise OptionError(
            "all_processes=True goes through the batches norm by norm, on every process as often: "
            "without until= and together=."
        )
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    processes = Processes.of(distributed.group.WORLD)
    return processes if processes.size > 1 else None


def measure(
    model: nn.Module,
    batches: Any,
    *,
    where: Any = None,
    images: int | None = None,
    forward: Forward | None = None,
    frozen: bool = False,
    note: str = "",
) -> Statistics:
    """The statistics of what the norms of a model get, as ``calibrate(mode="layerwise")`` would
    write them; but nothing is written.

    For parts of data that are brought together later, from workers, days or clients: measure each
    on the same model, merge, and ``apply_statistics``. One image is enough for a part.

    >>> import torch, normkit as nk
    >>> layer = torch.nn.BatchNorm1d(1)
    >>> parts = [nk.measure(layer, torch.tensor(part)) for part in ([[1.0], [2.0]], [[6.0]])]
    >>> done = nk.apply_statistics(layer, parts[0].merge(parts[1]))
    >>> layer.running_mean.item(), layer.running_var.item()
    (3.0, 7.0)
    """
    norms, _ = chosen_norms(model, where, frozen)
    measurement = Measurement(reader_of(model, batches, forward, images), norms)
    with unseen_domains(model):
        measured = measurement.one_pass(norms)
    if not any(one.merged is not None for one in measured):
        raise NothingToDo("No batch reached a norm with finite values: nothing to measure.")
    state = of_state(model.state_dict().items())
    return _statistics(measurement, measured, note, "layerwise", state)


def reader_of(
    model: nn.Module, batches: Any, forward: Forward | None, images: int | None
) -> BatchReader:
    """The batches, up to so many images. A tensor or mapping alone is one batch."""
    several = [batches] if isinstance(batches, Tensor | Mapping) else batches
    return BatchReader(model, several, forward, max_samples=images)


def check_mode(mode: str, together: bool) -> None:
    if mode not in MODES:
        raise OptionError(f"calibrate got mode={mode!r}. {nearest(str(mode), MODES)}")
    if together and mode != "progressive":
        raise OptionError(f"together=True is for mode='progressive', got mode={mode!r}.")


def change_statistics(
    measurement: Measurement,
    left: dict[str, str],
    *,
    mode: str,
    together: bool = False,
    prior: float = 0.0,
    metric: Metric | None = None,
    higher_is_better: bool = True,
    note: str = "",
    what: str = "calibrated",
    check: Callable[[Sequence[InputStatistics], Sequence[LayerChange]], str | None] | None = None,
) -> Calibration:
    """Measure, write, judge: what calibrate and adapt share. If anything fails, nothing changes.

    ``check`` looks at what was measured and what has changed, norm by norm, and gives a reason to
    take it back, or None.
    """
    check_mode(mode, together)
    model, until = measurement.reader.model, measurement.until
    before = BufferSnapshot(norm.norm for norm in measurement.norms)
    writer = StatisticsWriter(measurement.norms, prior)

    def write(one: InputStatistics) -> None:
        assert one.merged is not None
        one.norm.write(writer.mixed(one.norm, one.merged, one.images), one.calls)

    # what merging has to know; progressive statistics have changed what they depend on
    state = of_state(model.state_dict().items()) if mode == "layerwise" else ""
    try:
        first = None if metric is None else score(model, metric)
        with unseen_domains(model):
            measured = getattr(measurement, "together" if together else mode)(write)
        done = [one for one in measured if one.merged is not None]
        if not done:
            raise NothingToDo(
                "No batch reached a norm with finite values, so there is nothing to calibrate."
            )
        missed = {one.norm.path: "no batch reached it" for one in measured if one.merged is None}
        layers = tuple(
            writer.change(one.norm, int(one.merged.count.min()), one.uncertainty().cpu())
            for one in done
            if one.merged is not None
        )
        result = Calibration(
            model,
            layers,
            _statistics(measurement, done, note, mode, state),
            before,
            what=what,
            images=max(one.images for one in done),
            batches=max(one.batches for one in done),
            mode=mode,
            until=until,
            left={**left, **missed},
            unsettled=tuple(one.norm.path for one in done if not one.settled),
        )
        if until is not None:
            result.sure = all(x.error is not None and x.error <= until for x in layers)
        last = None if metric is None else score(model, metric)
        reason = check(done, layers) if check is not None else None
    except BaseException:
        before.restore()
        raise
    if first is not None and last is not None:
        result.metric = (first, last)
        reason = reason or _became_worse(first, last, higher_is_better)
    if reason:
        result.why_not = reason
        result.undo()
    return result


def score(model: nn.Module, metric: Metric) -> float:
    """The metric of the model in eval mode; with the same random numbers each time."""
    with undisturbed(model):
        value = metric(model)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"Expected the metric to give a number, got {type(value).__name__}."
        ) from error


def _became_worse(before: float, after: float, higher_is_better: bool) -> str | None:
    """A reason to go back; None if the metric has not become worse."""
    worse = after < before if higher_is_better else after > before
    if math.isnan(after) and not math.isnan(before):
        return "the metric is not a number any more"
    return f"the metric became worse, {before:.6g} to {after:.6g}" if worse else None


def _statistics(
    measurement: Measurement,
    measured: Sequence[InputStatistics],
    note: str,
    mode: str,
    state: str,
) -> Statistics:
    model, data = measurement.reader.model, measurement.fingerprint
    return Statistics(
        {one.norm.path: one.merged for one in measured if one.merged is not None},
        {one.norm.path: one.norm.kind for one in measured if one.merged is not None},
        (StatisticsSource.now(str(data), data.images, note),),
        type(model).__name__,
        mode,
        state,
        of_weights(model),
    )
