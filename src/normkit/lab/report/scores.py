"""What each variant's seeds gave, and the cells of an experiment as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from normkit.errors import UnknownName, nearest
from normkit.lab.experiment import Cell, Experiment, Run, Variant
from normkit.lab.report.figures import VariantStyle, variant_styles
from normkit.lab.report.words import Metric, axis_words, value_words
from normkit.lab.results import COLLAPSED, DIVERGED, DONE, FAILED, Comparison, Result
from normkit.reporting.text import is_finite

VERDICTS = ("better", "worse", "equivalent", "not shown", "unstable")  # as a reader wants them
GridValues = tuple[tuple[Any, str], ...]  # value and word for each axis


@dataclass(frozen=True)
class Scores:
    """One variant in one cell, seed by seed."""

    variant: Variant
    metric: str
    runs: Mapping[int, Run]  # by seed, all that were asked for
    results: Mapping[int, Result]  # by seed, those that there are
    failed: Sequence[int] = ()  # seeds whose run an error has ended

    @cached_property
    def by_seed(self) -> dict[int, float]:
        """The score of every seed that neither diverged nor collapsed."""
        done = {seed: self.results[seed].score(self.metric) for seed in self._that_are(DONE)}
        return {seed: score for seed, score in done.items() if score is not None}

    @cached_property
    def outcomes(self) -> dict[int, str]:
        """DONE, DIVERGED or COLLAPSED for every seed that has a result."""
        return {seed: result.outcome(self.metric) for seed, result in self.results.items()}

    def _that_are(self, *outcomes: str) -> list[int]:
        return [seed for seed, outcome in self.outcomes.items() if outcome in outcomes]

    @cached_property
    def diverged(self) -> list[int]:
        """Seeds without a score: a loss that is infinite in the end is a divergence, too."""
        return self._that_are(DIVERGED)

    @cached_property
    def collapsed(self) -> list[int]:
        return self._that_are(COLLAPSED)

    @property
    def ended(self) -> list[int]:
        """Seeds whose result is that they diverged or collapsed."""
        return self._that_are(DIVERGED, COLLAPSED)

    @property
    def lost(self) -> list[int]:
        """Seeds that gave no score and will not."""
        return [*self.ended, *self.failed]

    @property
    def losses(self) -> tuple[tuple[str, Sequence[int]], ...]:
        return (DIVERGED, self.diverged), (COLLAPSED, self.collapsed), (FAILED, self.failed)

    @property
    def tried(self) -> int:
        """How many seeds came to an end, good or bad."""
        return len(self.results) + len(self.failed)

    @cached_property
    def missing(self) -> list[int]:
        return [seed for seed in self.runs if seed not in self.results]

    @property
    def done(self) -> list[Result]:
        return [result for seed, result in self.results.items() if seed in self.by_seed]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def std(self) -> float | None:
        return deviation(list(self.by_seed.values()))


class Scoreboard:
    """The scores of all variants in all cells, and how variants and scores are shown."""

    def __init__(
        self,
        experiment: Experiment,
        results: Mapping[str, Result],
        failures: Collection[str] = (),
    ) -> None:
        self.experiment = experiment
        self.metric = Metric(experiment.metric, experiment.metrics[experiment.metric])
        self.cells = experiment.cells()
        self.axes = axes_of(self.cells)
        self._scores: dict[tuple[str, Cell], Scores] = {}
        for variant in experiment.variants:
            runs = {run.seed: run for run in variant.runs(experiment.seeds)}
            there = {seed: results[run.id] for seed, run in runs.items() if run.id in results}
            failed = [s for s, run in runs.items() if s not in there and run.id in failures]
            self._scores[variant.name, variant.cell] = Scores(
                variant, experiment.metric, runs, there, failed
            )

    def __iter__(self) -> Iterator[Scores]:
        return iter(self._scores.values())

    def get(self, name: str, cell: Cell) -> Scores | None:
        return self._scores.get((name, cell))

    def baseline(self, cell: Cell) -> Scores | None:
        return self.get(self.experiment.baseline, cell)

    def names(self) -> list[str]:
        """Variants in the order of the file, the baseline first."""
        names = dict.fromkeys([self.experiment.baseline])
        names.update(dict.fromkeys(name for name, _ in self._scores))
        return list(names)

    @cached_property
    def styles(self) -> dict[str, VariantStyle]:
        return variant_styles(self.names())

    def in_cell(self, cell: Cell) -> list[Scores]:
        scores = (self.get(name, cell) for name in self.names())
        return [each for each in scores if each is not None]

    def grid_values(self, cell: Cell) -> GridValues:
        """Where a cell is on the grid, for the columns of a table."""
        values = dict(cell)
        return tuple((values.get(axis), value_words(values.get(axis))) for axis in self.axes)

    def differences(self, scores: Scores) -> dict[int, float]:
        """By seed, against the baseline of the cell; positive is better."""
        base = self.baseline(scores.variant.cell)
        if base is None:
            return {}
        sign = 1 if self.experiment.higher_is_better else -1
        shared = [seed for seed in scores.by_seed if seed in base.by_seed]
        return {seed: sign * (scores.by_seed[seed] - base.by_seed[seed]) for seed in shared}

    @cached_property
    def counts(self) -> dict[str, int]:
        """Of distinct runs: how many were asked for, are there, were lost, are missing.

        A run that failed is lost, and missing as well.
        """
        states: dict[str, str] = {}
        for scores in self:
            for seed, run in scores.runs.items():
                states[run.id] = scores.outcomes.get(
                    seed, FAILED if seed in scores.failed else "missing"
                )
        count = list(states.values()).count
        missing = count("missing") + count(FAILED)
        return {
            "all": len(states),
            "finished": len(states) - missing,
            "diverged": count(DIVERGED),
            "collapsed": count(COLLAPSED),
            "failed": count(FAILED),
            "lost": count(DIVERGED) + count(COLLAPSED) + count(FAILED),
            "missing": missing,
        }

    def failures(self) -> set[str]:
        """The ids of runs that failed and have no result of a later try."""
        return {scores.runs[seed].id for scores in self for seed in scores.failed}

    def all_results(self) -> list[Result]:
        """Every result once, although two variants may share a run."""
        return list({r.run: r for scores in self for r in scores.results.values()}.values())


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds, with n − 1; None for a single one."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)  # statistics.stdev is exact, and much slower
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def average(values: Sequence[float | None]) -> float | None:
    """Mean of what is finite; None where nothing is."""
    finite = [value for value in values if is_finite(value)]
    return statistics.fmean(finite) if finite else None


def ranked(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Better first, and within a verdict the largest difference first."""
    return sorted(
        comparisons,
        key=lambda c: (
            VERDICTS.index(c.verdict) if c.verdict in VERDICTS else len(VERDICTS),
            -(c.difference if is_finite(c.difference) else -math.inf),
        ),
    )


