"""Every disease is found, named first and cured by its remedy; healthy models are left alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import normkit
from normkit.diagnosis.diagnosis import Diagnosis
from normkit.diagnosis.findings import KINDS, Finding
from tools.diseases.__main__ import main
from tools.diseases.accidents import resized
from tools.diseases.reference_models import (
    Case,
    Disease,
    HealthyModel,
    ReferenceModels,
    load_digits,
    train,
)
from tools.diseases.trials import DISEASES, HEALTHY, Trial, rows_of, to_markdown, trials_of, verdict

every_disease = pytest.mark.parametrize("disease", DISEASES, ids=lambda d: d.name)
every_reference = pytest.mark.parametrize("reference", HEALTHY, ids=lambda r: r.name)

# what a line of code cannot undo: the history of the training, and what other processes have
PAST = {
    "double-update",
    "extra-updates",
    "nonfinite-batches",
    "rank-disagreement",
    "rank-weights-differ",
}


@pytest.fixture(scope="module")
def models() -> ReferenceModels:
    """Trains each reference model once for all tests of this file."""
    return ReferenceModels(load_digits(), seed=0)


def alarms(case: Case) -> list[str]:
    return [finding.kind for finding in case.diagnose() if finding.alarm]


def treated(case: Case, finding: Finding, models: ReferenceModels) -> Case:
    """The case after the remedy, and after the training that its comment asks for."""
    names: dict[str, Any] = {"nk": normkit, "torch": torch, "model": case.model}
    names.update(case.arguments)
    exec(finding.remedy, names)
    case = Case(names["model"], {name: names[name] for name in case.arguments})
    if "train" in finding.remedy.partition("#")[2]:
        case.arguments["steps"] = None  # no longer known
        train(case.model.train(), models.train_loader(), epochs=2, rate=0.02)
        case.model.eval()
    return case


@every_reference
def test_healthy_models_are_not_alarmed(reference: HealthyModel, models: ReferenceModels) -> None:
    case = reference.make(models)
    assert alarms(case) == []
    # with the data alone, too
    assert alarms(Case(case.model, {"loader": case.arguments["loader"]})) == []


@every_disease
def test_a_disease_is_named_first_and_its_remedy_works(
    disease: Disease, models: ReferenceModels
) -> None:
    case = disease.inject(models)
    found = case.diagnose()
    first = found.findings[0]
    assert first.alarm
    assert first.kind == disease.finding
    assert "\n" not in first.remedy
    used = re.findall(r"\bnk\.(\w+)", first.remedy)  # in its comment, too
    assert [name for name in used if name not in normkit.__all__] == []
    after = treated(case, first, models)
    if disease.finding not in PAST:
        assert disease.finding not in alarms(after)


def test_there_are_enough_of_both() -> None:
    assert len(HEALTHY) >= 6
    assert len(DISEASES) >= 50
    assert len({disease.finding for disease in DISEASES}) >= 40
    names = [each.name for each in (*HEALTHY, *DISEASES)]
    assert len(set(names)) == len(names)


def test_every_alarm_has_a_disease() -> None:
    """A kind of finding that no disease asks for would never be tested."""
    tested = {disease.finding for disease in DISEASES}
    assert tested <= set(KINDS)
    # an output that is not finite has no cause of ours; the rest are notes
    assert set(KINDS) - tested == {
        "output-not-finite",
        "train-eval-gap",
        "condensed-features",
        "untrained",
    }


def test_a_reference_model_is_the_same_twice(models: ReferenceModels) -> None:
    """Injection must not touch the reference that other diseases start from."""
    before = models.cnn()[0].state_dict()
    next(d for d in DISEASES if d.name == "poisoned statistics").inject(models)
    after = models.cnn()[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_seed_does_not_touch_the_random_numbers_of_the_caller() -> None:
    state = torch.get_rng_state()
    HEALTHY[2].make(ReferenceModels(load_digits(), seed=3))
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- the table

FOUND = Trial("ill", "story", "dead-channels", 0, ("dead-channels",), "serious", 1)
SECOND = Trial("ill", "story", "dead-channels", 1, ("tiny-batch", "dead-channels"), "warning", 2)
MISSED = Trial("other", "a | b", "tiny-batch", 0, (), None, None)
ALARMED = Trial("fine", "about", None, 0, ("tiny-batch",))
QUIET = Trial("fine", "about", None, 1, ())


def test_what_passes() -> None:
    assert (FOUND.passed, FOUND.named) == (True, True)
    assert (SECOND.passed, SECOND.named) == (False, True)
    assert (MISSED.passed, MISSED.named) == (False, False)
    assert (ALARMED.passed, QUIET.passed) == (False, True)


def test_seeds_of_a_disease_share_a_row() -> None:
    healthy, ill = rows_of([FOUND, SECOND, MISSED, ALARMED, QUIET])
    assert healthy == [["fine", "about", "1 of 2", "tiny-batch"]]
    assert [row[4:] for row in ill] == [
        ["2 of 2", "1 of 2", "tiny-batch"],
        ["0 of 1", "0 of 1", "–"],
    ]


def test_the_verdict_counts() -> None:
    said = verdict([FOUND, SECOND, MISSED, ALARMED, QUIET])
    assert said == ("2 of 3 diseases found, 1 named first; 1 false alarms on 2 healthy models.")


def test_markdown_keeps_its_columns() -> None:
    table = [line for line in to_markdown([MISSED, QUIET]).splitlines() if line.startswith("|")]
    assert r"a \| b" in table[-1]
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
    assert widths == {5, 8}  # one for each of the two tables


def test_trials_can_be_chosen(models: ReferenceModels) -> None:
    (trial,) = trials_of(models, lambda name: name == "tiny batch")
    assert trial.passed
    assert trial.severity == "warning"
    assert trial.seed == 0


def test_the_table_in_the_documents_is_of_these_diseases() -> None:
    """It is made by `python -m tools.diseases --first 20 --markdown docs/diseases.md`."""
    text = (Path(__file__).parents[2] / "docs" / "diseases.md").read_text(encoding="utf-8")
    rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in text.splitlines()]
    stories = {row[0]: row[1] for row in rows if len(row) > 2 and row[0] not in ("---", "model")}
    stories.pop("disease")
    wanted = {each.name: each.about for each in HEALTHY}
    assert stories == wanted | {each.name: each.story for each in DISEASES}


def test_another_resolution_is_named_beside_unshuffled_training(models: ReferenceModels) -> None:
    """Digits of 32×32 for 8×8 pixels cost half of the accuracy. With a training loader in order
    only that was reported; with a shuffled one the size was a warning, by its statistics alone."""
    case = resized(models)
    x, y = models.digits.train
    case.arguments["train_loader"] = [(x[i], y[i]) for i in y.argsort().split(64) if len(i) == 64]
    first, *others = case.diagnose().findings
    assert (first.kind, first.severity) == ("other-resolution", "serious")
    assert first.numbers["loss"] > 2 * first.numbers["loss_resized"]  # type: ignore[operator]
    assert ("unshuffled-batches", "warning") in {(f.kind, f.severity) for f in others}


# ---------------------------------------------------------------- the command


def test_the_command_is_a_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ("--only", "mlp-bn", "--only", "last batch*", "--markdown", "table.md")
    assert main(chosen) == 0
    said = capsys.readouterr().out
    assert "1 of 1 diseases found, 1 named first; 0 false alarms on 1 healthy models." in said
    assert "| last batch of one |" in (tmp_path / "table.md").read_text(encoding="utf-8")
    # a diagnosis that finds nothing misses the disease
    monkeypatch.setattr(
        "tools.diseases.reference_models.diagnose", lambda *args, **more: Diagnosis("Net", ())
    )
    assert main(["--only", "last batch*"]) == 1
    assert main(["--only", "mlp-bn"]) == 0
    assert main(["--list"]) == 0
    capsys.readouterr()
    assert main(["--only", "nothing of this name"]) == 2
    assert "--list" in capsys.readouterr().err
    assert main(["--seeds", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "python -m tools.diseases --seeds 5" in said.partition("examples:")[2]
