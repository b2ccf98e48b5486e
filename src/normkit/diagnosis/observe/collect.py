"""Measuring the norms of a model on batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.diagnosis.observe.measurements import MEASURES, Measurements, Record
from normkit.diagnosis.observe.norm_record import NormRecord, watch_norms
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection import Site, select, survey, undisturbed
from normkit.inspection.batches import BatchReader, Forward, explained
from normkit.inspection.checks import refuse_lazy
from normkit.inspection.run import progressive, watch_inputs
from normkit.inspection.statistics import (
    MomentsAccumulator,
    NormStatistics,
    channel_moments,
    pooled_statistics_of,
    running_moments,
)

Progress = Callable[[int, int], None]  # what is done, of how much
MODES = ("eval", "progressive")
SAMPLES = 32  # that the condensation score looks at, as in the figures of ubn


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    measures: Iterable[str] | None = None,
    mode: str = "eval",
    where: Any = None,
    max_batches: int | None = None,
    samples: int = SAMPLES,
    start: Mapping[str, Tensor] | None = None,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> Measurements:
    """What the norms of a model are given and give, measured in eval mode. Changes nothing.

    ``batches`` are tensors, pairs (inputs, target) or mappings of keyword arguments, or anything
    with ``forward(model, batch)``; ``measures`` some of ``MEASURES``, all by default; ``where``
    chooses norms as ``select`` does. ``start``, a state_dict of the untrained model, is what drift
    is measured from. ``mode="progressive"`` gives every norm the exact statistics of its own input
    before those above it are measured: the ESM of a layer is then its own, without what comes from
    below. That takes a pass for each norm with running statistics, so an iterator is not enough.
    """
    wanted = wanted_measures(measures)
    if mode not in MODES:
        raise OptionError(f"Unknown mode {mode!r}. {nearest(mode, MODES)}")
    if mode == "progressive" and iter(batches) is batches:
        raise OptionError(
            'mode="progressive" goes through the batches several times, got an iterator. '
            "Try list(batches), or the DataLoader itself."
        )
    sites = norms_of(model, where)
    reader = BatchReader(model, batches, forward, max_batches=max_batches)
    kept = {site.path: running_moments(site.norm) for site in sites}
    result, sizes = Measurements([], ()), []
    with undisturbed(model), ExitStack() as stack:
        if mode == "progressive":
            _progressive(reader, sites, progress)
        norms: dict[str, NormRecord] = {}
        for number, batch in enumerate(reader, 1):
            if number == 1:
                with explained(batch.inputs, number):  # which activation follows which norm is seen
                    seen = survey(model, batch.inputs)
                norms = stack.enter_context(
                    watch_norms(
                        model,
                        [seen[site.path] for site in sites],
                        lambda site, act: NormRecord(site, act, wanted, samples),
                    )
                )
            reader.run(batch, number)
            sizes.append(batch.size)
        for norm in norms.values():
            _add(result, norm, kept[norm.site.path], wanted, start)
    return replace(result, batch_sizes=tuple(sizes))


def wanted_measures(measures: Iterable[str] | None) -> frozenset[str]:
    """The names asked for; an unknown one is an error."""
    if measures is None:
        return frozenset(MEASURES)
    names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        if name not in MEASURES:
            raise OptionError(f"Unknown measure {name!r}. {nearest(str(name), MEASURES)}")
    return frozenset(names)


def norms_of(model: nn.Module, where: Any = None) -> tuple[Site, ...]:
    """The norms of a model that can be run, and those chosen; none at all is an error."""
    surveyed = survey(model)
    refuse_lazy(model)
    if not len(surveyed):
        raise NothingToDo(
            f"{surveyed.title} has no norms, or computes them without a module, where nobody can "
            "see them. Print survey(model) to see what is found."
        )
    return select(surveyed, where)


def _add(
    result: Measurements,
    norm: NormRecord,
    running: Moments | None,
    wanted: frozenset[str],
    start: Mapping[str, Tensor] | None,
) -> None:
    """Put what was recorded about a norm into the table."""
    path, inputs, expected = norm.site.path, norm.channels.total, norm.expected.total
    if inputs is None:
        return
    measures = norm.measures(running, start)
    result.calls[path], result.inputs[path] = norm.calls, _cpu(inputs)
    if running is not None and expected is not None:
        result.running[path], result.expected[path] = _cpu(running), _cpu(expected)
    if norm.matrix is not None:
        result.matrices[path] = norm.matrix
    result.channels[path] = {name: value.cpu() for name, value in measures.channels.items()}
    numbers = measures.numbers.items()
    result.records.extend(Record(path, name, float(v)) for name, v in numbers if name in wanted)
    result.refused[path] = {name: why for name, why in measures.refused.items() if name in wanted}


def _cpu(moments: Moments) -> Moments:
    count = moments.count.cpu() if isinstance(moments.count, Tensor) else moments.count
    return Moments(moments.mean.cpu(), moments.var.cpu(), count)


def _progressive(
    reader: BatchReader, sites: tuple[Site, ...], progress: Progress | None = None
) -> None:
    """Give each norm the statistics of all its inputs, in the order in which norms run."""
    kept = [pooled_statistics_of(site.norm, site.kind) for site in sites]
    norms = [statistics for statistics in kept if statistics is not None]

    def measure(norm: NormStatistics, stop_at: nn.Module | None) -> bool:
        inputs = MomentsAccumulator()
        listener = {norm.norm: lambda x: inputs.add(norm.pooled(channel_moments(x), x))}
        with watch_inputs(listener, stop_at):
            for number, batch in enumerate(reader, 1):
                reader.run(batch, number)
        if inputs.total is not None:
            norm.put(inputs.total)
        return inputs.total is not None

    done = 0
    for done, _ in enumerate(progressive(reader, norms, measure)):
        if progress is not None:
            progress(done, len(norms))
    if progress is not None:
        progress(len(norms), len(norms))
