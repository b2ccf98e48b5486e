"""The tables below the charts: costs, published numbers, runs, configuration, environments."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.core.messages import counted
from normkit.lab.experiment import Experiment, Published, Setting
from normkit.lab.report.figures import VariantStyle
from normkit.lab.report.scores import GridValues, Scoreboard, Scores, average, axes_of, verdict_of
from normkit.lab.report.words import at, value_words
from normkit.lab.results import FAILED, Comparison, Result
from normkit.reporting.text import NONE, duration, is_finite, listed, memory, three_digits

NOT_REACHED = "not reached"  # by half of the runs
NOT_RUN = "not run"
# ways of computing, which may change from run to run on one and the same machine
WAYS = {"recorded": "CUDA graph", "side by side": "runs at once on the device"}


@dataclass(frozen=True)
class Amount:
    """A number as it is shown, its length as a bar, and how it compares with the baseline's."""

    value: float | None
    text: str
    share: float = 0.0  # of the largest in the table
    ratio: str = ""


@dataclass(frozen=True)
class CostRow:
    """What a variant costs in a cell: time, memory and parameters, beside the baseline's."""

    style: VariantStyle
    grid_values: GridValues
    amounts: tuple[Amount, ...]


def _epoch_seconds(result: Result) -> float | None:
    trained = [epoch.epoch for epoch in result.epochs if epoch.epoch > 0]
    return result.seconds / max(trained) if trained and is_finite(result.seconds) else None


Measured = Callable[[Result], float | None]
COSTS: tuple[tuple[str, Measured, Callable[[float | None], str]], ...] = (
    ("Time an epoch", _epoch_seconds, duration),
    ("Images a second", lambda result: result.images_per_second, three_digits),
    ("Peak memory", lambda result: result.peak_memory, memory),
    ("Parameters", lambda result: float(result.parameters), lambda value: f"{value or 0:,.0f}"),
)
REACHED = ("Epochs to the baseline's score", "Time to the baseline's score")


def cost_heads(rows: Sequence[CostRow]) -> list[tuple[int, str]]:
    """Those columns in which anything is known, with their places."""
    names = [*(name for name, _, _ in COSTS), *REACHED]
    return [
        (i, name)
        for i, name in enumerate(names)
        if any(row.amounts[i].value is not None for row in rows)
    ]


def cost_rows(board: Scoreboard, comparisons: Sequence[Comparison]) -> list[CostRow]:
    """One row for each variant in each cell that has results."""
    compared = {(c.variant, c.cell): c for c in comparisons}
    in_order = [scores for cell in board.cells for scores in board.in_cell(cell)]
    measured = [(scores, _measured(scores)) for scores in in_order if scores.results]
    most = [
        max((values[i] or 0.0 for _, values in measured), default=0.0) for i in range(len(COSTS))
    ]
    rows = []
    for scores, values in measured:
        name, cell = scores.variant.name, scores.variant.cell
        base = board.baseline(cell)
        usual = _measured(base) if base is not None else [None] * len(COSTS)
        own = base is scores
        amounts = [
            Amount(
                value,
                show(value),
                0.0 if value is None or not top else round(value / top, 4),
                "" if own else _ratio(value, other),
            )
            for value, other, top, (_, _, show) in zip(values, usual, most, COSTS, strict=True)
        ]
        amounts += _reached(compared.get((name, cell)), base, own=own)
        rows.append(CostRow(board.styles[name], board.grid_values(cell), tuple(amounts)))
    return rows


def _measured(scores: Scores) -> list[float | None]:
    results = scores.done or list(scores.results.values())
    return [average([measure(result) for result in results]) for _, measure, _ in COSTS]


def _reached(c: Comparison | None, base: Scores | None, *, own: bool) -> tuple[Amount, Amount]:
    """How soon a variant was as good as the baseline in the end; the baseline's is its end."""
    # the epoch and the second of training from which the baseline's score is: medians
    ends = [
        max(
            (epoch.epoch, epoch.seconds)
            for epoch in result.epochs
            if epoch.epoch in result.selected
        )
        for result in (base.done if base is not None else ())
        if any(epoch.epoch in result.selected for epoch in result.epochs)
    ]
    last = statistics.median(epoch for epoch, _ in ends) if ends else None
    time = statistics.median(seconds for _, seconds in ends) if ends else None
    if own:
        return Amount(last, three_digits(last)), Amount(time, duration(time))
    if c is None or not c.pairs:
        return Amount(None, NONE), Amount(None, NONE)
    epochs, seconds = c.epochs_to_baseline, c.seconds_to_baseline
    if epochs is None:
        return Amount(None, NOT_REACHED), Amount(None, NOT_REACHED)
    return (
        Amount(epochs, three_digits(epochs), ratio=_ratio(epochs, last)),
        Amount(seconds, duration(seconds), ratio=_ratio(seconds, time)),
    )


