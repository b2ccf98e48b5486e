"""Measuring the norms of a model on batches, into a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.diagnosis.observe.norm_record import NormRecord, watch_norms
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection import Site, select, survey, undisturbed
from normkit.inspection.batches import BatchReader, Forward, explained
from normkit.inspection.checks import refuse_lazy
from normkit.inspection.run import progressive, watch_inputs
from normkit.inspection.statistics import (
    MomentsAccumulator,
    NormStatistics,
    pooled_statistics_of,
    running_moments,
)

Progress = Callable[[int, int], None]  # what is done, of how much
MODES = ("eval", "progressive")
SAMPLES = 32  # that the condensation score looks at, as in the figures of ubn
MEASURES = {
    "esm_mean": "estimation shift magnitude of the means",
    "esm_std": "estimation shift magnitude of the standard deviations",
    "output_error": "mean square of what wrong statistics add to x̂, 1 being the signal",
    "stat_diff": "StatDiff of the channels that are normalized together, mean over the groups",
    "under_represented": "share of channels that their group drowns",
    "gradient_factor": "|γ| / √(σ² + ε), mean over the channels",
    "beyond_6": "share of |x̂| > 6",
    "dead": "share of channels that the activation never lets pass",
    "saturated": "share of channels that are at the bounds of the activation throughout",
    "gate_saturation": "share of gates below 0.05 or above 0.95",
    "frozen": "1 if a layer with a threshold is a fixed map at present",
    "frozen_share": "share of such layers that are; of the model, whose path is empty",
    "score": "running condensation score that the threshold is compared with",
    "condensation": "mean cosine between the samples of a batch",
    "condensation_matrix": "the cosines themselves: in ``matrices``, not in the table",
    "weight_drift": "root mean square of weight − start",
    "bias_drift": "root mean square of bias − start",
}


class Record(NamedTuple):
    """One number: which layer, which measure, how much."""

    path: str
    measure: str
    value: float


@dataclass(frozen=True, eq=False)
class Measurements:
    """A table layer × measure × value, layers in the order in which they run.

    ``value("layer1.0.bn1", "esm_mean")`` is one entry, ``by_layer("dead")`` a column. Beside the
    table: exact statistics of what each layer got, running ones, and values per channel. A measure
    that a layer has not is refused: ``why_not(path, measure)`` says why.
    """

    records: list[Record]
    batch_sizes: tuple[int, ...]
    inputs: dict[str, Moments] = field(default_factory=dict)  # (1, C), float64, per channel
    expected: dict[str, Moments] = field(default_factory=dict)  # (1, K), as the layer keeps them
    running: dict[str, Moments] = field(default_factory=dict)  # (1, K)
    channels: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # (C,) on the CPU
    matrices: dict[str, Tensor] = field(default_factory=dict)  # cosines between samples
    calls: dict[str, int] = field(default_factory=dict)  # how often a layer ran, in all
    refused: dict[str, dict[str, str]] = field(default_factory=dict)  # reasons by path and measure

    @property
    def paths(self) -> tuple[str, ...]:
        """The layers that ran, in the order of their first call."""
        return tuple(self.calls)

    @property
    def samples(self) -> int:
        return sum(self.batch_sizes)

    @property
    def frozen_share(self) -> float | None:
        """The share of layers with a threshold that are a fixed map; None without such layers."""
        frozen = self.by_layer("frozen").values()
        return sum(frozen) / len(frozen) if frozen else None

    def value(self, path: str, measure: str) -> float | None:
        """One entry; None if the measure has no meaning for the layer: see ``why_not``."""
        return self._table.get((path, measure))

    def why_not(self, path: str, measure: str) -> str | None:
        """Why a layer has no value of a measure, such as "it has no gate"; None if it has one."""
        return self.refused.get(path, {}).get(measure)

    def by_layer(self, measure: str) -> dict[str, float]:
        """One measure for all layers that have it."""
        return {r.path: r.value for r in self.records if r.measure == measure}

    def by_measure(self, path: str) -> dict[str, float]:
        """All measures of one layer."""
        return {r.measure: r.value for r in self.records if r.path == path}

    def to_rows(self) -> list[dict[str, Any]]:
        """One dictionary a number."""
        return [record._asdict() for record in self.records]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def _table(self) -> dict[tuple[str, str], float]:
        return {(r.path, r.measure): r.value for r in self.records}

    def __repr__(self) -> str:
        return f"<Measurements of {len(self.paths)} norms on {self.samples} samples>"


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


def wanted_measures(
    measures: Iterable[str] | None, usual: Iterable[str] = MEASURES, others: Iterable[str] = ()
) -> frozenset[str]:
    """The names asked for, the usual ones by default; any that is not possible is an error."""
    possible = (*usual, *others)
    names = usual if measures is None else [measures] if isinstance(measures, str) else measures
    for name in (names := list(names)):
        if name not in possible:
            why = "cannot be observed" if name in MEASURES else "is unknown"
            raise OptionError(f"The measure {name!r} {why}. {nearest(str(name), possible)}")
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
        listener = {norm.norm: lambda x: inputs.add(norm.table(x).pooled(samples=None))}
        with watch_inputs(listener, stop_at):
            for number, batch in enumerate(reader, 1):
                reader.run(batch, number)
        if inputs.total is not None:
            norm.put(inputs.total)
        return inputs.total is not None

    report = progress or (lambda done, total: None)
    for done, _ in enumerate(progressive(reader, norms, measure)):
        report(done, len(norms))
    report(len(norms), len(norms))
