"""USPS digits, 16×16: text files of a label and 256 values from −1 to 1 a line."""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from normkit.lab.data.errors import CorruptData
from normkit.lab.data.records import Raw, Split


def read(files: Sequence[Path]) -> Raw:
    """zip.train.gz and zip.test.gz, or usps.bz2 and usps.t.bz2 (labels 1 … 10, "place:value")."""
    return Raw(*(_split(file) for file in files))


def _split(file: Path) -> Split:
    svm = file.suffix == ".bz2"
    try:
        content = (bz2 if svm else gzip).decompress(file.read_bytes()).decode("ascii")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise CorruptData(f"{file} cannot be read: {str(error).rstrip('.')}.") from error
    numbers: list[list[float]] = []
    for line in filter(None, map(str.strip, content.splitlines())):
        values = [float(word.rpartition(":")[2]) for word in line.split()]
        if len(values) != 257:
            raise CorruptData(
                f"{file}, line {len(numbers) + 1}: {len(values)} numbers, expected a label and 256."
            )
        numbers.append(values)
    if not numbers:
        raise CorruptData(f"{file} holds no digits.")
    table = torch.tensor(numbers)
    images = ((table[:, 1:] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return Split(images.view(-1, 1, 16, 16), table[:, 0].long() - int(svm))
