"""Two experiments side by side: the settings that differ, and what each has found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from normkit.lab.experiment import Cell, Experiment, Setting, variant_label
from normkit.lab.experiment.fields import flat
from normkit.lab.report.scores import average, deviation
from normkit.lab.report.words import Metric, value_words
from normkit.lab.results import DONE, Result, TaskMetric
from normkit.lab.store import Reader, StoredExperiment
from normkit.reporting.text import is_finite

ALL = "all"  # variants
VariantKey = tuple[str, Cell]


@dataclass(frozen=True)
class Side:
    """One of two experiments, from a file or from a store."""

    name: str
    facts: Mapping[str, Any]  # of the experiment as a whole
    settings: Mapping[VariantKey, Mapping[str, str]]
    runs: Mapping[VariantKey, tuple[str, ...]]  # ids
    metric: Metric
    results: Mapping[str, Result]

    @classmethod
    def of_file(cls, experiment: Experiment, store: Reader | None) -> Side:
        kept = StoredExperiment.of(experiment)
        contents = {
            run.id: run.content()
            for variant in experiment.variants
            for run in variant.runs(experiment.seeds[:1])
        }
        results = {} if store is None else store.results(run.id for run in experiment.runs())
        return cls._of(kept, contents, results)

    @classmethod
    def of_store(cls, stored: StoredExperiment, store: Reader) -> Side:
        ids = [run for variant in stored.variants for run in variant.runs]
        return cls._of(stored, store.contents(ids), store.results(ids))

    @classmethod
    def _of(
        cls,
        kept: StoredExperiment,
        contents: Mapping[str, Mapping[str, Any]],
        results: Mapping[str, Result],
    ) -> Side:
        names = ("title", "scale", "metric", "baseline", "seeds")
        facts = {name: getattr(kept, name) for name in names}
        settings = {}
        for each in kept.variants:
            content = next((contents[run] for run in each.runs if run in contents), {})
            settings[each.name, each.cell] = setting_words(content.get("setting", {}))
        runs = {(each.name, each.cell): each.runs for each in kept.variants}
        about = TaskMetric(kept.higher_is_better, kept.percent)
        return cls(kept.name, facts, settings, runs, Metric(kept.metric, about), results)

    def scores(self, key: VariantKey, metric: str) -> SideScores:
        results = [self.results[run] for run in self.runs.get(key, ()) if run in self.results]
        done = [each.score(metric) for each in results if each.outcome(metric) == DONE]
        return SideScores([s for s in done if is_finite(s)], len(results) - len(done))


class SideScores(NamedTuple):
    """The scores of a variant's seeds, and how many runs diverged or collapsed."""

    values: list[float]
    lost: int

    @property
    def mean(self) -> float | None:
        return average(self.values)

    @property
    def std(self) -> float | None:
        return deviation(self.values)


class Differing(NamedTuple):
    variant: str
    key: str
    first: str
    second: str


class ScoreRow(NamedTuple):
    variant: str
    first: SideScores
    second: SideScores
    difference: float | None  # positive: the second is better
    shared: int  # runs that are the same in both


def differing(first: Side, second: Side) -> list[Differing]:
    """Keys of the experiments and of their variants that are not the same."""
    rows = [
        Differing("", key, value_words(value), value_words(second.facts[key]))
        for key, value in first.facts.items()
        if value != second.facts[key]
    ]
    common = [key for key in first.settings if key in second.settings]
    by_key: dict[tuple[str, str, str], list[str]] = {}
    for key in common:
        mine, other = first.settings[key], second.settings[key]
        for name in dict.fromkeys([*mine, *other]):
            values = mine.get(name, "none"), other.get(name, "none")
            if values[0] != values[1]:
                by_key.setdefault((name, *values), []).append(variant_label(*key))
    for (name, a, b), variants in sorted(by_key.items()):
        whole = len(variants) == len(common) > 1
        rows += [Differing(each, name, a, b) for each in ([ALL] if whole else variants)]
    return rows


def only_in(first: Side, second: Side) -> list[str]:
    """Variants that the other does not have."""
    return [variant_label(*key) for key in first.settings if key not in second.settings]


def score_rows(first: Side, second: Side) -> Iterator[ScoreRow]:
    """What each variant came to in both, by the first one's metric."""
    metric = first.metric.name
    sign = 1 if first.metric.about.higher_is_better else -1
    for key in dict.fromkeys([*first.runs, *second.runs]):
        a, b = first.scores(key, metric), second.scores(key, metric)
        known = a.mean is not None and b.mean is not None
        difference = sign * (b.mean - a.mean) if known else None  # type: ignore[operator]
        shared = len(set(first.runs.get(key, ())) & set(second.runs.get(key, ())))
        yield ScoreRow(variant_label(*key), a, b, difference, shared)


def setting_words(content: Mapping[str, Any]) -> dict[str, str]:
    """A setting by dotted keys, in words; what it does not say has its default."""
    defaults = dataclasses.asdict(Setting())
    values: dict[str, str] = {}
    for table in (defaults, content):
        for key, value, _ in flat({k: v for k, v in table.items() if k != "steps"}):
            values[key] = value_words(_sorted(value))
    steps = content.get("steps", ())
    values["steps"] = "; ".join(map(_step_words, steps)) or "none"
    return values


def _sorted(value: Any) -> Any:
    """The same whatever order a file or a store has its keys in."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(each) for each in value] if isinstance(value, list | tuple) else value


def _step_words(step: Mapping[str, Any]) -> str:
    more = {key: value for key, value in step.items() if key not in ("kind", "name")}
    return f"{step['kind']} {step['name']}" + (f" ({value_words(_sorted(more))})" if more else "")
