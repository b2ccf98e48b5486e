"""Hugging Face data sets on disk: what save_to_disk wrote, and folders of parquet files.

Both are tables with a column of encoded images and one of labels. Arrow files are mapped into
memory and read where they are; parquet files, which are compressed, are read as a whole.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, BinaryIO

from normkit.core.optional_dependencies import require
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

EXPECTED = (
    "Expected a folder that DatasetDict.save_to_disk has written, with train and test in it, or "
    "one with train*.parquet and test*.parquet."
)


def table_files(path: Path) -> list[list[Path]]:
    """The files to train on, and those to test on."""
    if not path.is_dir():
        raise MissingData(f"{path} is not a folder. {EXPECTED}")
    if (path / "state.json").is_file():
        raise MissingData(
            f"{path} is a single Dataset. {EXPECTED} Try dataset.train_test_split(0.2)"
            ".save_to_disk(…)."
        )
    parts = []
    for names in (("train",), TEST_NAMES):
        files = next(filter(None, (_split(path, name) for name in names)), [])
        if not files:
            raise MissingData(f"{path} has nothing to {names[0]} on. {EXPECTED}")
        parts.append(files)
    return parts


def _split(path: Path, name: str) -> list[Path]:
    state = path / name / "state.json"
    if state.is_file():
        try:
            files = [path / name / each["filename"] for each in _json(state)["_data_files"]]
        except (KeyError, TypeError) as error:
            raise CorruptData(f"{state} does not list its files: {error}.") from error
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise MissingData(f"{missing[0]} is listed in {state}, but is not there.")
        return files
    return sorted(
        file
        for folder in (path, path / "data", path / name)
        for file in folder.glob("*.parquet" if folder.name == name else f"{name}*.parquet")
    )


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptData(f"{file} cannot be read: {error}.") from error


def read_tables(path: Path, spec: Data) -> Listing:
    train, test = table_files(path)
    (first, names), (second, _) = (_part(files, spec) for files in (train, test))
    return listing(first, second, names)


class EncodedImages:
    """Opens an image of a column. A worker process that gets a copy opens the files itself."""

    def __init__(self, files: list[Path], column: str) -> None:
        self.files, self.column = files, column
        self._values: Any = None

    def __call__(self, path: str) -> BinaryIO:
        if self._values is None:
            self._values = table(self.files, [self.column])[self.column]
        value = self._values[int(path.rpartition(" ")[2])].as_py()
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            return open(self.files[0].parent / value, "rb")
        if not value:
            raise CorruptData(f"{path}: there is no image.")
        return io.BytesIO(value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": None}


def table(files: list[Path], columns: list[str] | None = None) -> Any:
    """Some columns of all files, as one table of Arrow."""
    arrow = require("pyarrow", "lab", "A Hugging Face data set")
    parts: list[Any] = []
    for file in files:
        try:
            if file.suffix == ".parquet":
                part = require("pyarrow.parquet", "lab", "parquet").read_table(
                    file, columns=columns
                )
            else:
                part = arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all()
                part = part if columns is None else part.select(columns)
        except (OSError, ValueError, arrow.ArrowException) as error:
            reason = " ".join(str(error).split())[:200]
            raise CorruptData(f"{file} cannot be read: {reason}.") from error
        if parts and part.schema.names != parts[0].schema.names:
            raise CorruptData(
                f"{file} has the columns {', '.join(part.schema.names)}, and {files[0]} "
                f"{', '.join(parts[0].schema.names)}."
            )
        parts.append(part)
    try:
        return arrow.concat_tables(parts)
    except (ValueError, arrow.ArrowException) as error:
        raise CorruptData(f"{files[0]} and its neighbours do not fit together: {error}.") from error


def _schema(file: Path) -> Any:
    arrow = require("pyarrow", "lab", "A Hugging Face data set")
    try:
        if file.suffix == ".parquet":
            return require("pyarrow.parquet", "lab", "parquet").read_schema(file)
        return arrow.ipc.open_stream(arrow.memory_map(str(file))).schema
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise CorruptData(f"{file} cannot be read: {str(error).rstrip('.')}.") from error


def _part(files: list[Path], spec: Data) -> tuple[LabelledImages, list[str] | None]:
    arrow = require("pyarrow", "lab", "A Hugging Face data set")
    schema, where = _schema(files[0]), str(files[0])
    image = column(schema.names, spec.image, IMAGE_COLUMNS, "image", where)
    label = column(schema.names, spec.label, LABEL_COLUMNS, "label", where)
    kind = schema.field(image).type
    encoded = kind.field(0).type if arrow.types.is_struct(kind) else kind
    fits = (arrow.types.is_binary, arrow.types.is_large_binary, arrow.types.is_string)
    if not any(fit(encoded) for fit in fits):
        raise CorruptData(
            f"{where}: the column {image!r} holds {kind}, expected encoded images. Try "
            "dataset.cast_column(…, datasets.Image()), or another data.image."
        )
    values = table(files, [label])[label].to_pylist()
    images = LabelledImages(str(files[0].parent), "sample", open=EncodedImages(files, image))
    names = _class_names(schema, label)
    for number, value in enumerate(values):
        if value is None or (names is not None and not 0 <= value < len(names)):
            expected = f"a number from 0 to {len(names) - 1}" if names is not None else "a label"
            hint = " The part has no labels: is it the one to test on?" if value == -1 else ""
            raise CorruptData(
                f"{images.source}, sample {number}: {label} is {value}, expected {expected}.{hint}"
            )
        images.add(f"{images.source}, sample {number}", str(value), number)
    return images, names


def _class_names(schema: Any, label: str) -> list[str] | None:
    """The names of the classes, which Hugging Face keeps beside the columns."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return list(names) if isinstance(names, list) else None
