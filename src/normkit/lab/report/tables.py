"""The tables below the charts: costs, published numbers, runs, configuration, environments."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.core.messages import counted
from normkit.lab.experiment import Experiment, Published, Setting, Step
from normkit.lab.report.figures import Look
from normkit.lab.report.scores import Board, Scores, average, axes_of, shown
from normkit.lab.report.words import NONE, at, duration, known, listed, size, three, value_words
from normkit.lab.results import DIVERGED, DONE, Comparison, Result


@dataclass(frozen=True)
class Amount:
    """A number as it is shown, its length as a bar, and how it compares with the baseline's."""

    value: float | None
    text: str
    share: float = 0.0  # of the largest in the table
    ratio: str = ""


@dataclass(frozen=True)
class Cost:
    look: Look
    place: tuple[tuple[Any, str], ...]
    amounts: tuple[Amount, ...]


COLUMNS = (
    ("Time an epoch", lambda result: _epoch_seconds(result), duration),
    ("Images a second", lambda result: result.images_per_second, three),
    ("Peak memory", lambda result: result.peak_memory, size),
    ("Parameters", lambda result: float(result.parameters), lambda value: f"{value or 0:,.0f}"),
)
REACHED = ("Epochs to the baseline's score", "Time to the baseline's score")
NEVER = "not reached"  # by half of the runs


def _epoch_seconds(result: Result) -> float | None:
    trained = [epoch.epoch for epoch in result.epochs if epoch.epoch > 0]
    return result.seconds / max(trained) if trained and known(result.seconds) else None


def heads(rows: Sequence[Cost]) -> list[tuple[int, str]]:
    """Those columns in which anything is known, with their places."""
    names = [*(name for name, _, _ in COLUMNS), *REACHED]
    return [
        (i, name)
        for i, name in enumerate(names)
        if any(r.amounts[i].value is not None for r in rows)
    ]


def costs(board: Board, comparisons: Sequence[Comparison], looks: Mapping[str, Look]) -> list[Cost]:
    """One row for each variant in each cell that has results."""
    axes = list(axes_of(board.experiment.cells()))
    reached = {(c.variant, c.cell): c for c in comparisons}
    measured = [(scores, _measured(scores)) for scores in _in_order(board) if scores.results]
    most = [
        max((values[i] or 0.0 for _, values in measured), default=0.0) for i in range(len(COLUMNS))
    ]
    made = []
    for scores, values in measured:
        cell = scores.variant.cell
        base = board.baseline(cell)
        usual = _measured(base) if base is not None else [None] * len(COLUMNS)
        own = base is scores
        amounts = [
            Amount(value, show(value), _share(value, top), "" if own else _ratio(value, other))
            for value, other, top, (_, _, show) in zip(values, usual, most, COLUMNS, strict=True)
        ]
        amounts += _reached(reached.get((scores.variant.name, cell)), scores if own else None, base)
        place = tuple((dict(cell).get(axis), value_words(dict(cell).get(axis))) for axis in axes)
        made.append(Cost(looks[scores.variant.name], place, tuple(amounts)))
    return made


def _reached(
    found: Comparison | None, own: Scores | None, base: Scores | None
) -> tuple[Amount, Amount]:
    """How soon a variant was as good as the baseline in the end; the baseline's is its end."""
    end = _end(base)
    if own is not None:
        return Amount(end[0], three(end[0])), Amount(end[1], duration(end[1]))
    if found is None or not found.pairs:
        return Amount(None, NONE), Amount(None, NONE)
    epochs, seconds = found.epochs_to_baseline, found.seconds_to_baseline
    if epochs is None:
        return Amount(None, NEVER), Amount(None, NEVER)
    return (
        Amount(epochs, three(epochs), ratio=_ratio(epochs, end[0])),
        Amount(seconds, duration(seconds), ratio=_ratio(seconds, end[1])),
    )


def _end(base: Scores | None) -> tuple[float | None, float | None]:
    """The epoch and the second of training from which the baseline's score is: medians."""
    ends = [
        max(((e.epoch, e.seconds) for e in r.epochs if e.epoch in r.selected), default=None)
        for r in (base.done if base is not None else ())
    ]
    known = [end for end in ends if end is not None]
    if not known:
        return None, None
    return statistics.median(e for e, _ in known), statistics.median(s for _, s in known)


def _in_order(board: Board) -> list[Scores]:
    return [scores for cell in board.experiment.cells() for scores in board.in_cell(cell)]


