"""Sets of image files: which files, their labels and domains. Nothing is decoded here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from normkit.core.optional_dependencies import require
from normkit.lab.data.records import CorruptData, DomainListing, Files, Listing, MissingData
from normkit.lab.data.trees import IMAGE_ENDINGS, FileTree, tree_of


def tree(files: Sequence[Path]) -> Listing:
    """Two folders, to train and to test on, with a folder of images for each class in them."""
    train, test = files
    classes = _classes(train)
    unknown = sorted({each.name for each in test.iterdir() if each.is_dir()} - set(classes))
    if unknown:
        raise CorruptData(f"{test} has classes that {train} lacks: {', '.join(unknown[:5])}.")
    content = Listing(_tree(train, classes), _tree(test, classes), len(classes))
    _check_every(content.train, train, classes)
    return content


def new_classes(files: Sequence[Path]) -> Listing:
    """The same, but the classes to test on are others, with numbers of their own."""
    train, test = files
    classes, others = _classes(train), _classes(test)
    shared = sorted(set(classes) & set(others))
    if shared:
        raise CorruptData(
            f"{test} has classes that {train} has, too: {', '.join(shared[:5])}. Expected new ones."
        )
    content = Listing(_tree(train, classes), _tree(test, others), len(classes))
    _check_every(content.train, train, classes)
    return content


def _classes(folder: Path) -> list[str]:
    classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
    if not classes:
        raise MissingData(f"{folder} has no folders: expected one for each class, with its images.")
    return classes


def _check_every(part: Files, folder: Path, classes: list[str]) -> None:
    there = set(part.labels.tolist())
    empty = [name for number, name in enumerate(classes) if number not in there]
    if empty:
        raise CorruptData(f"{folder / empty[0]} has no images: expected some of every class.")


def _tree(folder: Path, classes: list[str]) -> Files:
    images = [
        (path, label)
        for label, name in enumerate(classes)
        for path in _images(folder / name)  # sorted: every machine numbers the samples alike
    ]
    if not images:
        raise MissingData(
            f"{folder} has no images. Expected {folder / classes[0] / 'NAME.jpg'} and the like "
            f"({', '.join(sorted(IMAGE_ENDINGS))})."
        )
    return _files(images)


def _images(folder: Path) -> list[str]:
    return sorted(
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if os.path.splitext(name)[1].lower() in IMAGE_ENDINGS
    )


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


def cub(files: Sequence[Path]) -> Listing:
    """CUB-200-2011: three lists of "image-number value", and the images."""
    names, labels, training = (dict(_words(file)) for file in files)
    folder = files[0].parent / "images"
    images = [
        (str(folder / names[number]), int(labels[number]) - 1, training[number] == "1")
        for number in names
        if number in labels and number in training
    ]
    _check_there(path for path, _, _ in images)
    return Listing(
        _files([(path, label) for path, label, trained in images if trained]),
        _files([(path, label) for path, label, trained in images if not trained]),
        len({label for _, label, _ in images}),
    )


def _words(file: Path) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if len(words) != 2:
            raise CorruptData(f"{file}, line {number}: expected a number and a value: {line!r}.")
        pairs.append((words[0], words[1]))
    return pairs


def cars(files: Sequence[Path]) -> Listing:
    """Stanford Cars as torchvision keeps it: annotations of MATLAB, images in two folders."""
    scipy_io = require("scipy.io", "lab", "Stanford Cars, which has annotations of MATLAB,")
    parts = []
    for file, folder in zip(files[:2], files[2:], strict=True):
        rows = scipy_io.loadmat(file, squeeze_me=True)["annotations"]
        parts.append([(str(folder / str(row["fname"])), int(row["class"]) - 1) for row in rows])
    train, test = parts
    _check_there(path for path, _ in [*train, *test])
    return Listing(_files(train), _files(test), len({label for _, label in train}))


def _check_there(paths: Iterable[str]) -> None:
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        more = f" and {len(missing) - 1:,} more" if missing[1:] else ""
        raise MissingData(f"{missing[0]}{more} is listed, but is not there.")


def _files(images: list[tuple[str, int]]) -> Files:
    return Files([path for path, _ in images], torch.tensor([label for _, label in images]))