def verdict_of(c: Comparison) -> str:
    """The verdict, or that there is none because no seed was left to compare."""
    if c.lost and not c.pairs:
        return next(word for word, count in c.losses if count)
    return c.verdict


@dataclass(frozen=True)
class Arrangement:
    """Columns along one axis, and a group of rows for every point of the other axes."""

    axis: str | None  # of the columns; None where there is no grid
    columns: tuple[Any, ...]
    groups: tuple[Cell, ...]
    cells: tuple[Cell, ...]

    def cell(self, group: Cell, column: Any) -> Cell | None:
        """The cell in a place, or None where the grid has a hole."""
        wanted = dict(group) if self.axis is None else {**dict(group), self.axis: column}
        return next((cell for cell in self.cells if dict(cell) == wanted), None)

    @property
    def title(self) -> str:
        return "" if self.axis is None else axis_words(self.axis)

    def heads(self) -> list[str]:
        return [value_words(column) for column in self.columns]


def arrange(cells: Sequence[Cell], columns: str | None = None) -> Arrangement:
    """A table of the cells; across goes the axis of numbers that has the most values.

    >>> table = arrange([(("model.name", "a"), ("train.batch", b)) for b in (2, 64)])
    >>> table.axis, table.columns, table.groups
    ('train.batch', (2, 64), ((('model.name', 'a'),),))
    """
    axes = axes_of(cells)
    if columns is not None and columns not in axes:
        raise UnknownName(f"The grid has no axis {columns!r}. {nearest(columns, axes)}")
    if not axes:
        return Arrangement(None, (None,), ((),), tuple(cells))
    if columns is None:
        numeric = [path for path, values in axes.items() if is_numeric(values)]
        columns = max(numeric or axes, key=lambda path: len(axes[path]))
    others = (tuple((path, value) for path, value in cell if path != columns) for cell in cells)
    return Arrangement(columns, tuple(axes[columns]), tuple(dict.fromkeys(others)), tuple(cells))


def axes_of(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    """The axes of a grid with their values, in the order of the file."""
    axes: dict[str, list[Any]] = {}
    for cell in cells:
        for path, value in cell:
            values = axes.setdefault(path, [])
            if value not in values:
                values.append(value)
    return axes


def is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
