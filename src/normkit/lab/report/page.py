"""The page of an experiment: its parts, put together into one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normkit import __version__
from normkit.core.atomic_write import write_text
from normkit.lab.experiment import Experiment
from normkit.lab.experiment.records import variant_label
from normkit.lab.report import tables, verdicts
from normkit.lab.report.answer import answer, cautions
from normkit.lab.report.curves import learning_curves, watched_measures
from normkit.lab.report.figures import Figure, plotly_text
from normkit.lab.report.score_charts import paired_differences, scores_over_axes, time_trade_off
from normkit.lab.report.scores import Scoreboard, verdict_of
from normkit.lab.results import Comparison, Result
from normkit.lab.statistics import PlannedLooks
from normkit.reporting import plotly_script, render

TEMPLATES = Path(__file__).parent / "templates"
RUNS = 1000  # that a page lists
WHAT = "The report of an experiment"


def report(
    experiment: Experiment,
    results: Mapping[str, Result],
    comparisons: Sequence[Comparison],
    path: str | Path,
    *,
    failures: Mapping[str, str] | None = None,
) -> Path:
    """Write the page of an experiment: one HTML file that loads nothing.

    ``results`` are by run id; ``failures`` says, by run id, why a run gave none. What is not there
    is named on the page, so that a report may be made of an experiment that is still running.
    """
    return write_text(path, page(experiment, results, comparisons, failures=failures))


def page(
    experiment: Experiment,
    results: Mapping[str, Result],
    comparisons: Sequence[Comparison],
    *,
    failures: Mapping[str, str] | None = None,
) -> str:
    """The whole page as text."""
    board = Scoreboard(experiment, results, failures or ())
    figures = _figures(board, comparisons)
    scripts = [(TEMPLATES / "charts.js").read_text(encoding="utf-8")]
    if figures:
        scripts.insert(0, plotly_script(WHAT, "lab"))
    return render(
        "experiment.html",
        TEMPLATES,
        what=WHAT,
        extra="lab",
        scripts=scripts,
        title=experiment.title or experiment.name,
        version=__version__,
        figures=figures,
        pictures=_pictures(experiment, results),
        texts=_texts(experiment, results),
        charts={
            "styles": [
                [plotly_text(s.name), s.colour, s.dash, s.symbol] for s in board.styles.values()
            ],
            "figures": {figure.id: figure.plain() for figure in figures},
        },
        **_texts_and_tables(board, comparisons, failures or {}),
    )


def _texts_and_tables(
    board: Scoreboard, comparisons: Sequence[Comparison], failures: Mapping[str, str]
) -> dict[str, Any]:
    runs = tables.run_rows(board, failures)
    costs = tables.cost_rows(board, comparisons)
    started = board.counts["finished"] or failures
    return {
        "experiment": board.experiment,
        "metric": board.metric,
        "counts": board.counts,
        "seconds": sum(result.seconds for result in board.all_results()),
        "answer": answer(board, comparisons),
        "cautions": cautions(board),
        "styles": list(board.styles.values()),
        "tones": {verdict: look.tone for verdict, look in verdicts.LOOKS.items()},
        "axes": verdicts.axis_heads(board),
        "verdicts": verdicts.verdict_rows(board, comparisons),
        "map": verdicts.verdict_map(board, comparisons),
        "symbols": {verdict: look.symbol for verdict, look in verdicts.LOOKS.items()},
        "verdict_of": verdict_of,
        "strength": verdicts.strengths(comparisons),
        "comparisons": comparisons,
        "look_level": _look_level(board.experiment),
        "costs": costs,
        "cost_heads": tables.cost_heads(costs),
        "published": tables.published_rows(board, comparisons),
        "gaps": tables.missing_runs(board, failures) if started else [],
        "lost": tables.lost_runs(board),
        "runs": runs if len(runs) <= RUNS else [run for run in runs if run.state != "done"],
        "all_runs": len(runs),
        "environments": tables.environments(board.all_results()),
        "configuration": tables.configuration(board.experiment),
    }


def _pictures(experiment: Experiment, results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """What runs have left for the page, by variant; most tasks leave nothing."""
    found = []
    for variant in experiment.variants:
        runs = (results.get(run.id) for run in variant.runs(experiment.seeds))
        shown = [picture for result in runs if result is not None for picture in result.pictures]
        if shown:
            found.append({"name": variant_label(variant.name, variant.cell), "pictures": shown})
    return found


def _texts(experiment: Experiment, results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """What runs have found in words, such as the cells of a search, by variant and seed."""
    return [
        {"name": f"{variant_label(variant.name, variant.cell)}, seed {run.seed}", "texts": texts}
        for variant in experiment.variants
        for run in variant.runs(experiment.seeds)
        if run.id in results and (texts := results[run.id].texts)
    ]


def _look_level(experiment: Experiment) -> str:
    """At what level each of the planned looks is tested, for a single comparison."""
    return f"{100 * PlannedLooks(experiment.looks).nominal():.2g} %" if experiment.looks else ""


def _figures(board: Scoreboard, comparisons: Sequence[Comparison]) -> list[Figure]:
    if not board.counts["finished"]:
        return []
    figures = [
        paired_differences(board, comparisons),
        *scores_over_axes(board),
        learning_curves(board),
        time_trade_off(board),
        *watched_measures(board),
    ]
    return [kept for figure in figures if (kept := figure.without_empty()) is not None]
