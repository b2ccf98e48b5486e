"""Whatever is wrong with the input is said in one line, with exit status 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normkit as normkit_package
from normkit.cli import main

Run = Callable[..., Any]
OUT = ("--out", "new.safetensors")
# a relative path to normkit would not be found from another working directory
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(normkit_package.__file__).parents[1]),
    "PYTHONIOENCODING": "utf-8",
}

REFUSED = {
    "unknown layer": (("info", "bcnn"), "Did you mean 'bcn'?"),
    "no such form": (("survey", "resnet50"), "Expected timm:NAME"),
    "unknown model of timm": (("survey", "timm:resnet5O"), "Did you mean 'resnet50'"),
    "nothing like it": (("survey", "timm:qqqqqq"), "timm.list_models()"),
    "unknown model of torchvision": (("survey", "torchvision:resnet19"), "'resnet18'"),
    "no module": (("survey", "nosuchfile:net"), "No module named 'nosuchfile'"),
    "a file": (("survey", "nets.py:net"), "Try nets:net."),
    "no such callable": (("survey", "nets:smal_net"), "Did you mean 'small_net'?"),
    "no callable": (("survey", "nets:number"), "is a int, expected a callable"),
    "no model": (("survey", "nets:gives_text"), "gave a str, expected a torch.nn.Module"),
    "constructor fails": (("survey", "nets:fails"), "RuntimeError: no such luck"),
    "constructor refuses": (
        ("survey", "nets:small_net", "--build", "depth=3"),
        "unexpected keyword argument 'depth'",
    ),
    "bad pair": (("survey", "nets:small_net", "--build", "width"), "Expected KEY=VALUE"),
    "twice": (
        ("survey", "nets:small_net", "--build", "width=1", "--build", "width=2"),
        "width twice",
    ),
    "matches nothing": (("survey", "nets:small_net", "--where", "layer9.*"), "layer9.*"),
    "empty where": (("survey", "nets:small_net", "--where", ","), "Expected a path"),
    "bad shape": (("survey", "nets:small_net", "--example", "1x3xA"), "Expected sizes"),
    "does not run": (("survey", "nets:small_net", "--example", "1x4x9x9"), "channels"),
    "unknown target": (("convert", "nets:small_net", "--to", "bcnn", *OUT), "'bcn'"),
    "target for weights": (("convert", "nets:small_net", "--to", "ws", *OUT), "standardize"),
    "unknown option": (
        ("convert", "nets:small_net", "--to", "gn", "--option", "group=2", *OUT),
        "Did you mean 'groups'?",
    ),
    "impossible option": (
        ("convert", "nets:small_net", "--to", "gn", "--option", "groups=3", *OUT),
        "groups=3",
    ),
    "probe fails": (
        ("convert", "nets:small_net", "--to", "gn", "--example", "2x4x9x9", *OUT),
        "channels",
    ),
    "no output": (("convert", "nets:small_net", "--to", "gn"), "--out is missing"),
    "no ending": (
        ("convert", "nets:small_net", "--to", "gn", "--out", "new.bin"),
        ".safetensors, .pt, .pth",
    ),
    "no directory": (
        ("convert", "nets:small_net", "--to", "gn", "--out", "no/new.pt"),
        "no directory",
    ),
    "no weights": (
        ("convert", "nets:small_net", "--to", "gn", "--weights", "no.pt", *OUT),
        "There is no file no.pt",
    ),
    "nothing to convert": (
        ("convert", "torch.nn:Linear", "--build", "in_features=2", "--build", "out_features=2",
         "--to", "gn", *OUT),
        "nothing was written",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*no layer is converted")
@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_one_line_and_status_2(normkit: Run, arguments: tuple[str, ...], said: str) -> None:
    before = {name: Path(name).read_bytes() for name in os.listdir() if Path(name).is_file()}
    ran = normkit(*arguments)
    assert ran.status == 2
    assert ran.err.startswith("normkit: ")
    assert ran.err.count("\n") == 1
    assert said in ran.err
    assert {n: Path(n).read_bytes() for n in os.listdir() if Path(n).is_file()} == before


def state(**changes: Any) -> dict[str, Any]:
    """The state of nets:small_net, with changes; None takes a name away."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
    other = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8))
    whole = {
        **net.state_dict(),
        **{f"{int(k[0]) + 3}{k[1:]}": v for k, v in other.state_dict().items()},
        **{f"8.{k}": v for k, v in nn.Linear(8, 3).state_dict().items()},
        **{name.replace("_", ".", 1): value for name, value in changes.items()},
    }
    return {name: value for name, value in whole.items() if value is not None}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (state(**{"1_weight": None}), "1 missing (1.weight)"),
        (state(**{"9_weight": torch.ones(1)}), "1 unexpected (9.weight)"),
        (state(**{"1_weight": torch.ones(9)}), "1.weight is (9,) in the file and (8,) in the"),
        ({"fc.weight": torch.ones(1)}, "12 missing (0.weight, 1.weight, 1.bias, …); 1 unexpected"),
        ([torch.ones(1)], "holds a list"),
        ({}, "holds a dict"),
    ],
)
def test_weights_that_do_not_fit(normkit: Run, given: Any, said: str) -> None:
    torch.save(given, "given.pt")
    ran = normkit("convert", "nets:small_net", "--to", "gn", "--weights", "given.pt", *OUT)
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert said in ran.err
    assert not Path("new.safetensors").exists()


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("name", ["given.pt", "given.safetensors"])
def test_weights_that_are_no_weights(normkit: Run, name: str) -> None:
    for content in (b"", b"nonsense" * 9, b"hello" * 99, None):
        if content is None:
            torch.save({"0.weight": Harmful()}, name)
        else:
            Path(name).write_bytes(content)
        ran = normkit("convert", "nets:small_net", "--to", "gn", "--weights", name, *OUT)
        assert ran.status == 2
        assert ran.err.count("\n") == 1
        assert name in ran.err
    assert not Path("harm").exists()


def test_traceback_if_asked_for(normkit: Run) -> None:
    with pytest.raises(LookupError):
        normkit("--traceback", "info", "bcnn")


BLOCKED = """
import contextlib, io, json, sys

class Blocked:
    package = None

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
found = {}
for Blocked.package, (arguments, _) in json.loads(sys.argv[1]).items():
    for name in [name for name in sys.modules if name.split(".")[0] == Blocked.package]:
        del sys.modules[name]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        from normkit.cli import main  # for the first time without rich, which nearly all need
        found[Blocked.package] = main(arguments), said.getvalue()
print(json.dumps(found))
"""
OPTIONAL = {
    "rich": (["list"], "cli"),
    "timm": (["survey", "timm:resnet18"], "models"),
    "torchvision": (["survey", "torchvision:resnet18"], "models"),
    "safetensors": (["convert", "nets:small_net", "--to", "gn", *OUT], "cli"),
}


def test_missing_packages() -> None:
    """In one process of its own, since starting one takes seconds."""
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps(OPTIONAL)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert list(found) == list(OPTIONAL)
    for package, (_, extra) in OPTIONAL.items():
        status, said = found[package]
        assert status == 2, said
        assert said.count("\n") == 1
        assert f"needs {package}" in said
        assert f"pip install 'normkit[{extra}]'" in said


def test_python_m(nets: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "normkit", "survey", "nets:small_net"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=ENVIRONMENT,
    )
    assert ran.returncode == 0, ran.stderr
    assert "2 of 2 norms" in ran.stdout


def test_a_reader_that_stops_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, spoken = os.pipe()
    os.close(heard)
    with os.fdopen(spoken, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert main(["list"]) == 0