def _measured(scores: Scores) -> list[float | None]:
    results = scores.done or list(scores.results.values())
    return [average([measure(result) for result in results]) for _, measure, _ in COLUMNS]


def _share(value: float | None, most: float) -> float:
    return 0.0 if value is None or not most else round(value / most, 4)


def _ratio(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return ""
    ratio = value / base
    return "" if abs(ratio - 1) < 0.005 else f"× {ratio:.2f}"


@dataclass(frozen=True)
class Beside:
    """A published number, ours, and how both differ from the baseline's (positive is better)."""

    look: Look
    place: tuple[tuple[Any, str], ...]
    published: Published
    ours: Scores | None
    their_difference: float | None
    our_difference: float | None
    agree: str  # yes, no, or that ours is not shown


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


def beside(
    board: Board, looks: Mapping[str, Look], comparisons: Sequence[Comparison]
) -> list[Beside]:
    experiment = board.experiment
    axes = list(axes_of(experiment.cells()))
    sign = 1 if experiment.higher_is_better else -1
    values = {(each.variant, each.cell): each.value for each in experiment.published}
    verdicts = {(c.variant, c.cell): shown(c) for c in comparisons if c.pairs or c.diverged}
    made = []
    for each in experiment.published:
        if each.variant not in looks:  # not part of this scale
            continue
        ours = board.get(each.variant, each.cell)
        base = board.baseline(each.cell)
        theirs = values.get((experiment.baseline, each.cell))
        is_baseline = each.variant == experiment.baseline
        their = None if is_baseline or theirs is None else sign * (each.value - theirs)
        our = None
        if not is_baseline and ours is not None and base is not None:
            known = list(board.differences(ours).values())
            our = sum(known) / len(known) if known else None
        place = tuple(
            (dict(each.cell).get(axis), value_words(dict(each.cell).get(axis))) for axis in axes
        )
        verdict = verdicts.get((each.variant, each.cell), "")
        agree = agreement(their, verdict, experiment.equivalence)
        made.append(Beside(looks[each.variant], place, each, ours, their, our, agree))
    return made


NOT_RUN, FAILED = "not run", "failed"


@dataclass(frozen=True)
class RunRow:
    look: Look
    place: tuple[tuple[Any, str], ...]
    seed: int
    state: str
    score: float | None
    result: Result | None
    id: str
    note: str


def run_rows(board: Board, looks: Mapping[str, Look], failures: Mapping[str, str]) -> list[RunRow]:
    axes = list(axes_of(board.experiment.cells()))
    made = []
    for scores in board:
        cell = dict(scores.variant.cell)
        place = tuple((cell.get(axis), value_words(cell.get(axis))) for axis in axes)
        for seed, run in scores.runs.items():
            result = scores.results.get(seed)
            failed = failures.get(run.id, "") if result is None else ""
            state = FAILED if failed else NOT_RUN
            if result is not None:
                state = DIVERGED if seed in scores.diverged else DONE
            note = result.note if result is not None else failed
            score = scores.by_seed.get(seed)
            look = looks[scores.variant.name]
            made.append(RunRow(look, place, seed, state, score, result, run.id, note))
    return made


def gaps(board: Board, failures: Mapping[str, str]) -> list[str]:
    """What was not run, in sentences."""
    found = []
    for scores in board:
        for state, seeds in _missing(scores.missing, scores.runs, failures).items():
            if seeds:
                name = f"{scores.variant.name} {at(scores.variant.cell)}".removesuffix(" at ")
                word = "seed" if len(seeds) == 1 else "seeds"
                everything = len(seeds) == len(scores.runs)
                which = "every seed" if everything else f"{word} {listed(seeds, most=20)}"
                reasons = dict.fromkeys(failures.get(scores.runs[seed].id, "") for seed in seeds)
                why = f": {listed(reasons, most=3)}" if state == FAILED else ""
                found.append(f"{name}: {which} {state}{why}")
    return found


def _missing(
    seeds: list[int], runs: Mapping[int, Any], failures: Mapping[str, str]
) -> dict[str, list[int]]:
    failed = [seed for seed in seeds if failures.get(runs[seed].id)]
    return {FAILED: failed, NOT_RUN: [seed for seed in seeds if seed not in failed]}


def diverged(board: Board) -> list[str]:
    """What diverged, and what is known of it."""
    found = []
    for scores in board:
        for seed in scores.diverged:
            name = f"{scores.variant.name} {at(scores.variant.cell)}".removesuffix(" at ")
            note = scores.results[seed].note or "the score is not finite"
            found.append(f"{name}, seed {seed}: {note}")
    return found


@dataclass(frozen=True)
class Shared:
    key: str
    value: str
    usual: bool  # whether it is the default


@dataclass(frozen=True)
class Configuration:
    shared: tuple[Shared, ...]
    grid: tuple[tuple[str, str], ...]  # axes, and their values
    differing: tuple[str, ...]  # keys, without those that the grid sets
    rows: tuple[tuple[str, tuple[str, ...]], ...]  # variant, and its value for each of these keys


def configuration(experiment: Experiment) -> Configuration:
    """Both tables together hold every field of every setting."""
    flat = [dict(flattened(variant.setting)) for variant in experiment.variants]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    usual = dict(flattened(Setting()))
    values = {key: [each.get(key) for each in flat] for key in keys}
    same = [key for key in keys if all(value == values[key][0] for value in values[key])]
    axes = axes_of(experiment.cells())
    on_grid = {key for key in axes if key in values and _set_by_grid(experiment, key, values[key])}
    differing = tuple(key for key in keys if key not in same and key not in on_grid)
    rows = []
    for variant, each in zip(experiment.variants, flat, strict=True):
        row = (variant.name, tuple(_shown(key, each.get(key)) for key in differing))
        if row not in rows:
            rows.append(row)
    shared = tuple(
        Shared(key, _shown(key, values[key][0]), values[key][0] == usual.get(key))
        for key in same
        if values
    )
    grid = tuple((key, value_words(found)) for key, found in axes.items())
    return Configuration(shared, grid, differing, tuple(rows))


def _set_by_grid(experiment: Experiment, key: str, values: list[Any]) -> bool:
    pairs = zip(experiment.variants, values, strict=True)
    return all(dict(variant.cell).get(key) == value for variant, value in pairs)


def flattened(setting: Setting) -> Iterator[tuple[str, Any]]:
    """("train.lr", 0.1), …; the steps stay together, since their order matters."""
    for part in dataclasses.fields(setting):
        value = getattr(setting, part.name)
        if part.name == "steps":
            yield "steps", value
        else:
            for each in dataclasses.fields(value):
                found = getattr(value, each.name)
                plain = dict(found) if isinstance(found, Mapping) else found
                yield f"{part.name}.{each.name}", plain


def step_words(step: Step) -> str:
    """norm bcn (groups=8) where layer3.*"""
    options = f" ({value_words(dict(step.options))})" if step.options else ""
    return f"{step.kind} {step.name}{options}" + (f" where {step.where}" if step.where else "")


def _shown(key: str, value: Any) -> str:
    if key == "steps":
        return "; then ".join(map(step_words, value or ())) or "none"
    return str(value) if key == "model.name" else value_words(value)


# ways of computing, which may change from run to run on one and the same machine
WAYS = {"recorded": "CUDA graph", "side by side": "runs at once on the device"}


@dataclass(frozen=True)
class Environment:
    """Versions and hardware that some of the runs share."""

    runs: int
    facts: tuple[tuple[str, str, bool], ...]  # name, value, whether others differ in it


def environments(results: Sequence[Result]) -> list[Environment]:
    """The most usual one first; those that no run has recorded are left out."""
    groups: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for result in results:
        items = ((str(name), str(value)) for name, value in result.environment.items())
        key = tuple(item for item in items if item[0] not in WAYS)
        groups.setdefault(tuple(sorted(key)), []).append(result)
    names = {name for key in groups for name, _ in key}
    varied = {name for name in names if len({dict(key).get(name) for key in groups}) > 1}
    found = []
    for key, runs in sorted(groups.items(), key=lambda item: -len(item[1])):
        facts = [(name, value, name in varied) for name, value in key]
        facts += [(name, said, False) for way, name in WAYS.items() if (said := _ways(runs, way))]
        if facts:
            found.append(Environment(len(runs), tuple(facts)))
    return found


def _ways(results: Sequence[Result], way: str) -> str:
    values = [str(r.environment[way]) for r in results if way in r.environment]
    distinct = list(dict.fromkeys(values))
    if len(distinct) < 2:
        return "".join(distinct)
    return "; ".join(f"{each} ({counted(values.count(each), 'run')})" for each in distinct)
