"""Lists of image files and their labels: CSV with a line of column names.

path,label,split            split: train or test; or two files, train.csv and test.csv
images/001.jpg,cat,train    paths are relative to the file's folder
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

from normkit.lab.data.classes import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    TEST_NAMES,
    LabelledImages,
    column,
    listing,
)
from normkit.lab.data.records import CorruptData, Listing, MissingData
from normkit.lab.experiment import Data

SPLIT = "split"
DELIMITERS = ",;\t"
EXPECTED = (
    "Expected a CSV file with the columns path, label and split (train or test), or a folder with "
    "train.csv and test.csv."
)


def csv_files(path: Path) -> list[Path]:
    """One file with both parts, or one for each."""
    if path.is_file():
        return [path]
    train = path / "train.csv"
    tests = [path / f"{name}.csv" for name in TEST_NAMES if (path / f"{name}.csv").is_file()]
    if not path.is_dir():
        raise MissingData(f"{path} was not found. {EXPECTED}")
    if not train.is_file() or not tests:
        raise MissingData(f"{path} has no {'test' if train.is_file() else 'train'}.csv. {EXPECTED}")
    return [train, tests[0]]


def read_csv(path: Path, spec: Data) -> Listing:
    files = csv_files(path)
    if len(files) == 2:
        train, test = (_whole(file, spec) for file in files)
        return listing(train, test)
    parts = _by_split(files[0], spec)
    there = [parts[name] for name in TEST_NAMES if name in parts]
    if not parts:
        raise MissingData(f"{files[0]} has no images: there is no line after the names. {EXPECTED}")
    if "train" not in parts or not there:
        raise CorruptData(
            f"{files[0]}: the column {SPLIT} has {', '.join(map(repr, parts))}, expected train and "
            "test."
        )
    return listing(parts["train"], there[0])


def _whole(file: Path, spec: Data) -> LabelledImages:
    images = LabelledImages(str(file))
    for line, _, image, label in _rows(file, spec):
        images.add(image, label, line)
    return images


def _by_split(file: Path, spec: Data) -> dict[str, LabelledImages]:
    parts: dict[str, LabelledImages] = {}
    for line, row, image, label in _rows(file, spec):
        name = (row.get(SPLIT) or "").strip().lower()
        if SPLIT not in row:
            raise CorruptData(f"{file} has no column {SPLIT!r}. {EXPECTED}")
        if name not in ("train", *TEST_NAMES):
            raise CorruptData(
                f"{file}, line {line}: {SPLIT} is {row[SPLIT]!r}, expected train or test."
            )
        parts.setdefault(name, LabelledImages(str(file))).add(image, label, line)
    return parts


def _rows(file: Path, spec: Data) -> Iterator[tuple[int, dict[str, str], str, str]]:
    """Line, the whole row, the image's path and its label."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as content:
            head = content.readline()
            delimiter = max(DELIMITERS, key=head.count)
            content.seek(0)
            reader = csv.reader(content, delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(reader, [])]
            image = names.index(column(names, spec.image, IMAGE_COLUMNS, "image", str(file)))
            label = names.index(column(names, spec.label, LABEL_COLUMNS, "label", str(file)))
            for row in reader:
                if not row:
                    continue
                where = f"{file}, line {reader.line_num}"
                if len(row) != len(names):
                    raise CorruptData(
                        f"{where}: {len(row)} values, expected {len(names)}: {', '.join(names)}."
                    )
                path = os.path.join(file.parent, row[image].strip())
                if not row[label].strip():
                    raise CorruptData(f"{where}: the label is empty.")
                if not os.path.isfile(path):
                    raise MissingData(
                        f"{where}: there is no file {path}. Paths are relative to {file.parent}."
                    )
                yield reader.line_num, dict(zip(names, row, strict=True)), path, row[label].strip()
    except (csv.Error, UnicodeDecodeError) as error:
        raise CorruptData(f"{file} cannot be read as CSV: {error}.") from error
