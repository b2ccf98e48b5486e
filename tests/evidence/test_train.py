"""Training the claims: what is there is not trained again, and nothing is lost."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path

import pytest

from normkit.lab.experiment import Run
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.store import Store
from tools.evidence import __main__ as command
from tools.evidence import train
from tools.evidence.claims import (
    ALL,
    FIRST_STAGES,
    STAGES,
    Stage,
    experiment_of,
    ordered_runs,
    stage_runs,
)
from tools.evidence.evidence import Evidence
from tools.evidence.judge import claim_experiment
from tools.evidence.missing import missing_stages, plan_lines
from tools.evidence.new_runs import NewRuns, NewRunsError, read_new_runs, take
from tools.evidence.results import in_sweep, read_all, read_results, read_sweeps, write_results

FILE = "g-ubn"
AT_ONCE = 30  # runs, then the time is over


def result(run: Run, score: float) -> Result:
    last = run.setting.train.epochs
    epochs = tuple(
        Epoch(i, test_accuracy=score, test_loss=0.5, test_one_class=0.2) for i in range(1, last + 1)
    )
    return Result(
        run.id, DONE, (last,), epochs, 2.0, 10,
        environment={"device": "a GPU"}, classes=10, test_samples=10_000,
    )  # fmt: skip


class Killed(BaseException):
    """The machine is taken away."""


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Ids of the runs that would have been trained; each ends at once."""
    ids: list[str] = []

    def sweep(
        queue: train.RunQueue, store: Store, *, progress: train.QueueLines, **_: object
    ) -> None:
        missing = [run for run in queue.runs() if run.id not in store.results()]
        store.add(missing)
        for run in missing[:AT_ONCE]:
            ids.append(run.id)
            store.finish(result(run, 0.8))
            progress.finished(result(run, 0.8))

    monkeypatch.setattr(train, "sweep", sweep)
    monkeypatch.setattr(train, "check_data", lambda experiment: [])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return ids


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """Results of twenty runs."""
    folder = tmp_path / "committed"
    folder.mkdir()
    experiment = experiment_of(FILE)
    old = {run.id: in_sweep(result(run, 0.7), 0) for run in experiment.runs()[:20]}
    write_results(experiment, old, folder)
    spent = {"device": "a GPU", "seconds": 10.0, "runs": 20, "run_seconds": 40.0, "workers": 6}
    (folder / "sweeps.json").write_text(json.dumps([spent]))
    return folder


def test_training_goes_on_from_what_is_there_into_one_file(
    tmp_path: Path, committed: Path, trained: list[str]
) -> None:
    """A machine that had no store trained all 523 runs again. Of another one 75 runs were lost:
    results lay among checkpoints, and all of it was too large to be brought back."""
    experiment, out = experiment_of(FILE), tmp_path / "out"
    old = read_results(experiment, committed)
    everything = {run.id for run in experiment.runs()}
    work = tmp_path / "work"
    words = ["--out", str(out), "--work", str(work), "--results", str(committed), FILE]
    assert train.main(words) == 0
    assert len(trained) == AT_ONCE
    assert not {*trained} & old.keys()
    shutil.rmtree(work)  # another machine, with the file alone
    assert train.main(words) == 0
    assert {*trained} | old.keys() == everything
    assert len(trained) == len({*trained}) == 40
    assert train.main(words) == 0
    assert [each.name for each in out.iterdir()] == ["runs.jsonl"]
    assert [len(each.results) for each in read_new_runs(out / "runs.jsonl")] == [30, 10]
    assert take(out / "runs.jsonl", committed) == (40, 40)
    found = read_results(experiment, committed)
    assert found.keys() == everything
    scores = {run: each.score("accuracy") for run, each in found.items()}
    assert {scores[run] for run in old} == {0.7}
    assert {scores[run] for run in trained} == {0.8}
    sweeps = [found[run].environment["sweep"] for run in (*list(old)[:1], trained[0], trained[-1])]
    assert sweeps == ["0", "1", "2"]
    assert found[trained[0]].provenance == result(experiment.runs()[0], 0.8).provenance
    assert [each["runs"] for each in read_sweeps(committed)] == [20, 30, 10]
    evidence = Evidence(committed)
    assert evidence.runs() == 60
    assert evidence.seconds(FILE)["GPU"] == pytest.approx(evidence.total("GPU"), abs=0.2)
    assert train.main(["--out", str(tmp_path / "none"), "--results", str(committed), FILE]) == 0
    assert not (tmp_path / "none").exists()  # nothing was missing


