"""A run that an error has ended is lost, like one that diverged; one not yet run is not."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from lab.statistics.made_up import experiment, results
from normkit.lab.experiment import Experiment
from normkit.lab.export import files
from normkit.lab.report import print_verdicts
from normkit.lab.report.page import page
from normkit.lab.results import Result
from normkit.lab.statistics import compare
from normkit.lab.store import FAILED, Store

BASE = [0.90, 0.91, 0.92, 0.90, 0.91, 0.90]
GOOD = [0.95, 0.955, 0.97, 0.951]
ABOUT = experiment("bn", "gn", seeds=6)


def stored(path: Path, about: Experiment, *, failing: str) -> tuple[dict[str, Result], set[str]]:
    """What a store has of an experiment whose last two seeds of gn gave nothing."""
    runs = [run.id for run in about.variant("gn").runs(about.seeds)][4:]
    with Store(path / "results.sqlite") as store:
        store.add(about.runs())
        for each in results(about, {"bn": BASE, "gn": GOOD}).values():
            store.finish(each)
        for run in runs if failing == "gn" else ():
            store.fail(run, "RuntimeError: out of memory")
        states = store.status()
        return store.results(), {run for run, each in states.items() if each.state == FAILED}


def test_two_of_six_failed_is_said_first_and_everywhere(tmp_path: Path) -> None:
    """gn was "better than bn, 4 seeds", and that two more had failed was no part of it."""
    found, failed = stored(tmp_path, ABOUT, failing="gn")
    (compared,) = compare(ABOUT, found, failed)
    assert (compared.verdict, compared.failed, compared.lost, compared.pairs) == (
        "unstable", 2, 2, 4,
    )  # fmt: skip
    screen = Console(file=io.StringIO(), width=140, color_system=None, highlight=False)
    print_verdicts(ABOUT, found, [compared], screen, failed)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    lead = (
        "gn cannot be judged against bn, since not every seed survived: it failed at 2 of 6 seeds"
    )
    assert " ".join(text.split()).startswith(lead)
    assert "2 failed" in text
    shown = page(ABOUT, found, [compared], failures=dict.fromkeys(failed, "out of memory"))
    assert lead in shown
    assert ">2 failed</strong>" in shown
    rows = files.rows(ABOUT, found, "run", failed)
    assert [row["status"] for row in rows].count("failed") == 2
    (row,) = files.rows(ABOUT, found, "comparison", failed)
    assert (row["verdict"], row["failed"]) == ("unstable", 2)
    table = files.write(ABOUT, found, [compared], tmp_path / "t.tex", failures=failed).read_text()
    assert "so many seeds failed" in table
    assert r"\dagger 2" in table


def test_what_has_not_been_run_is_not_lost(tmp_path: Path) -> None:
    found, failed = stored(tmp_path, ABOUT, failing="none")
    (compared,) = compare(ABOUT, found, failed)
    assert (compared.verdict, compared.lost, compared.pairs) == ("better", 0, 4)


def test_failures_of_the_baseline_and_of_all() -> None:
    found = results(ABOUT, {"bn": BASE[:4], "gn": [*GOOD, 0.95, 0.95]})
    failed = {run.id for run in ABOUT.variant("bn").runs(ABOUT.seeds)[4:]}
    (compared,) = compare(ABOUT, found, failed)
    assert (compared.verdict, compared.baseline_failed, compared.failed) == ("unstable", 2, 0)
    nothing = {run.id for run in ABOUT.variant("gn").runs(ABOUT.seeds)}
    found = results(ABOUT, {"bn": BASE})
    shown = page(
        ABOUT, found, compare(ABOUT, found, nothing), failures=dict.fromkeys(nothing, "why")
    )
    assert "it failed at 6 of 6 seeds" in shown


def test_a_planned_look_does_not_wait_for_what_failed() -> None:
    about = experiment("bn", "gn", seeds=6, looks=(3, 6))
    found = results(about, {"bn": BASE, "gn": GOOD})
    failed = {run.id for run in about.variant("gn").runs(about.seeds)[4:]}
    (compared,) = compare(about, found, failed)
    assert (compared.verdict, compared.failed) == ("unstable", 2)
