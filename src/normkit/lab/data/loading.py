"""From what an experiment says about its data to the sets it trains and tests on."""

from __future__ import annotations

from pathlib import Path

import torch

from normkit.lab.data import digits, synthetic
from normkit.lab.data.checking import NAMES, check
from normkit.lab.data.finding import Found, find
from normkit.lab.data.making import from_files, from_tensors
from normkit.lab.data.records import Listing, Raw, Sets
from normkit.lab.data.sources import PUBLISHED
from normkit.lab.experiment import Data


def names() -> list[str]:
    """The sets that can be asked for; synthetic takes its sizes with it.

    >>> "cifar10" in names(), "digits" in names()
    (True, True)
    """
    return list(NAMES)


def locate(spec: Data) -> Path | None:
    """Where a set's files are, verified; None for a set that needs none.

    >>> locate(Data("digits"))
    """
    check(spec)
    if spec.name == "digits":
        digits.source()
    found = _found(spec)
    return found.path if found else None


def load(spec: Data, device: torch.device | str = "cpu", workers: int | None = None) -> Sets:
    """The sets that ``spec`` asks for, on the device.

    ``workers`` are processes that decode image files; None chooses by the number of CPUs.

    >>> sets = load(Data("digits", validation=0.1))
    >>> len(sets.train), len(sets.validation), len(sets.test), sets.classes, sets.shape
    (1293, 144, 360, 10, (1, 8, 8))
    """
    check(spec)
    found = _found(spec)
    if found is None:
        raw = digits.make() if spec.name == "digits" else synthetic.make(spec.name)
        return from_tensors(spec, raw, device)
    read = _read(found)
    if isinstance(read, Raw):
        return from_tensors(spec, read, device)
    return from_files(spec, read, device, workers)


def _found(spec: Data) -> Found | None:
    source = PUBLISHED.get(spec.name)
    return find(source, spec.path) if source else None


_kept: dict[object, Raw] = {}  # the last one: runs that follow each other mostly share their data


def _read(found: Found) -> Raw | Listing:
    key = found, tuple(file.stat().st_mtime_ns for file in found.files)
    if key not in _kept:
        read = found.read()
        if isinstance(read, Listing):  # cheap, and a folder can change without its date
            return read
        _kept.clear()
        _kept[key] = read
    return _kept[key]
