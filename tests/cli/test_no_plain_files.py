"""Targets that are no plain files: a pipe or device is written to, a link is followed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normkit.core.atomic_write import atomic_write_all, check_writable, write_text

Run = Callable[..., Any]


def test_force_writes_into_a_pipe(normkit: Run, tmp_path: Path) -> None:
    """--force put a regular file where a pipe or a device had been, and all seemed well."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert normkit("info", "gn", "--json", str(pipe), "--force").status == 0
        assert json.loads(os.read(reader, 1 << 16))
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert not list(tmp_path.glob(".*pipe"))


def test_the_link_stays_and_its_target_is_written(normkit: Run, tmp_path: Path) -> None:
    """The link became a file of its own, and what it had pointed to stayed as it was."""
    (tmp_path / "there").mkdir()
    real, link, again = tmp_path / "there" / "real.json", tmp_path / "a", tmp_path / "b"
    real.write_text("old")
    link.symlink_to(real)
    again.symlink_to("a")
    assert normkit("info", "gn", "--json", str(again), "--force").status == 0
    assert json.loads(real.read_text())
    assert link.is_symlink()
    assert again.is_symlink()
    assert [each.name for each in (tmp_path / "there").iterdir()] == ["real.json"]


def test_a_link_to_nothing_makes_what_it_points_to(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("new.txt")
    write_text(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "new.txt").read_text() == "text"


def test_a_link_to_a_pipe(tmp_path: Path) -> None:
    """As /dev/stdout is one."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        atomic_write_all({link: lambda name: torch.save([1, 2], name)})
        assert os.read(reader, 1 << 16).startswith(b"PK")
    finally:
        os.close(reader)
    assert link.is_symlink()
    assert pipe.is_fifo()


def test_a_full_device_is_an_error_and_no_other_file_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of /dev/full, which became a regular file."""
    device, other = tmp_path / "full", tmp_path / "other"
    device.touch()

    def full(source: Path, stream: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("normkit.core.atomic_write.is_stream", lambda path: path == device)
    monkeypatch.setattr("normkit.core.atomic_write._copy_into", full)
    with pytest.raises(OSError, match=r"No space left on device.*full'"):
        atomic_write_all({other: Path.touch, device: Path.touch})
    assert not other.exists()
    assert not list(tmp_path.glob(".*"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="full"):
        check_writable(device)
