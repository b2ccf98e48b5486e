"""The parts of the page, put together into one file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normkit import __version__
from normkit.core.atomic_write import write_text
from normkit.diagnosis.report.style import CSS
from normkit.lab.experiment import Experiment
from normkit.lab.report import tables, verdicts, words
from normkit.lab.report.answer import answer, cautions
from normkit.lab.report.curves import curves, watched
from normkit.lab.report.figures import Figure, Look, looks, said
from normkit.lab.report.score_charts import over_axes, paired, trade
from normkit.lab.report.scores import Board, shown
from normkit.lab.report.tables import environments
from normkit.lab.report.words import Metric
from normkit.lab.results import Comparison, Result
from normkit.models import require

TEMPLATES = Path(__file__).parent / "templates"
RUNS = 1000  # that a page lists
WHAT = "The report of an experiment"
TONES = {
    "better": "fine",
    "worse": "serious",
    "equivalent": "note",
    "not shown": "unsure",
    "baseline": "unsure",
    "done": "fine",
    "diverged": "serious",
    tables.FAILED: "serious",
    tables.NOT_RUN: "unsure",
}


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
    jinja = require("jinja2", "lab", WHAT)
    plain = require("jinja2.utils", "lab", WHAT).htmlsafe_json_dumps
    environment = jinja.Environment(
        loader=jinja.FileSystemLoader(TEMPLATES),
        autoescape=True,  # whatever a user typed stays text
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    board = Board(experiment, results)
    look = looks(board.names())
    figures = _figures(board, comparisons, look)
    scripts = _scripts(bool(figures))
    charts = {
        "looks": [[said(each.name), each.colour, each.dash, each.symbol] for each in look.values()],
        "figures": {figure.id: figure.plain() for figure in figures},
    }
    return environment.get_template("page.html").render(
        **_parts(board, comparisons, look, failures or {}),
        figures=figures,
        charts=plain(charts, separators=(",", ":"), allow_nan=False),
        css=CSS + (TEMPLATES / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        policy=_policy(scripts),
        words=words,
        tones=TONES,
        version=__version__,
    )


def _parts(
    board: Board,
    comparisons: Sequence[Comparison],
    look: Mapping[str, Look],
    failures: Mapping[str, str],
) -> dict[str, Any]:
    """All that is shown as text and tables."""
    listed = tables.run_rows(board, look, failures)
    spent = tables.costs(board, comparisons, look)
    return {
        "experiment": board.experiment,
        "metric": Metric(board.experiment.metric),
        "board": board,
        "counts": board.counts,
        "seconds": sum(result.seconds for result in board.all_results()),
        "answer": answer(board, comparisons),
        "cautions": cautions(board, comparisons, failures),
        "looks": list(look.values()),
        "axes": verdicts.axis_heads(board),
        "verdicts": verdicts.rows(board, comparisons, look),
        "map": verdicts.verdict_map(board, comparisons, look),
        "symbols": verdicts.SYMBOLS,
        "shown": shown,
        "strength": verdicts.strengths(comparisons),
        "comparisons": comparisons,
        "costs": spent,
        "cost_heads": tables.heads(spent),
        "published": tables.beside(board, look, comparisons),
        "gaps": tables.gaps(board, failures) if board.counts["finished"] or failures else [],
        "diverged": tables.diverged(board),
        "runs": listed if len(listed) <= RUNS else [r for r in listed if r.state != "done"],
        "all_runs": len(listed),
        "environments": environments(board.all_results()),
        "settings": tables.configuration(board.experiment),
    }


def _figures(
    board: Board, comparisons: Sequence[Comparison], look: Mapping[str, Look]
) -> list[Figure]:
    if not board.counts["finished"]:
        return []
    made = [
        paired(board, comparisons, look),
        *over_axes(board, look),
        curves(board, look),
        trade(board, look),
        *watched(board, look),
    ]
    return [kept for figure in made if (kept := figure.kept()) is not None]


def _scripts(charts: bool) -> list[str]:
    own = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    if not charts:
        return [own]
    plotly = require("plotly.offline", "lab", WHAT).get_plotlyjs()
    return [plotly.replace("\r\n", "\n").replace("\r", "\n"), own]


def _policy(scripts: Sequence[str]) -> str:
    """What a browser may do with the page: run these scripts, and load nothing at all."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
