"""Published sets that keep many small images in a file: CIFAR, MNIST and its kin, USPS."""

from __future__ import annotations

import bz2
import gzip
import io
import math
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.lab.data.records import CorruptData, DigitDomains, Raw, Split

CIFAR_PIXELS = 3 * 32 * 32
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True)
class CifarFormat:
    """Where the parts are, and how one of them is read."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    decode: Callable[[bytes, str], tuple[Tensor, Tensor]]

    def unpacked(self, files: Sequence[Path]) -> Raw:
        content = {file.name: file.read_bytes() for file in files}
        return self._raw(content, str(files[0].parent))

    def packed(self, files: Sequence[Path]) -> Raw:
        """Straight from the archive: nothing is written anywhere."""
        [file] = files
        wanted = {*self.train, *self.test}
        content = {}
        with tarfile.open(file, "r:*") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                part = archive.extractfile(member) if name in wanted else None
                if part is not None:
                    content[name] = part.read()
        missing = sorted(wanted - set(content))
        if missing:
            raise CorruptData(f"{file} lacks {', '.join(missing)}.")
        return self._raw(content, str(file))

    def _raw(self, content: dict[str, bytes], where: str) -> Raw:
        splits = []
        for names in (self.train, self.test):
            parts = [self.decode(content.pop(name), f"{where}: {name}") for name in names]
            images, labels = (torch.cat(each) for each in zip(*parts, strict=True))
            splits.append(Split(images, labels))
        return Raw(*splits)


def cifar_records(label_bytes: int) -> Callable[[bytes, str], tuple[Tensor, Tensor]]:
    """Records of so many label bytes, of which the last one counts, and the pixels."""

    def decode(content: bytes, where: str) -> tuple[Tensor, Tensor]:
        size = label_bytes + CIFAR_PIXELS
        if not content or len(content) % size:
            raise CorruptData(
                f"{where} has {len(content):,} bytes, expected a multiple of {size:,}."
            )
        table = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, size)
        labels = table[:, label_bytes - 1].long()
        return table[:, label_bytes:].reshape(-1, 3, 32, 32), labels

    return decode


def cifar_pickles(key: str) -> Callable[[bytes, str], tuple[Tensor, Tensor]]:
    """A pickled dictionary with an array "data" and a list of labels."""

    def decode(content: bytes, where: str) -> tuple[Tensor, Tensor]:
        table = arrays(content, where)
        data, labels = table.get(b"data"), table.get(key.encode())
        if not isinstance(data, Tensor) or data.shape[1:] != (CIFAR_PIXELS,) or labels is None:
            raise CorruptData(f"{where} has no data of rows of {CIFAR_PIXELS} bytes, or no {key}.")
        return data.view(-1, 3, 32, 32), torch.tensor(labels)

    return decode


class _Type:
    """Stands for numpy.dtype."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment: bytes have neither."""


class _Array:
    """Stands for numpy.ndarray."""

    tensor: Tensor

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, content = state
        if kind.name not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of {kind.name}, expected bytes")
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if by_columns:  # the first index runs fastest
            self.tensor = flat.view(shape[::-1]).permute(*range(len(shape))[::-1]).contiguous()
        else:
            self.tensor = flat.view(shape)


def _reconstruct(*_: Any) -> _Array:
    return _Array()


# a pickle may name any function to be called: these three are all that images need
ALLOWED = {"_reconstruct": _reconstruct, "ndarray": _Array, "dtype": _Type}


class _ImageUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] != "numpy" or name not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image needs")
        return ALLOWED[name]


def arrays(content: bytes, where: str) -> dict[Any, Any]:
    """A pickled dictionary, read without NumPy and without trusting it; arrays become tensors."""
    try:
        table = _ImageUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can fail in any way
        raise CorruptData(f"{where} cannot be read as a pickle of images: {error}.") from error
    if not isinstance(table, dict):
        raise CorruptData(f"{where} holds a {type(table).__name__}, expected a dictionary.")
    return {
        key: value.tensor if isinstance(value, _Array) else value for key, value in table.items()
    }


_TEN = tuple(f"data_batch_{i}" for i in range(1, 6))
BINARY_10 = CifarFormat(
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    tuple(f"{name}.bin" for name in _TEN),
    ("test_batch.bin",),
    cifar_records(1),
)
PYTHON_10 = CifarFormat(
    "cifar-10-batches-py", "cifar-10-python.tar.gz", _TEN, ("test_batch",), cifar_pickles("labels")
)
BINARY_100 = CifarFormat(
    "cifar-100-binary", "cifar-100-binary.tar.gz", ("train.bin",), ("test.bin",), cifar_records(2)
)
PYTHON_100 = CifarFormat(
    "cifar-100-python",
    "cifar-100-python.tar.gz",
    ("train",),
    ("test",),
    cifar_pickles("fine_labels"),
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


def mnist_usps(files: Sequence[Path]) -> DigitDomains:
    """The files of MNIST, then those of USPS."""
    each = len(IDX_FILES)
    return DigitDomains({"mnist": read_idx(files[:each]), "usps": read_usps(files[each:])}, 10)