def test_what_had_finished_before_a_kill_is_there_once(
    tmp_path: Path, committed: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the store and the file, or in the middle of a line."""
    out = tmp_path / "out"
    words = ["--out", str(out), "--results", str(committed), FILE]
    whole = train.NewRuns.add
    calls: list[str] = []

    def add(self: train.NewRuns, each: Result, name: str, after: float, *, found: bool) -> None:
        if len(calls) == 7:
            raise Killed
        calls.append(each.run)
        whole(self, each, name, after, found=found)

    monkeypatch.setattr(train.NewRuns, "add", add)
    with pytest.raises(Killed):
        train.main(words)
    monkeypatch.setattr(train.NewRuns, "add", whole)
    file = out / "runs.jsonl"
    with file.open("a") as stream:
        stream.write('{"after":3.1,"name":"g-ubn, bn (war')
    assert [len(each.results) for each in read_new_runs(file)] == [7]
    assert len(trained) == 8  # the last one is in the store alone
    brought, none = tmp_path / "brought.jsonl", tmp_path / "none"
    shutil.copy(file, brought)
    none.mkdir()
    assert take(brought, none) == (7, 7)
    file.unlink()  # its folder was emptied, that of the checkpoints was not
    assert train.main(words) == train.main(words) == 0
    assert len(trained) == len({*trained}) == 40
    with file.open("a") as stream:
        stream.write('{"after":9.9,"name":"')
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    runs = [line["run"] for line in lines if "run" in line]
    assert len(runs) == len({*runs}) == 40
    assert {*runs} == {*trained}
    own = [each.entry()["runs"] for each in read_new_runs(file)]
    assert own == [30, 2]  # eight more were found, of which the clock of these knows nothing
    assert take(file, committed) == (40, 40)


def test_files_are_taken_in_any_order_and_as_often_as_one_likes(
    tmp_path: Path, committed: Path, trained: list[str]
) -> None:
    """cp FOLDER/*.json replaced what another machine had brought."""
    files = [tmp_path / name / "runs.jsonl" for name in ("one", "two")]
    for file in files:
        train.main(["--out", str(file.parent), "--results", str(committed), FILE])
    early = tmp_path / "early.jsonl"  # as it was when it was brought back for the first time
    early.write_text("\n".join(files[0].read_text().splitlines()[:11]) + "\n")
    assert [len(each.results) for each in read_new_runs(early)] == [10]
    assert take(early, committed) == (10, 10)
    assert take(early, committed) == (0, 10)
    train.main(["--out", str(files[1].parent), "--results", str(committed), FILE])
    assert take(files[1], committed) == (30, 40)  # 10 of its first 30 were there; all others
    assert take(files[0], committed) == (0, 30)
    assert Evidence(committed).runs() == 60
    sweeps = read_sweeps(committed)
    assert [each["runs"] for each in sweeps] == [20, 10, 30, 10]
    assert len({each.get("started") for each in sweeps}) == 4
    before = {path.name: path.read_bytes() for path in committed.iterdir()}
    for file in (*files, early):
        assert take(file, committed)[0] == 0
    assert {path.name: path.read_bytes() for path in committed.iterdir()} == before


def test_the_first_result_of_a_run_stays(tmp_path: Path, committed: Path) -> None:
    """Whatever another machine has made of it, and whichever file is taken first."""
    runs = experiment_of(FILE).runs()
    scores = {"one": (0.8, runs[19:22]), "two": (0.9, runs[18:23])}
    for name, (score, some) in scores.items():
        new = NewRuns(tmp_path / f"{name}.jsonl")
        new.begin(6)
        for run in some:
            new.add(result(run, score), "a run", 1.0)
    assert take(tmp_path / "one.jsonl", committed) == (2, 3)
    assert take(tmp_path / "two.jsonl", committed) == (1, 5)
    found = read_results(experiment_of(FILE), committed)
    assert [found[run.id].score("accuracy") for run in runs[18:23]] == [0.7, 0.7, 0.8, 0.8, 0.9]


def test_runs_that_no_experiment_plans_are_not_lost(tmp_path: Path, committed: Path) -> None:
    """They were counted as taken, and those that were there were dropped by the next ones."""
    run = experiment_of(FILE).runs()[30]
    other = dataclasses.replace(result(run, 0.8), run="0" * 16)
    new = NewRuns(tmp_path / "new.jsonl")
    new.begin(6)
    new.add(other, "of an experiment that was changed", 1.0)
    before = {path.name: path.read_bytes() for path in committed.iterdir()}
    with pytest.raises(NewRunsError, match=r"1 runs that no experiment of .* plans, such as 0000"):
        take(new.path, committed)
    assert {path.name: path.read_bytes() for path in committed.iterdir()} == before


def test_folders_of_a_machine_are_not_kept(tmp_path: Path) -> None:
    run = experiment_of(FILE).runs()[0]
    told = {"command": "train.py --out /data/out --seconds 5 g-ubn"}
    write_results(
        experiment_of(FILE),
        {run.id: dataclasses.replace(in_sweep(result(run, 0.8), 0), provenance=told)},
        tmp_path,
    )
    (found,) = read_results(experiment_of(FILE), tmp_path).values()
    assert found.provenance["command"] == "train.py --out FOLDER --seconds 5 g-ubn"


def test_a_run_of_several_experiments_is_in_the_files_of_all(
    tmp_path: Path, trained: list[str]
) -> None:
    empty, out = tmp_path / "empty", tmp_path / "out"
    empty.mkdir()
    train.main(["--out", str(out), "--results", str(empty), FILE])
    take(out / "runs.jsonl", empty)
    shared = {run.id for run in experiment_of("l-ws-bcn").runs()} & {*trained}
    assert read_results(experiment_of("l-ws-bcn"), empty).keys() == shared != set()


def test_tiny_runs_are_no_results(
    tmp_path: Path, committed: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--out", str(out), "--results", str(committed), FILE]
    assert train.main([*words, "--tiny", "7"]) == 0
    assert len(trained) == 7  # of 60 runs every eighth: there were eight
    assert "Bring back" not in capsys.readouterr().out
    with pytest.raises(NewRunsError, match="a few steps"):
        take(out / "runs.jsonl", committed)
    with pytest.raises(SystemExit):
        train.main(words)
    assert "runs of another kind" in capsys.readouterr().err


def test_checkpoints_are_not_put_beside_the_results(
    tmp_path: Path, committed: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They were brought back with them, and with them lost."""
    out = tmp_path / "out"
    words = ["--out", str(out), "--results", str(committed), FILE]
    for work in (out, out / "work"):
        with pytest.raises(SystemExit):
            train.main([*words, "--work", str(work)])
        assert "is for runs.jsonl alone" in capsys.readouterr().err
    assert train.main(words) == 0
    told = capsys.readouterr().out
    assert str(tmp_path / "temporary" / "normkit-evidence-") in told
    assert [each.name for each in out.iterdir()] == ["runs.jsonl"]


def test_what_cannot_be_taken_is_named(
    tmp_path: Path, committed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--take", str(tmp_path / "runs.jsonl")])
    assert "There is no " in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text('{"run": "0123"}\n')
    with pytest.raises(NewRunsError, match="does not begin with a sweep"):
        take(other, committed)


def test_a_plan_trains_nothing_and_needs_neither_data_nor_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    monkeypatch.setattr(train, "sweep", lambda *_, **__: pytest.fail("it trains"))
    assert train.main(["--plan"]) == 0
    told = capsys.readouterr().out
    known = read_all()
    missing = missing_stages(known, read_sweeps())
    for line in plan_lines(missing) if missing else ():
        assert line in told
    lacking = [run for run in ordered_runs() if run.id not in known]
    assert sum(len(stage.runs) for stage in missing) == len(lacking)


def test_what_is_missing_is_expected_to_take_as_long_as_what_is_like_it(committed: Path) -> None:
    """The other schedule as this one, seconds by the sweep's clock, more epochs more of them."""
    experiment = experiment_of("b-lower-rate")
    done = [
        (run, variant)
        for variant in experiment.variants
        if dict(variant.cell) == {"train.warmup": 1, "train.epochs": 5}
        for run in variant.runs(experiment.seeds)
    ]
    results = {run.id: in_sweep(result(run, 0.5), 0) for run, _ in done}  # 2 s each, 0.5 of a GPU
    sweeps = read_sweeps(committed)
    cells = [{"train.warmup": 0, "train.epochs": 5}, {"train.warmup": 1, "train.epochs": (2, 12)}]
    stages = [Stage("b-lower-rate", cell=cell) for cell in cells]
    same, longer = missing_stages(results, sweeps, [*stages, stages[0]])
    assert (len(same.runs), same.seconds, same.shared) == (15, pytest.approx(7.5), False)
    assert (len(longer.runs), longer.seconds) == (30, pytest.approx(15 * 0.5 * (2 + 12) / 5))
    assert same.what == "no warm-up; 5 epochs"
    assert longer.what == "warm-up; 2, 12 epochs"
    text = list(plan_lines([same, longer]))
    assert [line.split()[:3] for line in text[1:3]] == [["15", "8", "8"], ["30", "21", "28"]]
    [beside] = missing_stages(results, [sweeps[0] | {"beside": "other work"}], stages[:1])
    assert beside.shared
    [unknown] = missing_stages(results, sweeps, [Stage(FILE)])
    assert unknown.seconds == 0


def test_claims_with_one_schedule_are_next() -> None:
    """After the first stages, schedules that a claim has no row of come before other values."""
    assert STAGES[: len(FIRST_STAGES)] == FIRST_STAGES
    told = {run.id for run in ordered_runs(FIRST_STAGES)}
    known, gains = schedules_told(told), []
    for stage in STAGES[len(FIRST_STAGES) :]:
        told |= {run.id for _, run in stage_runs(stage)}
        gains.append(len(schedules_told(told) - known))
        known = schedules_told(told)
    assert [each > 0 for each in gains] == sorted((each > 0 for each in gains), reverse=True)
    assert 0 in gains
    assert known == {
        (place, dict(variant.cell).get("train.warmup"))
        for place, claim in enumerate(ALL)
        for variant in claim_experiment(claim).variants
    }


def schedules_told(runs: set[str]) -> set[tuple[int, object]]:
    """Of which schedules a claim has a row of which all seeds are there, by its place."""
    found: set[tuple[int, object]] = set()
    for place, claim in enumerate(ALL):
        experiment, seeds = claim_experiment(claim), experiment_of(claim.file).seeds
        for variant in experiment.variants:
            row = (variant, experiment.variant(experiment.baseline, variant.cell))
            whole = {run.id for each in row for run in each.runs(seeds)} <= runs
            if whole and variant.name in claim.expected:
                found.add((place, dict(variant.cell).get("train.warmup")))
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "-3"], "got -3, expected seconds above 0"),
        (["--seconds", "nan"], "got nan, expected seconds above 0"),
        (["--seeds", "0"], "got 0, expected a whole number from 1 on"),
        (["--tiny", "-3"], "got -3, expected a whole number from 1 on"),
        (["--workers", "0"], "got 0, expected a whole number from 1 on"),
        (["--device", "quux"], "device got 'quux'"),
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
    assert not [*tmp_path.iterdir()]  # of a sweep that did not begin there is no line


def test_what_cannot_be_read_or_made_is_named(
    tmp_path: Path, committed: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for name, text in (("sweeps.json", "[{"), (f"{FILE}.json", '{"runs": [{}]}')):
        broken = tmp_path / name.replace(".", "-")
        shutil.copytree(committed, broken)
        (broken / name).write_text(text)
        with pytest.raises(SystemExit):
            train.main(["--out", str(tmp_path / "out"), "--results", str(broken), FILE])
        assert f"{broken / name} cannot be read (" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train.main(["--out", str(tmp_path / "file"), "--results", str(committed), FILE])
    assert "file cannot be made: File exists. Expected a folder" in capsys.readouterr().err
    assert not trained


def test_a_plan_trains_nothing_whatever_is_asked_beside_it(
    tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """--plan --tiny 3 --out trained three runs, and without --out it said "--plan"."""
    for words in (["--out", str(tmp_path / "out")], []):
        assert train.main(["--plan", "--tiny", "3", FILE, *words]) == 0
        assert "3 runs of a few steps would be trained" in capsys.readouterr().out
    assert not trained
    assert not (tmp_path / "out").exists()


def test_missing_data_stops_before_anything_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    monkeypatch.setattr(train, "sweep", lambda *_, **__: pytest.fail("it trains"))
    with pytest.raises(SystemExit):
        train.main(["--out", str(tmp_path / "out"), "--results", str(tmp_path), FILE])
    assert "cifar10" in capsys.readouterr().err
