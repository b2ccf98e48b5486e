"""The format of MNIST and Fashion-MNIST: idx files, plain or compressed."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from normkit.lab.data.errors import CorruptData
from normkit.lab.data.records import Raw, Split

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read(files: Sequence[Path]) -> Raw:
    """From the files in the order of NAMES."""
    tensors = [tensor(file) for file in files]
    splits = []
    for images, labels, file in zip(tensors[::2], tensors[1::2], files[::2], strict=True):
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            raise CorruptData(
                f"{file}: images {tuple(images.shape)} and labels {tuple(labels.shape)} do not "
                "belong together. Expected (N, H, W) and (N,): get both files again."
            )
        splits.append(Split(images.unsqueeze(1), labels.long()))
    return Raw(*splits)


def tensor(file: Path) -> Tensor:
    """An idx file of bytes: two zeros, the type 8, the rank, the sizes as big-endian int32."""
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise CorruptData(f"{file} is no idx file of bytes: it begins with {content[:4].hex()!r}.")
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
