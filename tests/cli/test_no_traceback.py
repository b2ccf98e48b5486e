"""Whatever goes wrong is one line on stderr, with the exit status that the help page names."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import normkit as normkit_package
from normkit.core.atomic_write import atomic_write

Run = Callable[..., Any]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(normkit_package.__file__).parents[1])}
CONVERT = ("convert", "nets:small_net", "--to", "gn")


def one_line(ran: Any, said: str) -> None:
    assert ran.status == 2
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("normkit: ")
    assert said in ran.err


def test_an_error_of_torch_is_one_line(normkit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A RuntimeError of torch, in the middle of a command, came out as a traceback."""

    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory.\nTried to allocate 20 MiB.")

    monkeypatch.setattr("normkit.catalog.find", broken)
    one_line(normkit("info", "bcn"), "RuntimeError: CUDA out of memory. Tried to allocate 20 MiB.")
    with pytest.raises(RuntimeError):
        normkit("--traceback", "info", "bcn")


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_full_disk_names_the_file(
    normkit: Run, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """torch.save and safetensors do not raise OSError when a disk is full, but errors of their own,
    which came out as tracebacks; and an OSError named the temporary file."""

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos 64 vs 0\nmore")

    monkeypatch.setattr("torch.save", full)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    ran = normkit(*CONVERT, "--out", f"new.{ending}")
    one_line(ran, f"new.{ending} could not be written: RuntimeError: [enforce fail")
    assert {name for name in os.listdir() if "new" in name} == set()


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with pytest.raises(PermissionError) as caught:
        atomic_write(tmp_path / "new.pt", denied)
    assert caught.value.filename == str(tmp_path / "new.pt")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc here")
@pytest.mark.parametrize("option", ["--out", "--json"])
def test_a_folder_that_cannot_be_written_is_said_before_any_work(normkit: Run, option: str) -> None:
    """A large model was built and converted before the first byte was refused."""
    name = {"--out": "/proc/new.pt", "--json": "/proc/new.json"}[option]
    out = () if option == "--out" else ("--out", "new.pt")
    ran = normkit("convert", "nets:fails", "--to", "gn", option, name, *out)
    one_line(ran, name)
    assert "no such luck" not in ran.err  # the model was not built


def test_one_name_for_two_files(normkit: Run) -> None:
    """`--html x --json x` wrote one of them over the other."""
    torch.save(torch.randn(8, 3, 9, 9), "x.pt")
    ran = normkit("diagnose", "nets:fails", "--data", "x.pt", "--html", "a", "--json", "a")
    one_line(ran, "a is asked for twice")


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_says_so(normkit: Run, name: str, share: float) -> None:
    """A download that had stopped was "cannot be read as weights alone, … might run code"."""
    state = {"0.weight": torch.randn(300), "b": torch.randn(9)}
    (save_file if name.endswith("s") else torch.save)(state, name)
    whole = Path(name).read_bytes()
    Path(name).write_bytes(whole[: int(share * len(whole))])
    said = "is truncated" if share else "is empty"
    one_line(normkit(*CONVERT, "--weights", name, "--out", "new.pt"), f"{name} {said}")
    one_line(normkit("calibrate", "nets:small_net", "--data", name, "--dry-run"), f"{name} {said}")


def test_a_truncated_npz_says_so(normkit: Run) -> None:
    """zipfile.BadZipFile is no OSError, and came out as a traceback."""
    import numpy

    numpy.savez("x.npz", x=numpy.zeros((4, 3, 9, 9)))
    whole = Path("x.npz").read_bytes()
    Path("x.npz").write_bytes(whole[: len(whole) // 2])
    assert not zipfile.is_zipfile("x.npz")
    one_line(normkit("calibrate", "nets:small_net", "--data", "x.npz", "--dry-run"), "is truncated")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_standard_output_on_a_full_disk() -> None:
    """Python found out at its end: "Exception ignored … No space left on device", status 120."""
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "normkit", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert "No space left on device" in ran.stderr


INTERRUPTED = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
real = builtins.__import__
def importing(name, *more):
    if name == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *more)
builtins.__import__ = importing
from normkit.cli import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [("normkit.commands", ["list"]), ("torch", ["list"]), ("torch", ["--version"])],
)
def test_ctrl_c_while_modules_are_imported(module: str, arguments: list[str]) -> None:
    """Impatient people press it in the seconds that torch takes, and saw forty lines."""
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(module=module, arguments=arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert (ran.returncode, ran.stderr) == (130, "normkit: interrupted\n")


BROKEN_DATA = """
import sys
import torch


def leaves(**_):
    sys.exit(5)


def disk_gone():
    yield torch.randn(8, 3, 8, 8)
    raise OSError("disk gone")


def ends():
    yield torch.randn(8, 3, 8, 8)
    sys.exit(5)


def with_nan():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 3, 8, 8, generator=generator) for _ in range(3)]
    batches[1][0, 0, 0, 0] = float("nan")
    return batches
"""


@pytest.fixture
def broken_data(normkit: Run) -> Run:
    Path("broken.py").write_text(BROKEN_DATA, encoding="utf-8")
    sys.modules.pop("broken", None)
    return normkit


def test_a_model_that_ends_the_program_does_not_choose_the_status(broken_data: Run) -> None:
    """A function that called sys.exit(5) made the command exit with 5, without a word."""
    one_line(broken_data("survey", "broken:leaves"), "broken:leaves could not be built: SystemExit")
    ran = broken_data("calibrate", "nets:small_net", "--data", "broken:leaves", "--dry-run")
    one_line(ran, "broken:leaves failed: SystemExit: 5.")


@pytest.mark.parametrize("command", [("calibrate", "--dry-run"), ("diagnose",)])
@pytest.mark.parametrize(
    ("name", "said"), [("disk_gone", "OSError: disk gone."), ("ends", "SystemExit: 5.")]
)
def test_a_loader_that_fails_is_named(
    broken_data: Run, command: tuple[str, ...], name: str, said: str
) -> None:
    """`normkit: disk gone` did not say of what."""
    ran = broken_data(command[0], "nets:small_net", "--data", f"broken:{name}", *command[1:])
    one_line(ran, f"--data broken:{name} could not be read: {said}")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_standard_output_without_space_is_named(
    normkit: Run, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("normkit.catalog.find", full)
    one_line(normkit("info", "bcn"), "standard output could not be written: [Errno")


@pytest.mark.filterwarnings("always::normkit.errors.NonFiniteWarning")
def test_batches_left_out_are_a_sentence_and_not_counted(broken_data: Run) -> None:
    """A raw warning came out, with a path and a line of source, and 24 images were counted."""
    ran = broken_data(
        "calibrate", "nets:small_net", "--data", "broken:with_nan", "--dry-run", "--json", "-"
    )
    assert ran.status == 0
    first = ran.err.splitlines()[0]
    assert first.startswith("normkit: 1: 1 batch with values that are not finite left out")
    assert "warnings.warn" not in ran.err
    assert "NonFiniteWarning" not in ran.err
    assert json.loads(ran.out)["images"] == 16


def test_a_page_on_standard_output_stands_alone(normkit: Run) -> None:
    """The report for people stood in front of the page."""
    torch.save(torch.randn(16, 3, 8, 8), "x.pt")
    ran = normkit("diagnose", "nets:small_net", "--data", "x.pt", "--html", "-")
    assert ran.out.lstrip().startswith("<!")
    assert "Diagnosis of" in ran.err
    both = normkit("diagnose", "nets:small_net", "--data", "x.pt", "--html", "-", "--json", "-")
    one_line(both, "- is asked for twice")
