"""Sweeps of array tasks, with submitit's processes on this machine in place of a cluster."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from lab.sweep import pretend
from normkit.errors import OptionError
from normkit.lab.results import DONE, Result
from normkit.lab.store import FAILED, Owner, Store
from normkit.lab.sweep import ProgressLines, run, slurm_engine
from normkit.lab.sweep.messages import Finished, Progressed
from normkit.lab.sweep.slurm_engine import Mailbox, SlurmEngine

submitit = pytest.importorskip(
    "submitit", reason="submitit is not installed: pip install 'normkit[slurm]'"
)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slurm_engine, "CLUSTER", "local")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("PRETEND_JOURNAL", str(tmp_path / "journal"))


@pytest.mark.usefixtures("processes")
def test_a_sweep_with_a_lost_task_and_an_error(path: Path) -> None:
    experiment = pretend.experiment(2, dies_once_in=2, fails_in=3, seeds=1)
    lines: list[str] = []
    with Store(path) as store:
        results = run(
            experiment,
            store,
            workers=2,
            engine="slurm",
            progress=ProgressLines(lines.append),
            trainer="lab.sweep.pretend",
        )
        states = [store.status()[each.id] for each in experiment.runs()]
        left = [store.checkpoint(experiment.runs()[1].id)]  # of the one that failed
        assert list(store.folder.iterdir()) == left
    assert lines[0] == "2 runs; 2 at once"
    assert sum("its run goes on from its checkpoint" in line for line in lines) == 1
    assert [each.state for each in states] == ["done", FAILED]
    assert states[1].reason.startswith("RuntimeError: the sum is odd (pretend.py:")
    runs, journal = experiment.runs(), path.with_name("journal").read_text()
    assert [result.score("accuracy") for result in results] == [pretend.expected(runs[0])]
    steps = Counter(line.split()[1] for line in journal.splitlines())
    assert steps[runs[0].id] == 3 * pretend.STEPS  # none was done twice
    assert steps[runs[1].id] == 2 * pretend.STEPS


@pytest.mark.usefixtures("processes")
def test_results_of_a_launcher_that_was_killed_are_not_trained_again(path: Path) -> None:
    (first, *_) = pretend.experiment(seeds=1).runs()
    result = Result(first.id, DONE, (), (), seconds=1.0, parameters=1)
    folder = Store(path).folder
    owner = Owner(folder)
    mailbox = folder / f"{first.id}-0.mail"
    Mailbox(mailbox).send(Finished(result))
    (folder / "host-1-dead.tasks").write_text(json.dumps([("0", str(mailbox))]))
    (folder / f"{owner.name}.tasks").write_text("[]")  # of one that lives
    engine = SlurmEngine(2, None, 3, owner, "lab.sweep.pretend")
    assert engine.room() == 0
    assert engine.poll(0) == [Finished(result)]
    assert engine.room() == 1
    assert [file.name for file in folder.glob("*.tasks")] == [f"{owner.name}.tasks"]
    engine.close()
    assert not list(folder.glob("*.slurm"))
    owner.close()


def test_half_a_message_is_read_when_it_is_whole(tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    for epochs in (1.0, 2.0):
        Mailbox(whole).send(Progressed("x", epochs))
    content = whole.read_bytes()
    reader = Mailbox(half)
    assert reader.read() == []
    half.write_bytes(content[:-3])
    assert reader.read() == [Progressed("x", 1.0)]
    half.write_bytes(content)
    assert reader.read() == [Progressed("x", 2.0)]


def test_a_machine_without_slurm(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with Store(path) as store, pytest.raises(OptionError, match=r"SLURM cannot be reached: .*srun"):
        run(pretend.experiment(), store, engine="slurm")
