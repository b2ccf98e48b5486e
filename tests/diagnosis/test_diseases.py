"""Every disease is found, named first and cured by its remedy; healthy models are left alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import normkit
from normkit.commands.digits import load_digits
from normkit.diagnosis.diseases import DISEASES, HEALTHY, Trial, Ward, to_markdown
from normkit.diagnosis.diseases.patient import Disease, Patient, Reference
from normkit.diagnosis.diseases.schooling import school
from normkit.diagnosis.diseases.trials import rows_of, trials_of, verdict
from normkit.diagnosis.findings import KINDS, Finding

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
def ward() -> Ward:
    """Trains each reference model once for all tests of this file."""
    return Ward(load_digits(), seed=0)


def alarms(patient: Patient) -> list[str]:
    return [finding.kind for finding in patient.diagnose() if finding.alarm]


def treated(patient: Patient, finding: Finding, ward: Ward) -> Patient:
    """The patient after the remedy, and after the training that its comment asks for."""
    names: dict[str, Any] = {"nk": normkit, "torch": torch, "model": patient.model}
    names.update(patient.arguments)
    exec(finding.remedy, names)
    patient = Patient(names["model"], {name: names[name] for name in patient.arguments})
    if "train" in finding.remedy.partition("#")[2]:
        patient.arguments["steps"] = None  # no longer known
        school(patient.model.train(), ward.train_loader(), epochs=2, rate=0.02)
        patient.model.eval()
    return patient


@every_reference
def test_healthy_models_are_not_alarmed(reference: Reference, ward: Ward) -> None:
    patient = reference.make(ward)
    assert alarms(patient) == []
    # with the data alone, too
    assert alarms(Patient(patient.model, {"loader": patient.arguments["loader"]})) == []


@every_disease
def test_a_disease_is_named_first_and_its_remedy_works(disease: Disease, ward: Ward) -> None:
    patient = disease.inject(ward)
    found = patient.diagnose()
    first = found.findings[0]
    assert first.alarm
    assert first.kind == disease.finding
    assert "\n" not in first.remedy
    used = re.findall(r"\bnk\.(\w+)", first.remedy)  # in its comment, too
    assert [name for name in used if name not in normkit.__all__] == []
    after = treated(patient, first, ward)
    if disease.finding not in PAST:
        assert disease.finding not in alarms(after)


def test_there_are_enough_of_both() -> None:
    assert len(HEALTHY) >= 6
    assert len(DISEASES) >= 20
    assert len({disease.finding for disease in DISEASES}) >= 20
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


def test_a_ward_gives_the_same_patient_twice(ward: Ward) -> None:
    """Injection must not touch the reference that other diseases start from."""
    before = ward.host()[0].state_dict()
    next(d for d in DISEASES if d.name == "poisoned statistics").inject(ward)
    after = ward.host()[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_seed_does_not_touch_the_random_numbers_of_the_caller() -> None:
    state = torch.get_rng_state()
    HEALTHY[2].make(Ward(load_digits(), seed=3))
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- the table

FOUND = Trial("ill", "story", "dead-channels", 0, ("dead-channels",), "serious", 1)
SECOND = Trial("ill", "story", "dead-channels", 1, ("tiny-batch", "dead-channels"), "warning", 2)
MISSED = Trial("other", "a | b", "tiny-batch", 0, (), None, None)
ALARMED = Trial("fine", "about", None, 0, ("tiny-batch",))
QUIET = Trial("fine", "about", None, 1, ())


def test_what_passes() -> None:
    assert (FOUND.passed, FOUND.found) == (True, True)
    assert (SECOND.passed, SECOND.found) == (False, True)
    assert (MISSED.passed, MISSED.found) == (False, False)
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


def test_trials_can_be_chosen(ward: Ward) -> None:
    (trial,) = trials_of(ward, lambda name: name == "tiny batch")
    assert trial.passed
    assert trial.severity == "warning"
    assert trial.seed == 0


def test_the_table_in_the_documents_is_of_these_diseases() -> None:
    """It is made by `normkit diseases --seeds 10 --markdown docs/diseases.md --force`."""
    text = (Path(__file__).parents[2] / "docs" / "diseases.md").read_text(encoding="utf-8")
    rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in text.splitlines()]
    stories = {row[0]: row[1] for row in rows if len(row) > 2 and row[0] not in ("---", "model")}
    stories.pop("disease")
    wanted = {each.name: each.about for each in HEALTHY}
    assert stories == wanted | {each.name: each.story for each in DISEASES}
