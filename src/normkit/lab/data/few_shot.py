"""Sets for few-shot learning: some classes to train on, others, never seen, to be tested on.

Both parts number their classes from 0.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from normkit.lab.data.loaders import libraries
from normkit.lab.data.records import (
    Content,
    CorruptData,
    Files,
    Listing,
    MissingData,
    Raw,
    Split,
    WrongEntry,
)
from normkit.lab.data.trees import FileTree

DRAWINGS = 20  # of each character of Omniglot
SIDE = 105
# of the two small background sets, which share Greek and Latin: 59 characters of 242
NOVEL_ALPHABETS = ("Sanskrit", "Tagalog")
# Oreshkin et al. 2018: fine labels of CIFAR-100 whose superclasses are kept for validation, test
FC100_VALIDATION = (3, 15, 19, 21, 26, 31, 36, 38, 42, 43, 45, 50, 65, 74, 77, 79, 80, 88, 97, 99)
FC100_TEST = (2, 4, 6, 7, 11, 14, 18, 24, 30, 34, 35, 46, 55, 63, 64, 66, 72, 75, 95, 98)


def omniglot(files: Sequence[Path]) -> Raw:
    """Lake et al. 2015: the background alphabets to train on, those of evaluation to test on."""
    background, evaluation = (_tree(file) for file in files)
    return Raw(_drawings([background]), _drawings([evaluation]))


def omniglot_small(files: Sequence[Path]) -> Raw:
    """The two small background sets, with two alphabets kept for the test."""
    trees = [_tree(file) for file in files]
    return Raw(
        _drawings(trees, lambda alphabet: alphabet not in NOVEL_ALPHABETS),
        _drawings(trees, lambda alphabet: alphabet in NOVEL_ALPHABETS),
    )


def _tree(file: Path) -> FileTree:
    return FileTree(file, (file.stem,))


def _drawings(
    trees: Sequence[FileTree], wanted: Callable[[str], bool] = lambda alphabet: True
) -> Split:
    """Every character is a class. What two archives hold both is taken once."""
    characters: dict[str, tuple[FileTree, list[str]]] = {}
    for tree in trees:
        own: dict[str, list[str]] = {}
        for name in tree.names:
            alphabet, _, rest = name.partition("/")
            if name.endswith(".png") and wanted(alphabet):
                own.setdefault(f"{alphabet}/{rest.partition('/')[0]}", []).append(name)
        for character, names in own.items():
            characters.setdefault(character, (tree, names))
    if not characters:
        raise MissingData(
            f"{trees[0].place} has no alphabets: expected ALPHABET/CHARACTER/NAME.png."
        )
    images, labels = [], []
    for label, character in enumerate(sorted(characters)):
        tree, names = characters[character]
        if len(names) != DRAWINGS:
            where = tree.where(character)
            raise CorruptData(f"{where} has {len(names)} drawings, expected {DRAWINGS}.")
        images += [_drawing(tree, name) for name in names]
        labels += [label] * len(names)
    return Split(torch.stack(images), torch.tensor(labels))


def _drawing(tree: FileTree, name: str) -> Tensor:
    """(1, 105, 105) uint8: the strokes white, so that what a crop adds is paper."""
    _, pillow = libraries()
    try:
        with tree.open(name) as content, pillow.open(content) as file:
            image = file.convert("L")
    except (OSError, SyntaxError, ValueError) as error:
        raise CorruptData(f"{tree.where(name)} cannot be read as an image: {error}.") from error
    if image.size != (SIDE, SIDE):
        raise CorruptData(
            f"{tree.where(name)} has {image.width}×{image.height} pixels, expected {SIDE}×{SIDE}."
        )
    rows = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return 255 - rows.view(1, SIDE, SIDE)


def fc100(read: Callable[[Sequence[Path]], Content]) -> Callable[[Sequence[Path]], Raw]:
    """A reader of FC100 from one of CIFAR-100: all 600 images of a class, 60 and 20 classes."""

    def regrouped(files: Sequence[Path]) -> Raw:
        content = read(files)
        assert isinstance(content, Raw)
        images = torch.cat([content.train.images, content.test.images])
        labels = torch.cat([content.train.labels, content.test.labels])
        kept = {*FC100_VALIDATION, *FC100_TEST}
        base = [label for label in range(100) if label not in kept]
        return Raw(_of_classes(images, labels, base), _of_classes(images, labels, FC100_TEST))

    return regrouped


def _of_classes(images: Tensor, labels: Tensor, classes: Sequence[int]) -> Split:
    numbers = torch.full((100,), -1)
    numbers[list(classes)] = torch.arange(len(classes))
    chosen = numbers[labels] >= 0
    return Split(images[chosen], numbers[labels[chosen]])


def mini_imagenet(files: Sequence[Path]) -> Listing:
    """miniImageNet as Ravi & Larochelle 2017 list it: images/, and train.csv, test.csv."""
    lists, folder = files[:2], files[2]
    tree = FileTree(folder)
    train, test = (_listed(file, tree) for file in lists)
    return Listing(train, test, int(train.labels.max()) + 1)


def _listed(file: Path, tree: FileTree) -> Files:
    rows = csv.DictReader(io.StringIO(file.read_text(encoding="utf-8-sig")))
    paths, names = [], []
    for row in rows:
        if not row.get("filename") or not row.get("label"):
            raise WrongEntry(f"{file}, line {rows.line_num}: expected filename,label.")
        if row["filename"] not in tree:
            where = tree.where(row["filename"])
            raise MissingData(f"{where} is not there, and {file}, line {rows.line_num} lists it.")
        paths.append(f"{tree.place}/{row['filename']}")
        names.append(row["label"])
    if not paths:
        raise MissingData(f"{file} lists no images: expected filename,label.")
    numbers = {name: number for number, name in enumerate(sorted(set(names)))}
    return Files(paths, torch.tensor([numbers[name] for name in names]))
