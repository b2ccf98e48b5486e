"""normkit lab diff: which settings of two experiments differ, and what each has found."""

from __future__ import annotations

import argparse
from pathlib import Path

from normkit.commands.lab import RESULTS
from normkit.commands.lab_actions import find
from normkit.commands.output import screen_of, table, write_json
from normkit.errors import NothingToDo, UnknownName, nearest
from normkit.lab.experiment.reading import read
from normkit.lab.report.differences import Side, SideScores, differing, only_in, score_rows
from normkit.lab.report.words import Metric
from normkit.lab.store import Reader

STORES = (".sqlite", ".db")


def diff(options: argparse.Namespace) -> int:
    first, second = _side(options.first, options), _side(options.second, options)
    names = ("A", "B") if first.name == second.name else (first.name, second.name)
    screen = screen_of(options)
    settings = differing(first, second)
    if settings:
        screen.print(table("Settings that differ", ("variant", "key", *names), settings))
    else:
        screen.print("No setting differs.")
    alone = {names[0]: only_in(first, second), names[1]: only_in(second, first)}
    for name, variants in alone.items():
        if variants:
            screen.print(f"Only in {name}: {', '.join(variants)}.", markup=False, soft_wrap=True)
    rows = list(score_rows(first, second))
    metric = first.metric
    if any(row.first.values or row.second.values for row in rows):
        shown = [
            (
                row.variant,
                _words(row.first, metric),
                _words(row.second, metric),
                None if row.difference is None else metric.plain(row.difference, sign=True),
                row.shared or None,
            )
            for row in rows
        ]
        head = ("variant", *names, "better by", "same runs")
        screen.print(table(f"{metric.title}, mean ± deviation (seeds)", head, shown))
        screen.print("Differences of means, without a test: a file with both has one.")
    else:
        screen.print("Neither has results yet.")
    facts = {
        "names": names,
        "settings": [row._asdict() for row in settings],
        "only": alone,
        "metric": metric.name,
        "results": [
            {
                "variant": row.variant,
                "first": row.first.mean,
                "second": row.second.mean,
                "seeds": [len(row.first.values), len(row.second.values)],
                "lost": [row.first.lost, row.second.lost],
                "difference": row.difference,
                "same_runs": row.shared,
            }
            for row in rows
        ],
    }
    write_json(options, facts)
    return 0


def _words(scores: SideScores, metric: Metric) -> str | None:
    lost = f"{scores.lost} lost" if scores.lost else ""
    if not scores.values:
        return lost or None
    text = f"{metric.spread(scores.mean, scores.std)} ({len(scores.values)})"
    return f"{text}, {lost}" if lost else text


def _side(reference: str, options: argparse.Namespace) -> Side:
    """A file, a name or a store, each with @SCALE or without."""
    name, scale = reference, None
    if "@" in reference and not Path(reference).exists():
        name, _, scale = reference.rpartition("@")
    if Path(name).suffix in STORES:
        return _stored(Path(name), scale)
    experiment = read(find(name), scale)
    path = options.store or RESULTS / f"{experiment.name}.sqlite"
    if not path.exists():
        return Side.of_file(experiment, None)
    with Reader(path) as store:
        return Side.of_file(experiment, store)


def _stored(path: Path, scale: str | None) -> Side:
    """The experiment that was last run on a store, of all or of those at a scale."""
    with Reader(path) as store:
        kept = store.experiments()
        chosen = [each for each in kept if scale in (None, each.scale)]
        if not kept:
            raise NothingToDo(
                f"{path} does not say which experiment it is of: it was written by an earlier "
                "normkit. Try the TOML file, with --store."
            )
        if not chosen:
            scales = {each.scale: None for each in kept}
            raise UnknownName(f"{path} has no scale {scale!r}. {nearest(scale or '', scales)}")
        return Side.of_store(chosen[-1], store)
