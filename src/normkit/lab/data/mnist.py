"""Files of handwritten digits and their kin: idx files of MNIST, text files of USPS."""

from __future__ import annotations

import bz2
import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from normkit.lab.data.records import CorruptData, Raw, Split

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(files: Sequence[Path]) -> Raw:
    """MNIST and Fashion-MNIST, from the files in the order of IDX_FILES."""
    tensors = [idx_tensor(file) for file in files]
    splits = []
    for images, labels, file in zip(tensors[::2], tensors[1::2], files[::2], strict=True):
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            raise CorruptData(
                f"{file}: images {tuple(images.shape)} and labels {tuple(labels.shape)} do not "
                "belong together. Expected (N, H, W) and (N,): get both files again."
            )
        splits.append(Split(images.unsqueeze(1), labels.long()))
    return Raw(*splits)


def idx_tensor(file: Path) -> Tensor:
    """An idx file of bytes, plain or compressed.

    It holds two zeros, the type 8, the rank, the sizes as big-endian int32, and the bytes.
    """
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise CorruptData(
            f"{file} is not an idx file of bytes: it begins with {content[:4].hex()!r}."
        )
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise CorruptData(f"{file} ends within its head: {len(content)} bytes.")
    shape = struct.unpack(f">{rank}i", content[4:start])
    if math.prod(shape) != len(content) - start:
        raise CorruptData(
            f"{file} says it holds {shape}, {math.prod(shape):,} bytes, and holds "
            f"{len(content) - start:,}."
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].view(shape)


def read_usps(files: Sequence[Path]) -> Raw:
    """zip.train.gz and zip.test.gz, or usps.bz2 and usps.t.bz2 (labels 1 … 10, "place:value").

    Each line has a label and 256 values from −1 to 1.
    """
    return Raw(*(_usps_split(file) for file in files))


def _usps_split(file: Path) -> Split:
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
