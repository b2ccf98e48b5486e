"""Training the claims: what is committed is not trained again, and stays in the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normkit.lab.experiment import Run
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.store import Store
from tools.evidence import train
from tools.evidence.claims import experiment_of
from tools.evidence.page import Evidence
from tools.evidence.results import of_sweep, read_results, write_results

FILE = "g-ubn"


def result(run: Run, score: float) -> Result:
    epochs = (Epoch(5, test_accuracy=score, test_loss=0.5, test_one_class=0.2),)
    return Result(
        run.id, DONE, (5,), epochs, 2.0, 10,
        environment={"device": "a GPU"}, classes=10, test_samples=10_000,
    )  # fmt: skip


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the runs that would have been trained; each ends at once."""
    ids: list[str] = []

    def sweep(queue: train.RunQueue, store: Store, **_: object) -> None:
        missing = [run for run in queue.runs() if run.id not in store.results()]
        store.add(missing)
        for run in missing[:30]:  # then the time is over
            ids.append(run.id)
            store.finish(result(run, 0.8))

    monkeypatch.setattr(train, "sweep", sweep)
    monkeypatch.setattr(train, "check_data", lambda experiment: [])
    return ids


def test_a_new_folder_goes_on_from_the_committed_results(
    tmp_path: Path, trained: list[str]
) -> None:
    """A machine that had no store trained all 523 runs again, and its files had nothing else."""
    experiment, committed, out = experiment_of(FILE), tmp_path / "committed", tmp_path / "out"
    committed.mkdir()
    first = experiment.runs()[:20]
    old = of_sweep(0, {run.id: result(run, 0.7) for run in first}, {})
    write_results(experiment, old, committed)
    spent = {"device": "a GPU", "seconds": 10.0, "runs": 20, "run_seconds": 40.0, "workers": 6}
    (committed / "sweeps.json").write_text(json.dumps([spent]))
    words = ["--out", str(out), "--results", str(committed), FILE]
    assert train.main(words) == 0
    everything = {run.id for run in experiment.runs()}
    assert len(trained) == 30
    assert not {*trained} & old.keys()
    assert train.main(words) == 0
    assert {*trained} | old.keys() == everything
    assert len(trained) == len({*trained}) == 40
    found = read_results(experiment, out)
    assert found.keys() == everything
    scores = {run: each.score("accuracy") for run, each in found.items()}
    assert {scores[run] for run in old} == {0.7}
    assert {scores[run] for run in trained} == {0.8}
    sweeps = [found[run].environment["sweep"] for run in (first[0].id, trained[0], trained[-1])]
    assert sweeps == ["0", "1", "2"]
    told = json.loads((out / "sweeps.json").read_text())
    assert [each["runs"] for each in told] == [20, 30, 10]
    assert train.main(words) == 0
    assert len(json.loads((out / "sweeps.json").read_text())) == 3  # nothing was left to train
    evidence = Evidence(out)
    assert evidence.runs() == 60
    assert evidence.seconds(FILE)["GPU"] == pytest.approx(evidence.total("GPU"), abs=0.2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "-3"], "got -3, expected seconds above 0"),
        (["--seconds", "nan"], "got nan, expected seconds above 0"),
        (["--seeds", "0"], "got 0, expected a whole number from 1 on"),
        (["--tiny", "-3"], "got -3, expected a whole number from 1 on"),
        (["--results", "nowhere"], "nowhere is no folder"),
        (["nonsense"], "There is no experiment"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        train.main(["--out", str(tmp_path), *words])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_missing_data_stops_before_anything_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    monkeypatch.setattr(train, "sweep", lambda *_, **__: pytest.fail("it trains"))
    with pytest.raises(SystemExit):
        train.main(["--out", str(tmp_path / "out"), "--results", str(tmp_path), FILE])
    assert "cifar10" in capsys.readouterr().err
