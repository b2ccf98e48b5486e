"""normkit convert: what it prints, what it writes, and that both are true."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import normkit as nk
from normkit import checkpoints, models

Run = Callable[..., Any]


@pytest.fixture
def weights() -> Path:
    """The state of a small net after some batches."""
    model = models.build("nets:small_net")
    for _ in range(3):
        model(3 * torch.randn(8, 3, 9, 9) + 1)
    path = Path("weights.pt")
    torch.save(model.state_dict(), path)
    return path


def convert(normkit: Run, *more: str, to: str = "rbn") -> Any:
    return normkit("convert", "nets:small_net", "--to", to, "--example", "2x3x9x9", *more)


def test_weights_and_certificate(normkit: Run, weights: Path) -> None:
    ran = convert(normkit, "--weights", str(weights), "--out", "new.safetensors")
    assert ran.status == 0, ran.err
    assert "Exact to rounding" in ran.out
    assert "2 of 2 norms" in ran.out
    written = json.loads(Path("new.certificate.json").read_text(encoding="utf-8"))
    assert written["certificate"]["exact"] is True
    assert written["certificate"]["converted"] == 2
    assert [step["path"] for step in written["steps"]] == ["1", "4"]
    assert written["to"] == "rbn"
    assert written["weights"] == "weights.pt"
    old, new = torch.load(weights), load_file("new.safetensors")
    assert torch.equal(old["1.running_mean"], new["1.running_mean"])
    expected = {"nets.py", "new.certificate.json", "new.safetensors", "weights.pt"}
    assert set(os.listdir()) - {"__pycache__"} == expected


def program(out: str) -> str:
    """The code that the command printed at the end."""
    lines = out.rpartition("To load the weights:")[2].splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines)


@pytest.mark.parametrize("file", ["new.safetensors", "new.pt", "new.pth"])
@pytest.mark.parametrize(
    "more", [(), ("--option", "groups=4", "--where", "4", "--build", "width=16")]
)
def test_the_printed_program_loads_the_result(
    normkit: Run, file: str, more: tuple[str, ...]
) -> None:
    ran = convert(normkit, "--out", file, *more, to="gn")
    assert ran.status == 0, ran.err
    names: dict[str, Any] = {}
    exec(program(ran.out), names)
    loaded = names["model"].state_dict()
    state = load_file(file) if file.endswith("safetensors") else torch.load(file)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert isinstance(names["model"][4], nk.GN)
    assert names["model"][4].groups == (4 if more else nk.GN(8).groups)
    assert isinstance(names["model"][1], nn.BatchNorm2d if more else nk.GN)


@pytest.mark.parametrize("reference", ["timm:test_resnet", "torchvision:mnasnet0_5"])
def test_models_of_the_libraries(normkit: Run, reference: str) -> None:
    ran = normkit(
        *("convert", reference, "--to", "bn", "--build", "num_classes=3", "--out", "new.pt"),
        *("--example", "2x3x32x32"),
    )
    assert ran.status == 0, ran.err
    names: dict[str, Any] = {}
    exec(program(ran.out), names)
    assert any(isinstance(m, nk.BN) for m in names["model"].modules())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in names["model"].modules())


@pytest.mark.parametrize("reference", ["nets:ready", "nets:Nets.small"])
def test_the_program_for_other_references(
    normkit: Run, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    ran = normkit("convert", reference, "--to", "bn", "--example", "2x3x9x9", "--out", "new.pt")
    assert ran.status == 0, ran.err
    sys.modules.pop("nets")  # the instance in it is converted
    monkeypatch.syspath_prepend(".")  # as for every script in this directory
    names: dict[str, Any] = {}
    exec(program(ran.out), names)
    assert isinstance(names["model"][4], nk.BN)


def test_shared_tensors_are_written(normkit: Run) -> None:
    ran = normkit(
        *("convert", "nets:Shared", "--to", "bn", "--example", "2x3x5x5"),
        *("--out", "shared.safetensors"),
    )
    assert ran.status == 0, ran.err
    state = load_file("shared.safetensors")
    assert torch.equal(state["norm.weight"], state["again.weight"])


def test_dry_run_writes_nothing(normkit: Run) -> None:
    before = set(os.listdir())
    ran = normkit("convert", "nets:small_net", "--to", "gn", "--dry-run")
    assert ran.status == 0, ran.err
    assert "BatchNorm2d(8) → GN(8" in ran.out
    assert set(os.listdir()) - before <= {"__pycache__"}


def test_existing_files_are_kept(normkit: Run) -> None:
    out = ("--out", "new.safetensors")
    for name in ("new.safetensors", "new.certificate.json"):
        Path(name).write_text("mine", encoding="utf-8")
        ran = convert(normkit, *out)
        assert ran.status == 2
        assert f"{name} exists already" in ran.err
        assert Path(name).read_text(encoding="utf-8") == "mine"
        Path(name).unlink()
    assert convert(normkit, *out).status == 0
    assert convert(normkit, *out).status == 2
    assert convert(normkit, *out, "--force").status == 0


def test_files_are_complete_or_not_there(normkit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(state: Any, path: Any, metadata: Any = None) -> None:
        Path(path).write_bytes(b"half a fi")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    Path("new.safetensors").write_text("older", encoding="utf-8")
    ran = convert(normkit, "--out", "new.safetensors", "--force")
    assert ran.status == 2
    assert ran.err == "normkit: No space left on device\n"
    assert Path("new.safetensors").read_text(encoding="utf-8") == "older"
    assert set(os.listdir()) <= {"nets.py", "__pycache__", "new.safetensors"}


def test_files_are_readable_by_others(normkit: Run) -> None:
    mask = os.umask(0o022)
    try:
        assert convert(normkit, "--out", "new.safetensors").status == 0
    finally:
        os.umask(mask)
    for name in ("new.safetensors", "new.certificate.json"):
        assert Path(name).stat().st_mode & 0o777 == 0o644


FORMS = ["plain", "zip", "nested", "deep", "wrapped", "compiled", "both", "part", "safetensors"]


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_many_forms(normkit: Run, weights: Path, form: str) -> None:
    state = torch.load(weights)
    forms: dict[str, Any] = {
        "plain": state,
        "nested": {"epoch": 3, "state_dict": state},
        "wrapped": {f"module.{name}": value for name, value in state.items()},
        "compiled": {f"_orig_mod.{name}": value for name, value in state.items()},
        "both": {"model": {f"_orig_mod.module.{name}": value for name, value in state.items()}},
        "part": {"state_dict": {f"net.{name}": value for name, value in state.items()}},
        "deep": {"model": {"epoch": 3, "state_dict": state}, "optimizer": {"state": {}}},
        "zip": state,
    }
    file = f"given.{form}"
    if form == "safetensors":
        save_file({f"_orig_mod.{name}": value for name, value in state.items()}, file)
    else:  # the form of torch before 1.6 is no zip file
        torch.save(forms[form], file, _use_new_zipfile_serialization=form != "plain")
    ran = convert(normkit, "--weights", file, "--out", "new.pt")
    assert ran.status == 0, ran.err
    assert torch.equal(torch.load("new.pt")["1.running_mean"], state["1.running_mean"])


def test_a_model_whose_only_part_is_called_module(tmp_path: Path) -> None:
    """The word of a wrapper was taken away although the model has it, too."""
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    torch.save({name: value + 1 for name, value in model.state_dict().items()}, tmp_path / "a.pt")
    expected = model["module"].weight.detach() + 1
    checkpoints.load(model, tmp_path / "a.pt")
    assert torch.equal(model["module"].weight, expected)


def test_old_weights_without_counters(normkit: Run, weights: Path) -> None:
    state = {k: v for k, v in torch.load(weights).items() if "num_batches" not in k}
    torch.save(state, weights)
    assert convert(normkit, "--weights", str(weights), "--out", "new.pt").status == 0


def test_fitted_on_images(normkit: Run, weights: Path) -> None:
    """The printed program loads the fitted weights, also where groups were chosen by the fit."""
    images = torch.randn(24, 3, 9, 9)
    torch.save(3 * images + 1, "images.pt")
    more = ("--weights", str(weights), "--fit", "images.pt", "--batch", "8", "--out", "new.pt")
    ran = convert(normkit, *more, "--option", "groups=[1,2]", "--distill", "2", to="gn")
    assert ran.status == 0, ran.err
    assert "Fitted on 20 images" in ran.out
    written = json.loads(Path("new.certificate.json").read_text(encoding="utf-8"))
    assert written["certificate"]["fit"]["images"] == 24
    assert written["fit"] == "images.pt"
    names: dict[str, Any] = {}
    exec(program(ran.out), names)
    state = torch.load("new.pt")
    assert torch.equal(names["model"].state_dict()["1.weight"], state["1.weight"])


def test_fitted_with_standardized_weights(normkit: Run, weights: Path) -> None:
    """Python had Fit(standardize=), the command nothing; its program must load such weights."""
    torch.save(torch.randn(12, 3, 9, 9), "images.pt")
    more = ("--weights", str(weights), "--fit", "images.pt", "--out", "new.pt")
    ran = convert(normkit, *more, "--fit-standardize", "ws", "--fit-all", to="ln")
    assert ran.status == 0, ran.err
    names: dict[str, Any] = {}
    exec(program(ran.out), names)
    state = torch.load("new.pt")
    assert "0.parametrizations.weight.original" in state
    assert all(torch.equal(value, state[n]) for n, value in names["model"].state_dict().items())
    ran = convert(normkit, *more, "--fit-standardize", "sw", "--force", to="ln")
    assert ran.status != 0
    assert "no method 'sw'. Known: cwn, wn, ws" in ran.err


@pytest.mark.parametrize("option", [("--distill", "5"), ("--fit-standardize", "ws")])
def test_what_goes_on_from_a_fit_needs_images(normkit: Run, option: tuple[str, str]) -> None:
    ran = convert(normkit, *option, "--dry-run")
    assert ran.status != 0
    assert f"{option[0]} goes on from a fit: give images with --fit" in ran.err


def test_a_folder_of_images_without_classes(normkit: Run, weights: Path) -> None:
    pil = pytest.importorskip("PIL.Image", reason="Pillow writes the images")
    pytest.importorskip("torchvision", reason="torchvision reads them")
    Path("photos").mkdir()
    generator = torch.Generator().manual_seed(0)
    for i in range(6):
        pixels = torch.randint(256, (12, 12, 3), generator=generator, dtype=torch.uint8)
        pil.fromarray(pixels.numpy()).save(f"photos/{i}.png")
    ran = convert(
        normkit, "--weights", str(weights), "--fit", "photos", "--size", "9", "--out", "new.pt",
        "--mean", *["0.4"] * 3, "--std", *["0.1"] * 3, to="ln",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert "Fitted on 5 images" in ran.out
