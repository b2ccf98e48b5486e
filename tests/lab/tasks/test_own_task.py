"""A task of one's own: trained, interrupted, judged, and known by its source."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path

import pytest
import torch

from normkit.errors import NormkitError, OptionError
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import read
from normkit.lab.results import Epoch, Result
from normkit.lab.statistics import compare
from normkit.lab.tasks import load_sets
from normkit.lab.tasks.drawing import encoded
from normkit.lab.train import Training, train, train_together
from tests.lab.train.stand_ins import numbers


def test_a_task_of_ones_own_is_trained_and_compared(folder: Path) -> None:
    experiment = read(folder / "mine.toml")
    assert experiment.metric == "nearest"
    assert experiment.higher_is_better
    assert not read(folder / "mine.toml", metric="spread").higher_is_better
    results = {run.id: train(run) for run in experiment.runs()}
    found = next(iter(results.values()))
    assert found is not None
    last = found.epochs[-1]
    right = last.units["test_nearest"]
    assert set(right) <= {0.0, 1.0}
    assert len(right) == 8
    assert last.metrics["test_nearest"] == sum(right) / len(right)
    assert last.train_loss == pytest.approx(
        last.metrics["train_match"] + last.metrics["train_size"]
    )
    assert found == Result.from_json(found.to_json())
    (comparison,) = compare(experiment, {k: v for k, v in results.items() if v is not None})
    assert comparison.pairs == 2


def test_an_interrupted_run_of_a_task_goes_on_to_the_same_numbers(folder: Path) -> None:
    run = read(folder / "mine.toml").runs()[0]
    whole = train(run)
    assert whole is not None
    sets = load_sets(run.setting)
    half = Training(run, sets)
    for _ in range(4):  # in the middle of the second epoch
        half.step()
    state = half.state_dict()
    rest = Training(run, sets)
    rest.load_state_dict(state)
    while rest.step():
        pass
    assert numbers(rest.result()).epochs == numbers(whole).epochs
    beside = train_together([run, dataclasses.replace(run, seed=2)])[0]
    assert beside is not None
    assert numbers(beside).epochs == numbers(whole).epochs


def test_the_source_is_part_of_a_runs_identity(folder: Path) -> None:
    def ids() -> list[str]:
        return [run.id for run in read(folder / "mine.toml").runs()]

    first = ids()
    assert ids() == first
    (folder / "unrelated.py").write_text("x = 1\n")
    assert ids() == first
    task = folder / "mytask.py"
    task.write_bytes(task.read_bytes().replace(b"\n", b"\r\n"))  # of another editor
    assert ids() == first
    helper = folder / "distance.py"
    helper.write_text(helper.read_text().replace("cdist(first", "cdist(2 * first"))
    assert not set(ids()) & set(first)


def test_a_file_that_changes_in_the_middle_of_a_sweep_is_not_run(folder: Path) -> None:
    run = read(folder / "mine.toml").runs()[0]
    task = folder / "mytask.py"
    task.write_text(task.read_text().replace("0.01", "0.02"))
    with pytest.raises(OptionError, match=r"mytask\.py has changed since this sweep began"):
        train(run)


def test_options_reach_the_constructor(folder: Path) -> None:
    file = folder / "mine.toml"
    text = file.read_text().replace('task = "mytask.py:Contrastive"\n', "")
    noisy = '[task]\nname = "mytask.py:Contrastive"\noptions = { noise = 0.5 }\n'
    file.write_text(text + noisy)
    run = read(file).runs()[0]
    assert Training(run, load_sets(run.setting)).task.noise == 0.5  # type: ignore[attr-defined]
    file.write_text(text + noisy.replace("noise", "nose"))
    with pytest.raises(BadExperiment, match=r"line 17.*'nose'.*Its options: noise"):
        read(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metrics = {", "numbers = {", r"has no metric \(mytask\.py:8\)"),
        ("class Contrastive(Task)", "class Contrastive", "expected a subclass of"),
        ("class Contrastive", "class Other", "mytask.py has no 'Contrastive'"),
        ("import torch\n", "import torch\nraise ValueError('no')\n", r"no \(mytask\.py:3, in"),
        ("import torch\n", "import torch\nx = = 1\n", r"SyntaxError.*\(mytask\.py:3\)"),
    ],
)
def test_a_task_that_cannot_be_used_is_told_by_file_and_line(
    folder: Path, old: str, new: str, message: str
) -> None:
    task = folder / "mytask.py"
    task.write_text(task.read_text().replace(old, new))
    with pytest.raises(BadExperiment, match=f"line 5: task.name.*{message}"):
        read(folder / "mine.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('return {"match": match', 'return first\n        return {"match": match',
         r"Contrastive\.loss \(mytask\.py:20\) gave a tensor \(16, 3\), expected one number"),
        ('"match": match,', '"match": match.detach() + missing,',
         r"failed \(mytask\.py:23, in loss\): NameError: name 'missing'"),
        ("self.right += nearest", "self.wrong += nearest",
         r"evaluation failed \(mytask\.py:34, in add\): AttributeError"),
        ('return {"nearest": self.right', 'return {"nearest": 1 / 0',
         r"evaluation failed \(mytask\.py:37, in values\): ZeroDivisionError"),
    ],
)  # fmt: skip
def test_an_error_in_own_code_names_its_line(
    folder: Path, old: str, new: str, message: str
) -> None:
    task = folder / "mytask.py"
    task.write_text(task.read_text().replace(old, new))
    with pytest.raises(NormkitError, match=message) as caught:
        train(read(folder / "mine.toml").runs()[0])
    if "gave" not in message:
        assert caught.value.__cause__ is not None  # with the traceback of the author's code


def test_a_loss_that_is_nan_is_a_divergence_with_its_place(folder: Path) -> None:
    task = folder / "mytask.py"
    task.write_text(task.read_text().replace('"match": match,', '"match": match * float("nan"),'))
    result = train(read(folder / "mine.toml").runs()[0])
    assert result is not None
    assert result.status == "diverged"
    assert "from step 1 on, in epoch 1 of 2 (mytask.py:20)" in result.note


def test_numbers_of_any_name_are_kept() -> None:
    epoch = Epoch.of({"test_loss": 1.0, "test_iou": [0.25, 0.75]}, epoch=1)
    assert epoch.test_loss == epoch.value("loss") == 1.0
    assert epoch.value("iou") == epoch.test("iou") == 0.5
    assert epoch.units == {"test_iou": [0.25, 0.75]}


def test_a_picture_is_a_png() -> None:
    Image = pytest.importorskip("PIL.Image")
    import io

    image = torch.rand(3, 4, 6)
    shown = Image.open(io.BytesIO(base64.b64decode(encoded(image))))
    assert shown.size == (6, 4)
    pixel = shown.getpixel((5, 3))
    assert pixel == tuple((image[:, 3, 5] * 255).round().int().tolist())


def test_a_task_says_what_is_watched_where_the_file_does_not(folder: Path) -> None:
    task = folder / "mytask.py"
    source = task.read_text()
    metrics = "    metrics = {"
    task.write_text(source.replace(metrics, '    watch = ("condensation",)\n' + metrics))
    run = read(folder / "mine.toml").runs()[0]
    found = train(run)
    assert found is not None
    assert "condensation" in found.epochs[-1].measures
    task.write_text(source.replace(metrics, '    watch = ("condensaton",)\n' + metrics))
    with pytest.raises(OptionError, match="watch of Contrastive has 'condensaton'"):
        train(read(folder / "mine.toml").runs()[0])
