"""Small files in the formats of the published sets, and a registry that expects exactly those."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from normkit.lab.data import files, sources
from normkit.lab.data.files import File, FileLayout, PublishedSet

Publish = Callable[..., PublishedSet]


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads what another has verified, or a folder that the person has set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memory"))
    monkeypatch.delenv("NORMKIT_DATA", raising=False)


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Pretends that the files in a folder are what was published under a name."""

    def publish(name: str, folder: Path, samples: tuple[int, int], **other: object) -> PublishedSet:
        source = sources.PUBLISHED[name]
        layouts = tuple(_expecting(layout, folder) for layout in source.layouts)
        made = dataclasses.replace(source, layouts=layouts, samples=samples, **other)
        monkeypatch.setitem(sources.PUBLISHED, name, made)
        return made

    return publish


def _expecting(layout: FileLayout, folder: Path) -> FileLayout:
    return dataclasses.replace(
        layout, files=tuple(_measured(each, folder) for each in layout.files)
    )


def _measured(file: object, folder: Path) -> object:
    """With the checksum and the size of the file of this name, wherever in the folder it is."""
    if not isinstance(file, File) or (file.md5, file.size) == (None, None):
        return file
    found = [path for name in file.names for path in folder.rglob(name) if path.is_file()]
    if not found:
        return file
    content = files.checksum(found[0], file.packed)
    md5 = content if file.md5 else None
    size = found[0].stat().st_size if file.size else None
    return dataclasses.replace(file, md5=md5, size=size)
