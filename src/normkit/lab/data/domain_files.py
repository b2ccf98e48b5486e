"""Folders DOMAIN/CLASS/NAME.jpg (PACS) and DOMAIN/images/CLASS/NAME.jpg (Office-31); MNIST and USPS
side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from normkit.lab.data.array_files import IDX_FILES, read_idx, read_usps
from normkit.lab.data.map_files import IMAGE_ENDINGS
from normkit.lab.data.records import (
    CorruptData,
    DigitDomains,
    DomainListing,
    Files,
    MissingData,
)
from normkit.lab.data.trees import FileTree, tree_of


def domains(files: Sequence[Path]) -> DomainListing:
    """A folder is a domain, and that of an image its class; all domains have all classes."""
    return _by_domain(tree_of(files, ("PACS", "kfold", "office31", "Original_images")))


def domains_folder(files: Sequence[Path]) -> DomainListing:
    """Somebody's own domains, by whatever names, in a folder."""
    return _by_domain(FileTree(files[0]))


def _by_domain(tree: FileTree) -> DomainListing:
    found: dict[str, dict[str, list[str]]] = {}
    for name in tree.names:
        parts = name.split("/")
        if len(parts) > 2 and name.lower().endswith(IMAGE_ENDINGS):
            found.setdefault(parts[0], {}).setdefault(parts[-2], []).append(name)
    if len(found) < 2:
        raise MissingData(f"{tree.place} has no two domains: expected DOMAIN/CLASS/NAME.jpg.")
    classes = sorted({name for own in found.values() for name in own})
    for domain, own in found.items():
        if lacking := [name for name in classes if name not in own]:
            raise CorruptData(f"{tree.where(domain)} has no images of {lacking[0]!r}.")
    return DomainListing(
        {
            domain: Files(
                [name for each in classes for name in own[each]],
                torch.tensor([i for i, each in enumerate(classes) for _ in own[each]]),
                tree.open,
            )
            for domain, own in found.items()
        },
        len(classes),
    )


def digits(files: Sequence[Path]) -> DigitDomains:
    """The files of MNIST, then those of USPS."""
    each = len(IDX_FILES)
    return DigitDomains({"mnist": read_idx(files[:each]), "usps": read_usps(files[each:])}, 10)
