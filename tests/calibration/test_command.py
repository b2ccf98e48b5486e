"""normkit calibrate: files in, files out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from normkit import cli
from normkit.calibration import Statistics, apply_statistics

MODULE = """
import torch
from torch import nn

def net(width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(),
                         nn.Conv2d(width, width, 3), nn.BatchNorm2d(width))

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, images: list[torch.Tensor]):
        return [self.layers(x[None]) for x in images]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"nets_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return Path(name)


def images(n: int = 30) -> Tensor:
    return 3 + torch.randn(n, 3, 8, 8)


def call(here: Path, *arguments: str, model: str = "") -> int:
    return cli.main(["calibrate", model or f"{here}:net", *arguments])


def test_tensor_files_of_each_kind_give_the_same(here: Path) -> None:
    x = images()
    torch.save(x, "x.pt")
    torch.save({"images": x, "labels": torch.arange(30)}, "d.pth")
    save_file({"inputs": x}, "x.safetensors")
    np.savez("x.npz", x=x.numpy().astype(np.float64))
    torch.manual_seed(0)
    assert call(here, "--data", "x.pt", "--out", "first.pt") == 0
    save_file(torch.load("first.pt"), "weights.safetensors")
    found = []
    for i, name in enumerate(("x.pt", "d.pth", "x.safetensors", "x.npz")):
        to = f"{i}.safetensors"
        more = ("--weights", "weights.safetensors", "--batch", "7", "--out", to)
        assert call(here, "--data", name, *more) == 0
        found.append(load_file(to))
    for state in found[1:]:
        assert all(torch.equal(state[k], v) for k, v in found[0].items())
    assert found[0]["1.running_mean"].abs().max() > 0.1


def test_lists_of_images_are_for_detectors(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A detector could not be calibrated or diagnosed by a command: a file with lists of images
    "holds 0 tensors"."""
    sizes = [(8, 8), (9, 12), (10, 8), (8, 11), (12, 12)]
    photos = [3 + torch.randn(3, *size) for size in sizes]
    targets = [{"boxes": torch.ones(1, 4), "labels": torch.ones(1).long()} for _ in photos]
    forms = {
        "images": photos,
        "two_images": photos[:2],
        "lists": [photos[:2], photos[2:]],
        "pairs": [(photos[:2], targets[:2]), (photos[2:], targets[2:])],
        "one_batch": (photos, targets),
    }
    for name, form in forms.items():
        torch.save(form, f"{name}.pt")
        more = ("--data", f"{name}.pt", "--batch", "2")
        out = ("--statistics", f"{name}.safetensors")
        torch.manual_seed(0)  # the same weights
        assert call(here, *more, *out, model=f"{here}:Detector") == 0
        assert f"from {2 if name == 'two_images' else 5} images" in capsys.readouterr().out
        assert cli.main(["diagnose", f"{here}:Detector", *more]) == 0
        assert "Traceback" not in capsys.readouterr().err
    means = [Statistics.load(f"{name}.safetensors")["layers.1"].mean for name in forms]
    for mean in means[2:]:
        torch.testing.assert_close(mean, means[0])


def test_it_prints_the_table_and_writes_statistics(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(images(200), "x.pt")
    more = ("--until", "0.5", "--statistics", "day.safetensors", "--build", "width=8")
    assert call(here, "--data", "x.pt", "--batch", "16", *more) == 0
    said = capsys.readouterr().out
    assert "2 norms calibrated from 32 images in 2 batches" in said
    assert "met after 32 images" in said
    assert "Written: day.safetensors." in said
    found = Statistics.load("day.safetensors")
    assert list(found) == ["1", "4"]
    model = torch.nn.Sequential(
        torch.nn.Identity(), torch.nn.BatchNorm2d(8), *[torch.nn.Identity()] * 2,
        torch.nn.BatchNorm2d(8),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="other weights"):  # it has none but those of its norms
        apply_statistics(model, found)
    assert not Path("x.safetensors").exists()
    assert call(here, "--data", "x.pt", "--dry-run") == 0
    assert "Nothing was written" in capsys.readouterr().out


def test_a_directory_of_images(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    for kind in ("a", "b"):
        Path("photos", kind).mkdir(parents=True)
        for i in range(3):
            pixels = np.random.randint(0, 255, (40, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(f"photos/{kind}/{i}.png")
    more = ("--size", "16", "--mean", "0", "0", "0", "--std", "1", "1", "1", "--batch", "4")
    assert call(here, "--data", "photos", "--dry-run", *more) == 0
    said = capsys.readouterr().out
    assert "from 6 images in 2 batches" in said
    assert f"{6 * 14 * 14:,}" in said  # values behind each channel of the first norm


BAD = {
    "no_data": (["--data", "none.pt"], "no file or directory none.pt"),
    "ending": (["--data", "x.txt"], "expected .pt"),
    "no_tensor": (["--data", "empty.pt"], "holds 0 tensors"),
    "several": (["--data", "two.pt"], "holds 2 tensors (a, b)"),
    "words": (["--data", "words.pt"], "a list of images (C, H, W) or of batches"),
    "garbage": (["--data", "bad.pt"], "cannot be read as tensors"),
    "empty_dir": (["--data", "nothing"], "nothing"),
    "shape": (["--data", "gray.pt"], "batch 1, (5, 1, 8, 8)"),
    "batch": (["--data", "x.pt", "--batch", "0"], "--batch got 0"),
    "until": (["--data", "x.pt", "--until", "-1"], "until"),
    "exists": (["--data", "x.pt", "--out", "x.pt"], "exists already"),
    "out_ending": (["--data", "x.pt", "--out", "y.bin"], "end in"),
    # the work of an hour was done, and its result dropped with a line at the end
    "dropped": (["--data", "x.pt"], "--out FILE keeps the weights"),
    "no_norms": (["--data", "x.pt"], "no normalization layers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(images(5), "x.pt")
    torch.save(images(5)[:, :1], "gray.pt")
    torch.save({}, "empty.pt")
    torch.save(["a", "b", "c"], "words.pt")
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, "two.pt")
    Path("x.txt").write_text("1")
    Path("bad.pt").write_bytes(b"garbage")
    Path("nothing").mkdir()
    arguments, said = BAD[name]
    if "--out" not in arguments and name != "dropped":
        arguments = [*arguments, "--dry-run"]
    model = "torch.nn:ReLU" if name == "no_norms" else ""
    assert call(here, *arguments, model=model) == 2
    error = capsys.readouterr().err
    assert error.startswith("normkit: ")
    assert said in error
    assert error.count("\n") == 1
