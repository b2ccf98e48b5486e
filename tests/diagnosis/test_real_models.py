"""The tool that diagnoses models trained on real images: its reading, a detector's modes."""

from __future__ import annotations

import io
import os
import zipfile

import pytest
import torch
from torch import nn
from torchvision.io import encode_jpeg

from tools import real_models

CELL = "<object><name>{}</name><bndbox>{}</bndbox></object>"


def test_without_data_it_says_what_it_wants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NORMKIT_DATA", raising=False)
    assert real_models.main(["pair"]) == 2
    assert "NORMKIT_DATA" in capsys.readouterr().err


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
