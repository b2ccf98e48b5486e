"""A nursery for all tests, and a store of its own for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.sweep.nursery import Nursery


@pytest.fixture(scope="session")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line for each step of a pretended training: the process, and the run."""
    return tmp_path_factory.mktemp("journal") / "steps.txt"


@pytest.fixture(scope="session")
def nursery(journal: Path) -> Iterator[Nursery]:
    made = Nursery(journal)
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"
