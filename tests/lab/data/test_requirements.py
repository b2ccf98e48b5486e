"""Layers and the small sets need torch alone; real files are read where there are some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normkit.lab.data import MissingData, Sets, load
from normkit.lab.experiment import Data

from .small_files import cifar_parts, unpacked

REAL = os.environ.get("NORMKIT_DATA")

ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numpy", "scipy", "sklearn", "torchvision", "PIL", "rich"}:
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
import torch
import normkit as nk

layer = nk.make("bn", 4)
layer(torch.randn(2, 4, 3, 3, requires_grad=True)).sum().backward()
print(layer.weight.grad is not None)

from normkit.errors import NormkitError
from normkit.lab.data import load, locate
from normkit.lab.data.array_files import PYTHON_10
from normkit.lab.experiment import Data
from pathlib import Path

sets = load(Data("synthetic:1x8x8x10x1472", flip=True, crop=1))
print(len(list(sets.train.batches(64, seed=1, shuffle=True, augment=True))))
folder = Path(sys.argv[1])
raw = PYTHON_10.unpacked(sorted(folder.iterdir()))
print(len(raw.train.labels), "numpy" in sys.modules)
try:
    locate(Data("digits"))
except NormkitError as error:
    print("normkit[lab]" in str(error))
"""


def test_torch_alone(tmp_path: Path) -> None:
    unpacked(tmp_path / "py", cifar_parts("cifar10", binary=False, count=2))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, str(tmp_path / "py")],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True", "23", "10", "False", "True"]


real = pytest.mark.skipif(not REAL, reason="NORMKIT_DATA is not set: no real files to read")


def really(name: str, monkeypatch: pytest.MonkeyPatch) -> Sets:
    monkeypatch.setenv("NORMKIT_DATA", str(REAL))
    try:
        return load(Data(name))
    except MissingData:
        pytest.skip(f"{name} is not in NORMKIT_DATA")


@real
@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("mnist", [0.1307]),
        ("fashion-mnist", [0.2860]),
        ("cifar10", [0.4914, 0.4822, 0.4465]),
        ("cifar100", [0.5071, 0.4865, 0.4409]),
    ],
)
def test_means_of_real_files(name: str, mean: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    train = really(name, monkeypatch).train
    found = (-train.shift / train.scale / 255).flatten()
    assert torch.allclose(found, torch.tensor(mean), rtol=0, atol=6e-5)  # as people quote them


@real
def test_classes_of_real_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = really("usps", monkeypatch)  # counts as published beside the files
    train = [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
    test = [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]
    assert torch.bincount(sets.train.labels).tolist() == train
    assert torch.bincount(sets.test.labels).tolist() == test
