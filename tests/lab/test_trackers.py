"""Live export: what trackers are told of a sweep. MLflow and W&B are stood for by small modules
with the calls that are used; TensorBoard's files are read back by TensorBoard itself."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lab.sweep import pretend
from normkit.errors import MissingExtra, UnknownName
from normkit.lab.experiment import Experiment
from normkit.lab.export.trackers import TrackedProgress, epoch_values
from normkit.lab.results import DIVERGED, DONE, Epoch, Result
from normkit.lab.sweep import ProgressListener, SweepPlan, run_labels
from normkit.lab.sweep.messages import Progressed


class Heard(ProgressListener):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.said: list[str] = []

    def finished(self, result: Result) -> None:
        self.calls.append(f"finished {result.run}")

    def say(self, text: str) -> None:
        self.said.append(text)

    def end(self) -> None:
        self.calls.append("end")


def epoch(number: int, accuracy: float) -> Epoch:
    measures = {"esm": [0.2, None, 0.4], "odd": "text"}
    return Epoch(number, lr=0.1, train_loss=1.5, test_accuracy=accuracy, measures=measures)


def played(experiment: Experiment, *trackers: str) -> Heard:
    """A sweep: one run is done, of which an epoch was told before; one diverges, one is stopped."""
    heard = Heard()
    listener = TrackedProgress(experiment, list(trackers), heard)
    first, second, third = (run.id for run in experiment.runs())
    listener.begin(SweepPlan(run_labels(experiment)))
    for run in (first, second, third):
        listener.started(run)
    listener.progressed(Progressed(first, 1.5))
    listener.progressed(Progressed(first, 2.0, epoch(2, 0.75)))
    epochs = (epoch(1, 0.5), epoch(2, 0.75))
    listener.finished(Result(first, DONE, (2,), epochs, 1.0, 10))
    listener.finished(Result(second, DIVERGED, (), (), 1.0, 10))
    listener.end()
    assert heard.calls == [f"finished {first}", f"finished {second}", "end"]
    return heard


@pytest.fixture
def experiment() -> Experiment:
    return pretend.experiment(variants=1, seeds=3)


def test_numbers_of_an_epoch() -> None:
    values = epoch_values(epoch(3, 0.5))
    other = Epoch(1, metrics={"test_iou": 0.25}, units={"test_iou": [0.0, 0.5]})
    assert epoch_values(other)["test/iou"] == 0.25
    assert values == {
        "lr": 0.1,
        "train/loss": 1.5,
        "test/accuracy": 0.5,
        "seconds": 0.0,
        "watch/esm": pytest.approx(0.3),
    }


def test_tensorboard(experiment: Experiment, tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    heard = played(experiment, f"tensorboard={tmp_path}")
    assert heard.said == []
    folders = sorted((tmp_path / "pretended").iterdir())
    assert [folder.name.rsplit(" ", 1)[0] for folder in folders] == [
        "v0, seed 1",
        "v0, seed 2",
        "v0, seed 3",
    ]
    events = reading.EventAccumulator(str(folders[0])).Reload()
    accuracy = {each.step: each.value for each in events.Scalars("test/accuracy")}
    assert accuracy == {1: 0.5, 2: 0.75}
    assert [each.value for each in events.Scalars("final/accuracy")] == [0.75]
    said = [
        reading.EventAccumulator(str(folder)).Reload().Tensors("outcome/text_summary")[0]
        for folder in folders
    ]
    assert [each.tensor_proto.string_val[0] for each in said] == [b"done", b"diverged", b"stopped"]


class FakeMlflow:
    """The part of an MLflow client that is used, kept from one client to the next."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, str] = {}

    def MlflowClient(self, tracking_uri: str | None) -> FakeMlflow:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.experiments.get(name)
        return known and types.SimpleNamespace(experiment_id=known)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, f"e{len(self.experiments)}")

    def search_runs(self, places: list[str], query: str, max_results: int) -> list[Any]:
        wanted = query.split("'")[1]
        return [
            types.SimpleNamespace(info=types.SimpleNamespace(run_id=name))
            for name, run in self.runs.items()
            if run["tags"]["normkit_run"] == wanted
        ][:max_results]

    def create_run(self, place: str, tags: dict[str, str]) -> Any:
        name = f"r{len(self.runs)}"
        self.runs[name] = {"tags": tags, "metrics": {}, "params": {}, "status": "RUNNING"}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=name))

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def log_param(self, run: str, key: str, value: str) -> None:
        self.runs[run]["params"][key] = value

    def log_metric(self, run: str, key: str, value: float, step: int = 0) -> None:
        self.runs[run]["metrics"][key, step] = value

    def set_tag(self, run: str, key: str, value: str) -> None:
        self.runs[run]["tags"][key] = value

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status


def test_mlflow(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    assert played(experiment, "mlflow=http://here").said == []
    assert mlflow.uri == "http://here"
    first, second, third = mlflow.runs.values()
    assert first["tags"]["mlflow.runName"] == "v0, seed 1"
    assert first["params"]["seed"] == "1"
    assert first["params"]["train.epochs"] == "3"
    assert first["metrics"]["test/accuracy", 1] == 0.5
    assert first["metrics"]["test/accuracy", 2] == 0.75
    assert first["metrics"]["final/accuracy", 0] == 0.75
    assert [run["tags"]["outcome"] for run in (first, second, third)] == [
        "done",
        "diverged",
        "stopped",
    ]
    assert [run["status"] for run in (first, second, third)] == ["FINISHED", "FINISHED", "KILLED"]
    played(experiment, "mlflow")  # goes on: no run is doubled
    assert len(mlflow.runs) == 3


def test_wandb(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    class FakeRun:
        def __init__(self, given: dict[str, Any]) -> None:
            self.given, self.logged, self.summary = given, [], {}
            self.exit_code: int | None = None

        def log(self, values: dict[str, float], step: int) -> None:
            self.logged.append((step, values["test/accuracy"]))

        def finish(self, exit_code: int) -> None:
            self.exit_code = exit_code

    def init(**given: Any) -> FakeRun:
        runs.append(FakeRun(given))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    assert played(experiment, "wandb=my project").said == []
    first, second, third = runs
    assert first.given["project"] == "my project"
    assert first.given["id"] == experiment.runs()[0].id
    assert first.given["resume"] == "allow"
    assert first.logged == [(2, 0.75)]  # steps in order only
    assert first.summary == {"outcome": "done", "final/accuracy": 0.75}
    assert [each.summary["outcome"] for each in (second, third)] == ["diverged", "stopped"]
    assert {each.exit_code for each in runs} == {0}


def test_a_tracker_that_fails_ends_and_the_sweep_goes_on(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**given: Any) -> Any:
        raise ConnectionError("the server\nis gone")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    heard = played(experiment, "wandb", f"tensorboard={tmp_path}")
    assert heard.said == [
        "--track wandb has ended: ConnectionError: the server is gone. The sweep goes on."
    ]
    assert len(list((tmp_path / "pretended").iterdir())) == 3


def test_names_and_packages(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'tensorboard'"):
        TrackedProgress(experiment, ["tensorbord"], Heard())
    monkeypatch.setitem(sys.modules, "mlflow", None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtra, match=r"normkit\[mlflow\]"):
        TrackedProgress(experiment, ["mlflow"], Heard())
