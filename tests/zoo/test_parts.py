"""The parts of the zoo: quick models, the choice of a sample, processes, records."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from normkit.errors import OptionError
from normkit.models import build
from tools.zoo import models
from tools.zoo.models import ZooModel, choose, with_quick_values, without_values
from tools.zoo.results import HEAD, Outcome, Records, Report, failures, overview, reasons
from tools.zoo.sweep import NoResult, run_in_processes

# ---------------------------------------------------------------- quick models


@pytest.mark.parametrize("reference", ["timm:test_vit", "torchvision:mnasnet0_5"])
def test_models_without_values_are_what_they_are_with(reference: str) -> None:
    real = build(reference)
    with without_values():
        empty = build(reference)
    assert all(t.is_meta for t in empty.state_dict().values())
    assert {k: (v.shape, v.dtype) for k, v in empty.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in real.state_dict().items()
    }
    assert [(n, type(m)) for n, m in empty.named_modules()] == [
        (n, type(m)) for n, m in real.named_modules()
    ]


def test_quick_values_have_the_usual_spread() -> None:
    torch.manual_seed(0)
    usual = nn.Linear(600, 500)
    with with_quick_values():
        quick = nn.Linear(600, 500)
        drawn = torch.empty(300, 1000).normal_(2.0, 3.0)
        small = torch.empty(100).uniform_(-1, 1)
    assert quick.weight.requires_grad
    # the spread of 65,521 draws is known to 1/√(2·65,521) = 0.3 %
    assert quick.weight.std().item() == pytest.approx(usual.weight.std().item(), rel=0.02)
    assert quick.weight.abs().max() <= 600**-0.5
    assert drawn.mean().item() == pytest.approx(2.0, abs=0.1)
    assert drawn.std().item() == pytest.approx(3.0, rel=0.02)
    assert len(small.unique()) > 90
    assert (drawn[:, 0].unique().numel()) > 60  # repetitions do not line up with the rows


# ---------------------------------------------------------------- which models


def test_a_sample_is_small_and_spread() -> None:
    sizes = {"a": (5, 1, 9), "b": (7, 8), "c": (2,)}
    every = [ZooModel(f"timm:{f}{n}", f, 1, n) for f, found in sizes.items() for n in found]
    chosen = [member.reference for member in choose(every, 5)]
    assert chosen == ["timm:a1", "timm:c2", "timm:b7", "timm:a5", "timm:b8"]
    assert [m.reference for m in choose(reversed(every), 5)] == chosen
    assert len(choose(every, 100)) == 6


def test_candidates_are_a_few_of_each_family() -> None:
    every = models.timm_references()
    few = models.few_of_each_family(every)
    assert len(set(few)) == len(few) < len(every)
    assert set(few) <= set(every)
    assert len(few) > 200  # of some hundred families
    assert models.few_of_each_family(few) == few  # so that a sample is the same in a full sweep


def test_description() -> None:
    found = models.describe("torchvision:resnet18")
    assert (found.batch_norms, found.parameters) == (20, 11_689_512)
    assert found.family == "torchvision.models.resnet"


def test_torchvision_is_complete() -> None:
    found = models.torchvision_references()
    for kind in ("resnet50", "fcn_resnet50", "fasterrcnn_resnet50_fpn"):
        assert f"torchvision:{kind}" in found


def test_the_smallest_input_is_found() -> None:
    class Particular(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] < 96:
                raise ValueError("too small")
            return super().forward(x).mean((2, 3))

    args, first = models.smallest_input(Particular(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)))
    assert models.shape_of(args) == "2x3x96x96"
    assert first.names == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert first.finite


def test_gradients_that_are_not_finite_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    assert models.train_once(model, (torch.ones(2, 3),)).finite
    assert not models.train_once(model, (torch.full((2, 3), float("inf")),)).finite
    assert all(p.grad is None for p in model.parameters())


def test_difference_is_relative_to_the_largest() -> None:
    a = torch.tensor([1.0, -4.0])
    assert models.difference([a], [a + torch.tensor([0.0, 1.0])]) == 0.25
    assert models.difference([a], [a[:1]]) == float("inf")


# ---------------------------------------------------------------- processes


def behave(how: str) -> str:
    if how == "fail":
        raise ValueError("on purpose\nin two lines")
    if how == "crash":
        os._exit(3)
    if how == "hang":
        time.sleep(60)
    return f"{how}: {torch.get_num_threads()}"


def test_work_survives_errors_crashes_and_hanging() -> None:
    tasks = ["fine", "fail", "crash", "hang", "well"]
    found = dict(run_in_processes(behave, tasks, jobs=2, limit=2))
    assert found["fine"] == "fine: 1"
    assert found["well"] == "well: 1"
    reasons = {name: f.reason for name, f in found.items() if isinstance(f, NoResult)}
    assert reasons["fail"].startswith("ValueError: on purpose in two lines (test_parts.py:")
    assert reasons["crash"] == "the process ended with exit code 3"
    assert reasons["hang"] == "took longer than 2 s"


# ---------------------------------------------------------------- records


def test_records_survive_an_interruption(tmp_path: Path) -> None:
    records = Records(tmp_path / "r.jsonl")
    assert records.read("now") == {}
    records.add("now", "a", {"x": 1})
    records.add("then", "a", {"x": 2})
    with records.path.open("a", encoding="utf-8") as file:
        file.write('{"stamp": "now", "name": "b", "x"')  # killed while writing
    records.add("now", "c", {"x": 3})
    records.add("now", "a", {"x": 4})
    assert records.read("now") == {"a": {"x": 4}, "c": {"x": 3}}
    assert records.read("then") == {"a": {"x": 2}}


def test_records_do_not_grow_into_other_files(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine", encoding="utf-8")
    with pytest.raises(OptionError, match=r"notes\.txt"):
        Records(other)


def test_reports_come_back_from_json() -> None:
    report = Report(3, "2x3x32x32", 1.5, [], {"bn": Outcome(converted=3, difference=1e-6)})
    assert Report.of(report.to_dict()) == report
    assert report.passed
    report.outcomes["bn"].failures.append("lost")
    assert not Report.of(report.to_dict()).passed


def test_summary_counts() -> None:
    reports = {
        "run timm:a": Report(5, outcomes={
            "bn": Outcome(4, skipped={"lazy": 1}, exact=True, difference=2e-6),
            "gn": Outcome(4, skipped={"lazy": 1}, difference=7.0, failures=["gone"]),
        }),
        "run timm:b": Report(2, outcomes={"bn": Outcome(2, exact=True, difference=3e-6)}),
        "meta timm:a": Report(5, failures=["no"]),
    }  # fmt: skip
    rows = {row[0]: dict(zip(HEAD, row, strict=True)) for row in overview(reports)}
    assert rows["bn"]["models"] == "2"
    assert rows["bn"]["converted"] == "6"
    assert rows["bn"]["skipped"] == "1"
    assert rows["bn"]["their largest difference"] == "3.0e-06"
    assert rows["gn"]["failed"] == "1"
    assert rows["gn"]["their largest difference"] == ""  # of another function
    assert reasons(reports) == [("lazy", 1, 1)]
    assert failures(reports) == [
        ("timm:a", "on meta", "", "no"),
        ("timm:a", "run", "gn", "gone"),
    ]
