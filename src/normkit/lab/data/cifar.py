"""CIFAR-10 and CIFAR-100: binary records or pickles, in an archive or unpacked."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.lab.data.records import CorruptData, Raw, Split

PIXELS = 3 * 32 * 32


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


def records(label_bytes: int) -> Callable[[bytes, str], tuple[Tensor, Tensor]]:
    """Records of so many label bytes, of which the last one counts, and the pixels."""

    def decode(content: bytes, where: str) -> tuple[Tensor, Tensor]:
        size = label_bytes + PIXELS
        if not content or len(content) % size:
            raise CorruptData(
                f"{where} has {len(content):,} bytes, expected a multiple of {size:,}."
            )
        table = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, size)
        labels = table[:, label_bytes - 1].long()
        return table[:, label_bytes:].reshape(-1, 3, 32, 32), labels

    return decode


def pickles(key: str) -> Callable[[bytes, str], tuple[Tensor, Tensor]]:
    """A pickled dictionary with an array "data" and a list of labels."""

    def decode(content: bytes, where: str) -> tuple[Tensor, Tensor]:
        table = arrays(content, where)
        data, labels = table.get(b"data"), table.get(key.encode())
        if not isinstance(data, Tensor) or data.shape[1:] != (PIXELS,) or labels is None:
            raise CorruptData(f"{where} has no data of rows of {PIXELS} bytes, or no {key}.")
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
    records(1),
)
PYTHON_10 = CifarFormat(
    "cifar-10-batches-py", "cifar-10-python.tar.gz", _TEN, ("test_batch",), pickles("labels")
)
BINARY_100 = CifarFormat(
    "cifar-100-binary", "cifar-100-binary.tar.gz", ("train.bin",), ("test.bin",), records(2)
)
PYTHON_100 = CifarFormat(
    "cifar-100-python", "cifar-100-python.tar.gz", ("train",), ("test",), pickles("fine_labels")
)
