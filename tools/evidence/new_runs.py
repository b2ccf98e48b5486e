"""Runs that were trained and are not committed yet: one file, and how it gets into the results.

The file is only ever appended to, a line as soon as a run has finished, so that whatever ends a
training ends it between two lines. A sweep begins with a line that says what it is; lines of its
runs say after how many seconds they came; its last line, if it was not killed, says how long it
took. It can be brought back and taken in at any time, also twice, and beside files of other
machines.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normkit.core.atomic_write import write_text
from normkit.errors import NormkitError
from normkit.lab.results import Result
from tools.evidence.checks import contradictions
from tools.evidence.claims import CLAIMS, experiment_of
from tools.evidence.results import (
    RESULTS,
    SWEEPS,
    from_record,
    in_sweep,
    read_all,
    read_results,
    read_sweeps,
    shortened,
    write_results,
)

RUNS = "runs.jsonl"


class NewRunsError(NormkitError):
    """A file of runs that cannot be what is asked of it."""


@dataclass
class NewSweep:
    """What one call has trained, as its lines say."""

    about: dict[str, Any]  # when it began (its name), workers, whether its runs are tiny
    results: dict[str, Result] = field(default_factory=dict)
    seconds: float = 0.0
    found: set[str] = field(default_factory=set)  # of them, what a sweep before it had finished
    lines: dict[str, int] = field(default_factory=dict)  # of the file, by run, from 1 on

    def entry(self) -> dict[str, Any]:
        """What sweeps.json says of it."""
        own = [each for run, each in self.results.items() if run not in self.found]
        own = own or list(self.results.values())
        return {
            "device": own[0].environment.get("device", ""),
            "seconds": round(self.seconds, 1),
            "runs": len(own),
            "run_seconds": round(sum(each.seconds for each in own), 1),
            "workers": self.about["workers"],
            "started": self.about["started"],
        }


class NewRuns:
    """The file while runs are added to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.there = {run for sweep in read_new_runs(path) for run in sweep.results}

    def begin(self, workers: int, *, tiny: bool = False) -> None:
        about = {"started": datetime.now(UTC).isoformat(), "workers": workers}
        self._append({"sweep": about | ({"tiny": True} if tiny else {})})

    def add(self, result: Result, name: str, after: float, *, found: bool = False) -> None:
        """A run, once: after how many seconds of the sweep, and in words what it is of.

        ``found``: a sweep before this one had finished it, and could not add it.
        """
        if result.run not in self.there:
            about = {"after": round(after, 1), "name": name} | ({"found": True} if found else {})
            self._append(about | shortened(json.loads(result.to_json())))
            self.there.add(result.run)

    def end(self, seconds: float) -> None:
        self._append({"seconds": round(seconds, 1)})

    def _append(self, record: Mapping[str, Any]) -> None:
        """A line, on the disk when this returns. What was cut off in front of it stays alone."""
        with self.path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            line = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_new_runs(path: Path) -> list[NewSweep]:
    """Its sweeps, none if there is no file; a line that was cut off counts as not written."""
    sweeps: list[NewSweep] = []
    if not path.exists():
        return sweeps
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise NewRunsError(f"{path} cannot be read: {error.strerror}. Expected {RUNS}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            _read_line(line, sweeps, path, number)
    return sweeps


def _read_line(line: bytes, sweeps: list[NewSweep], path: Path, number: int) -> None:
    place = f"{path}, line {number}"
    try:
        record = json.loads(line.decode())
    except ValueError:
        if line.startswith(b'{"') and b"\0" not in line:  # cut off
            return
        raise NewRunsError(f"{place} is no JSON: expected the {RUNS} of a training") from None
    try:
        if "sweep" in record:
            about = record["sweep"]
            for name, kind in (("started", str), ("workers", int)):
                if not isinstance(about[name], kind):
                    raise TypeError(f"{name} is {about[name]!r}")
            sweeps.append(NewSweep(about))
        elif not sweeps:
            raise NewRunsError(
                f"{place} does not begin with a sweep: expected the {RUNS} of a training, whole "
                "from its first line on"
            )
        elif "run" in record:
            _read_run(record, sweeps, place, number)
        else:
            sweeps[-1].seconds = max(sweeps[-1].seconds, _seconds(record, "seconds"))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise NewRunsError(
            f"{place} cannot be read ({type(error).__name__}: {error}). Expected a sweep, a run or "
            f"seconds, as tools.evidence.train writes them; bring {RUNS} back again"
        ) from None


def _read_run(record: dict[str, Any], sweeps: list[NewSweep], place: str, number: int) -> None:
    sweep = sweeps[-1]
    after = _seconds(record, "after")
    record.pop("after")
    record.pop("name", None)
    found = record.pop("found", False)
    result = from_record(record)
    if not isinstance(result.run, str):
        raise TypeError(f"run is {result.run!r}")
    for before in sweeps:
        if result.run in before.results and before.results[result.run] != result:
            raise NewRunsError(
                f"{place} has run {result.run} with other numbers than line "
                f"{before.lines[result.run]}: expected one result of a run. Delete the line "
                "that is not it"
            )
    sweep.seconds = max(sweep.seconds, after)
    if found:
        sweep.found.add(result.run)
    sweep.results[result.run] = result
    sweep.lines[result.run] = number


def _seconds(record: dict[str, Any], name: str) -> float:
    value = record[name]
    if isinstance(value, bool) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def take(path: Path, folder: Path = RESULTS) -> tuple[int, int]:
    """Add a file's runs to the results; how many were new, and how many it has.

    Nothing that is there is replaced. A sweep of which an earlier state of the file was taken is
    the same one, by the time at which it began. Nothing is written before all of it is checked.
    """
    new_sweeps = _checked(path)
    known, sweeps = read_all(folder), read_sweeps(folder)
    experiments = [experiment_of(each.stem) for each in sorted(CLAIMS.glob("*.toml"))]
    planned = {run.id: run for experiment in experiments for run in experiment.runs()}
    new = {run for sweep in new_sweeps for run in sweep.results}
    for place, runs in ((path, new), (folder, known.keys())):
        if strange := sorted(runs - planned.keys()):
            raise NewRunsError(
                f"{place} has {len(strange)} runs that no experiment of {CLAIMS} plans, such as "
                f"{strange[0]}: it would be left out. Has an experiment changed since"
            )
    for sweep in new_sweeps:
        for run, result in sweep.results.items():
            for wrong in contradictions(result, planned[run]):
                raise NewRunsError(
                    f"{path}, line {sweep.lines[run]}: {wrong}. No run of the file was taken: "
                    "train this one again, or delete the line"
                )
    pool = dict(known)
    for sweep in new_sweeps:
        fresh = {run: each for run, each in sweep.results.items() if run not in pool}
        numbers = {each.get("started"): number for number, each in enumerate(sweeps)}
        number = numbers.get(sweep.about["started"], len(sweeps))
        if number == len(sweeps):
            if not fresh:
                continue
            sweeps.append({})
        entry = sweep.entry()
        if entry["runs"] >= sweeps[number].get("runs", 0):  # the later state of the file
            sweeps[number] = entry
        pool |= {run: in_sweep(each, number) for run, each in fresh.items()}
    if len(pool) > len(known):  # first, so that no result names a sweep that is not there
        write_text(folder / SWEEPS, json.dumps(sweeps, indent=1) + "\n")
    for experiment in experiments:
        own = {run.id for run in experiment.runs() if run.id in pool}
        if own - read_results(experiment, folder).keys():
            write_results(experiment, pool, folder)
    return len(pool) - len(known), sum(len(sweep.results) for sweep in new_sweeps)


def _checked(path: Path) -> list[NewSweep]:
    """The sweeps of a file that has runs, and none of a few steps."""
    if not path.exists():
        raise NewRunsError(f"There is no {path}. Expected the {RUNS} of a training's --out FOLDER")
    sweeps = [sweep for sweep in read_new_runs(path) if sweep.results]
    if not sweeps:
        raise NewRunsError(
            f"{path} has no run. Expected the {RUNS} of a training's --out FOLDER in which one has "
            "finished"
        )
    if any(sweep.about.get("tiny") for sweep in sweeps):
        raise NewRunsError(f"{path} has runs of a few steps (--tiny): they are no results")
    return sweeps


@contextmanager
def taken(paths: Sequence[Path], folder: Path = RESULTS) -> Iterator[tuple[Path, list[str]]]:
    """The results with the runs of all files, in a folder of their own: what is there, in words.

    They are written to ``folder`` when the block ends without an error.
    """
    with tempfile.TemporaryDirectory() as name:
        stage = Path(name)
        shutil.copytree(folder, stage, dirs_exist_ok=True)
        told = []
        for path in paths:
            new, all_of_them = take(path, stage)
            told.append(f"{new} of {all_of_them} runs of {path} were new.")
        yield stage, told
        for file in sorted(stage.glob("*.json"), key=lambda each: each.name != SWEEPS):
            text, old = file.read_text(encoding="utf-8"), folder / file.name
            if not old.exists() or old.read_text(encoding="utf-8") != text:
                write_text(old, text)
