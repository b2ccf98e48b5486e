"""A checkpoint that finds no room on its disk."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.train.stand_ins import network, run, sets
from normkit.lab.sweep.worker import describe_error, disk_full_cause
from normkit.lab.train import Training
from normkit.lab.train.checkpoint import Checkpointer


@pytest.fixture
def no_room() -> Iterator[None]:
    """No file may get longer than 8 kB: the kernel says so as it does of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def test_the_message_names_the_file_and_the_last_one_stays(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """torch.save hides the error of the disk behind one of its own, without a name."""
    training, file = Training(run(), sets(), model=network()), tmp_path / "run.pt"
    checkpointer = Checkpointer(file, 0.0)
    checkpointer.save(training)
    before = file.read_bytes()
    assert len(before) > 8192
    training.step()
    request.getfixturevalue("no_room")
    with pytest.raises(OSError, match=r"run\.pt") as error:
        checkpointer.save(training)
    full = disk_full_cause(error.value)
    assert isinstance(full, OSError)
    assert full.errno == errno.EFBIG
    assert str(file) in describe_error(full)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]  # and nothing half-written
