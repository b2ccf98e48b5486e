"""Labels of somebody's own images: which class each is, or which line is wrong.

Labels are names of classes, or their numbers from 0 on. The training part says which there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import torch

from normkit.lab.data.records import CorruptData, Files, Listing, MissingData, open_file

TEST_NAMES = ("test", "val", "validation")  # of a part to test on: the first that is there


@dataclass
class LabelledImages:
    """One part of a set as its file says it."""

    source: str  # the file or folder
    unit: str = "line"  # what its places count
    paths: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of each sample, for errors
    open: Callable[[str], BinaryIO] = open_file

    def add(self, path: str, label: str, place: int) -> None:
        self.paths.append(path)
        self.labels.append(label)
        self.places.append(place)

    def where(self, sample: int) -> str:
        return f"{self.source}, {self.unit} {self.places[sample]}"


def listing(
    train: LabelledImages, test: LabelledImages, names: Sequence[str] | None = None
) -> Listing:
    """Both parts with their labels as numbers.

    ``names`` are those of the classes where the file has them; its labels are then numbers.
    """
    for part, purpose in ((train, "train"), (test, "test")):
        if not part.paths:
            raise MissingData(f"{part.source} has no images to {purpose} on.")
    if names is not None:
        known = {str(number): number for number in range(len(names))}
    elif all(label.isdecimal() for label in train.labels):
        known = {str(number): number for number in range(max(map(int, train.labels)) + 1)}
        train.labels, test.labels = (
            [str(int(label)) if label.isdecimal() else label for label in part.labels]
            for part in (train, test)
        )
    else:
        known = {name: number for number, name in enumerate(sorted(set(train.labels)))}
    files = Listing(_numbered(train, known), _numbered(test, known), len(known))
    counts = torch.bincount(files.train.labels, minlength=len(known))
    empty = (counts == 0).nonzero().flatten().tolist()
    if empty:
        named = [names[each] if names is not None else str(each) for each in empty[:5]]
        more = f" and {len(empty) - 5} more" if empty[5:] else ""
        raise CorruptData(
            f"{train.source} has no image to train on of class {', '.join(named)}{more}, and "
            f"{len(known)} classes. Try numbers from 0 on without gaps, or names."
        )
    return files


def _numbered(part: LabelledImages, known: dict[str, int]) -> Files:
    numbers = []
    for sample, label in enumerate(part.labels):
        number = known.get(label)
        if number is None:
            expected = f"one of the {len(known)} classes to train on: {', '.join([*known][:5])}"
            raise CorruptData(
                f"{part.where(sample)}: the label is {label!r}, expected {expected}"
                f"{', …' if len(known) > 5 else ''}."
            )
        numbers.append(number)
    return Files(part.paths, torch.tensor(numbers), part.open)


def column(
    names: Sequence[str], wanted: str | None, usual: Sequence[str], key: str, where: str
) -> str:
    """The column that ``data.image`` or ``data.label`` names, or the one with a usual name."""
    choices = [wanted] if wanted is not None else [each for each in usual if each in names]
    if not choices or choices[0] not in names:
        what = f"has no column {wanted!r}" if wanted is not None else f"has no column for the {key}"
        raise CorruptData(
            f"{where} {what}, but {', '.join(map(repr, names)) or 'none at all'}. "
            f'Try data.{key} = "NAME OF THE COLUMN".'
        )
    return choices[0]


IMAGE_COLUMNS = ("image", "path", "file", "filename", "file_name", "img")
LABEL_COLUMNS = ("label", "labels", "class", "target")