def _ratio(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return ""
    ratio = value / base
    return "" if abs(ratio - 1) < 0.005 else f"× {ratio:.2f}"


@dataclass(frozen=True)
class PublishedRow:
    """A published number, ours, and how both differ from the baseline's (positive is better)."""

    style: VariantStyle
    grid_values: GridValues
    published: Published
    ours: Scores | None
    their_difference: float | None
    our_difference: float | None
    agree: str  # yes, no, or that ours is not shown


def published_rows(board: Scoreboard, comparisons: Sequence[Comparison]) -> list[PublishedRow]:
    """Numbers that papers print, beside ours."""
    experiment = board.experiment
    sign = 1 if experiment.higher_is_better else -1
    values = {(each.variant, each.cell): each.value for each in experiment.published}
    verdicts = {(c.variant, c.cell): verdict_of(c) for c in comparisons if c.pairs or c.lost}
    rows = []
    for each in experiment.published:
        if each.variant not in board.styles:  # not part of this scale
            continue
        ours = board.get(each.variant, each.cell)
        base = values.get((experiment.baseline, each.cell))
        is_baseline = each.variant == experiment.baseline
        their = None if is_baseline or base is None else sign * (each.value - base)
        differences = {} if is_baseline or ours is None else board.differences(ours)
        verdict = verdicts.get((each.variant, each.cell), "")
        rows.append(
            PublishedRow(
                board.styles[each.variant],
                board.grid_values(each.cell),
                each,
                ours,
                their,
                sum(differences.values()) / len(differences) if differences else None,
                agreement(their, verdict, experiment.equivalence),
            )
        )
    return rows


def agreement(theirs: float | None, verdict: str, margin: float) -> str:
    """Whether our verdict points the way of the published difference.

    A difference that we have not shown confirms nothing, and contradicts nothing.

    >>> agreement(0.02, "better", 0.005), agreement(0.02, "worse", 0.005)
    ('yes', 'no')
    """
    if theirs is None or verdict not in ("better", "worse", "equivalent"):
        return "" if theirs is None else verdict
    if verdict == "equivalent":
        return "yes" if abs(theirs) <= margin else "no"
    return "yes" if theirs != 0 and (theirs > 0) == (verdict == "better") else "no"


@dataclass(frozen=True)
class RunRow:
    """A run with its state: done, diverged, collapsed, failed or not run."""

    style: VariantStyle
    grid_values: GridValues
    seed: int
    state: str
    score: float | None
    result: Result | None
    id: str
    note: str


def run_rows(board: Scoreboard, failures: Mapping[str, str]) -> list[RunRow]:
    rows = []
    for scores in board:
        style = board.styles[scores.variant.name]
        grid_values = board.grid_values(scores.variant.cell)
        for seed, run in scores.runs.items():
            result = scores.results.get(seed)
            failed = failures.get(run.id, "") if result is None else ""
            state = FAILED if failed else NOT_RUN
            note = failed
            if result is not None:
                state = scores.outcomes[seed]
                note = result.note or result.collapse()
            score = scores.by_seed.get(seed)
            rows.append(RunRow(style, grid_values, seed, state, score, result, run.id, note))
    return rows


def missing_runs(board: Scoreboard, failures: Mapping[str, str]) -> list[str]:
    """What was not run, in sentences."""
    sentences = []
    for scores in board:
        reasons = {seed: failures.get(scores.runs[seed].id, "") for seed in scores.missing}
        failed = [seed for seed, reason in reasons.items() if reason]
        not_run = [seed for seed, reason in reasons.items() if not reason]
        for state, seeds in ((FAILED, failed), (NOT_RUN, not_run)):
            if seeds:
                which = f"{'seed' if len(seeds) == 1 else 'seeds'} {listed(seeds, most=20)}"
                if len(seeds) == len(scores.runs):
                    which = "every seed"
                distinct = dict.fromkeys(reasons[seed] for seed in seeds)
                why = f": {listed(distinct, most=3)}" if state == FAILED else ""
                name = scores.variant.name + at(scores.variant.cell)
                sentences.append(f"{name}: {which} {state}{why}")
    return sentences


def lost_runs(board: Scoreboard) -> list[str]:
    """What diverged or collapsed, and what is known of it."""
    sentences = []
    for scores in board:
        for seed in scores.ended:
            result = scores.results[seed]
            why = result.note or result.collapse() or "the score is not finite"
            name = scores.variant.name + at(scores.variant.cell)
            sentences.append(f"{name}, seed {seed}: {why}")
    return sentences


@dataclass(frozen=True)
class SharedSetting:
    key: str
    value: str
    is_default: bool


@dataclass(frozen=True)
class Configuration:
    """Every run's configuration: what all runs share, and in what they differ."""

    shared: tuple[SharedSetting, ...]
    grid: tuple[tuple[str, str], ...]  # axes, and their values
    differing: tuple[str, ...]  # keys, without those that the grid sets
    rows: tuple[tuple[str, tuple[str, ...]], ...]  # variant, and its value for each of these keys


def configuration(experiment: Experiment) -> Configuration:
    """Both tables together hold every field of every setting."""
    flat = [dict(flattened(variant.setting)) for variant in experiment.variants]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    defaults = dict(flattened(Setting()))
    values = {key: [each.get(key) for each in flat] for key in keys}
    same = [key for key in keys if all(value == values[key][0] for value in values[key])]
    axes = axes_of(experiment.cells())
    on_grid = {
        key
        for key in axes
        if key in values
        and [dict(variant.cell).get(key) for variant in experiment.variants] == values[key]
    }
    differing = tuple(key for key in keys if key not in same and key not in on_grid)
    rows = [
        (variant.name, tuple(_setting_words(key, each.get(key)) for key in differing))
        for variant, each in zip(experiment.variants, flat, strict=True)
    ]
    return Configuration(
        tuple(
            SharedSetting(
                key, _setting_words(key, values[key][0]), values[key][0] == defaults.get(key)
            )
            for key in same
        ),
        tuple((key, value_words(on_axis)) for key, on_axis in axes.items()),
        differing,
        tuple(dict.fromkeys(rows)),
    )


def flattened(setting: Setting) -> Iterator[tuple[str, Any]]:
    """("train.lr", 0.1), …; the steps stay together, since their order matters."""
    for part in dataclasses.fields(setting):
        value = getattr(setting, part.name)
        if part.name == "steps":
            yield "steps", value
        else:
            for field in dataclasses.fields(value):
                each = getattr(value, field.name)
                yield f"{part.name}.{field.name}", dict(each) if isinstance(each, Mapping) else each


def _setting_words(key: str, value: Any) -> str:
    """Steps as: norm bcn (groups=8) where layer3.*"""
    if key == "steps":
        texts = []
        for step in value or ():
            options = f" ({value_words(dict(step.options))})" if step.options else ""
            where = f" where {step.where}" if step.where else ""
            texts.append(f"{step.kind} {step.name}{options}{where}")
        return "; then ".join(texts) or "none"
    return str(value) if key == "model.name" else value_words(value)


@dataclass(frozen=True)
class EnvironmentGroup:
    """Versions and hardware that some of the runs share."""

    runs: int
    facts: tuple[tuple[str, str, bool], ...]  # name, value, whether others differ in it


def environments(results: Sequence[Result]) -> list[EnvironmentGroup]:
    """The most usual one first; those that no run has recorded are left out."""
    groups: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for result in results:
        items = ((str(name), str(value)) for name, value in result.environment.items())
        key = tuple(item for item in items if item[0] not in WAYS)
        groups.setdefault(tuple(sorted(key)), []).append(result)
    names = {name for key in groups for name, _ in key}
    varied = {name for name in names if len({dict(key).get(name) for key in groups}) > 1}
    environments = []
    for key, runs in sorted(groups.items(), key=lambda item: -len(item[1])):
        facts = [(name, value, name in varied) for name, value in key]
        facts += [(name, value, False) for way, name in WAYS.items() if (value := _ways(runs, way))]
        if facts:
            environments.append(EnvironmentGroup(len(runs), tuple(facts)))
    return environments


def _ways(results: Sequence[Result], way: str) -> str:
    values = [str(r.environment[way]) for r in results if way in r.environment]
    distinct = list(dict.fromkeys(values))
    if len(distinct) < 2:
        return "".join(distinct)
    return "; ".join(f"{each} ({counted(values.count(each), 'run')})" for each in distinct)
