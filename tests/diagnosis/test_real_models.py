"""The tool that diagnoses models trained on real images: its reading, a detector's modes."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.io import encode_jpeg

import normkit as nk
from tools import frozen_or_not, real_models

CELL = "<object><name>{}</name><bndbox>{}</bndbox></object>"


def test_without_data_it_says_what_it_wants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NORMKIT_DATA", raising=False)
    for tool, arguments in ((real_models, ["pair"]), (frozen_or_not, [])):
        assert tool.main(arguments) == 2
        assert "NORMKIT_DATA" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["", "tasks"])
def test_data_are_found_where_the_lab_finds_them(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had to be in a folder tasks, while the lab also takes them from NORMKIT_DATA itself."""
    (tmp_path / place).mkdir(exist_ok=True)
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    for name in ("bccd.zip", "camvid-320.zip", "pacs-96.zip"):
        with zipfile.ZipFile(tmp_path / place / name, "w") as file:
            file.writestr("a", "b")
    for task, name in real_models.SETS.items():
        assert task in real_models.TASKS
        assert real_models.archive(name).parent == tmp_path / place


def test_boxes_of_nothing_are_left_out() -> None:
    """The blood cells have a few boxes without width, which torchvision's detectors refuse."""

    def box(*sides: int) -> str:
        pairs = zip(real_models.SIDES, sides, strict=True)
        return "".join(f"<{name}>{value}</{name}>" for name, value in pairs)

    cells = CELL.format("WBC", box(1, 2, 5, 6)) + CELL.format("RBC", box(3, 3, 3, 7))
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        file.writestr("BCCD/Annotations/a.xml", f"<annotation>{cells}</annotation>")
        image = encode_jpeg(torch.zeros(3, 8, 8, dtype=torch.uint8))
        file.writestr("BCCD/JPEGImages/a.jpg", image.numpy().tobytes())
    with zipfile.ZipFile(memory) as file:
        x, target = real_models._boxes(file, "BCCD/Annotations/a.xml")
    assert x.shape == (3, 8, 8)
    assert target["boxes"].tolist() == [[1, 2, 5, 6]]
    assert target["labels"].tolist() == [2]


def test_each_way_does_to_the_norms_what_it_says() -> None:
    """Frozen statistics stay in training; calibrated ones are those of the images."""
    images = [[torch.rand(3, 9, 9) + i for _ in range(2)] for i in range(4)]
    batches: frozen_or_not.Batches = [(pair, [None, None]) for pair in images]

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

        def forward(self, x: list[torch.Tensor]) -> torch.Tensor:
            y: torch.Tensor = self.backbone(torch.stack(x))
            return y

    means = {}
    for way in ("kept", "frozen", "calibrated"):
        torch.manual_seed(0)
        model = frozen_or_not.WAYS[way](Detector(), batches).train()
        norm = model.get_submodule("backbone.1")
        before = norm.running_mean.clone()
        model(images[0])
        assert torch.equal(before, norm.running_mean) is (way != "kept"), way
        means[way] = before
    assert not torch.equal(means["calibrated"], means["frozen"])
    with pytest.warns(
        UserWarning, match="seem unlike"
    ):  # the statistics of a new network fit nothing
        assert isinstance(frozen_or_not.group_norm(Detector(), batches).backbone[1], nk.GN)


def test_the_norms_of_a_detector_keep_their_mode() -> None:
    inner = nn.BatchNorm2d(3).eval()
    outer = nn.Sequential(inner).eval()
    with real_models.in_training_mode(outer):
        assert outer.training
        assert not inner.training
    assert not outer.training


@pytest.mark.skipif("NORMKIT_DATA" not in os.environ, reason="needs real photos: set NORMKIT_DATA")
def test_two_inputs_on_photos(capsys: pytest.CaptureFixture[str]) -> None:
    assert real_models.main(["pair", "--steps", "120"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "as trained: no alarm" in lines
    assert "statistics of the first tenth: warning: stale-statistics" in lines
    assert "and calibrated: no alarm" in lines
