"""CIFAR-10 and CIFAR-100: binary records or pickles, in an archive or unpacked."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from normkit.lab.data.errors import CorruptData
from normkit.lab.data.pickled import arrays
from normkit.lab.data.records import Raw, Split

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Form:
    """Where the parts are, and how one of them is read."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    decode: Callable[[bytes, str], tuple[Tensor, Tensor]]

    def unpacked(self, files: Sequence[Path]) -> Raw:
        content = {file.name: file.read_bytes() for file in files}
        return self._raw(content, str(files[0].parent))

    def archive(self, files: Sequence[Path]) -> Raw:
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
        found = arrays(content, where)
        data, labels = found.get(b"data"), found.get(key.encode())
        if not isinstance(data, Tensor) or data.shape[1:] != (PIXELS,) or labels is None:
            raise CorruptData(f"{where} has no data of rows of {PIXELS} bytes, or no {key}.")
        return data.view(-1, 3, 32, 32), torch.tensor(labels)

    return decode


_TEN = tuple(f"data_batch_{i}" for i in range(1, 6))
BINARY_10 = Form(
    "cifar-10-batches-bin", tuple(f"{name}.bin" for name in _TEN), ("test_batch.bin",), records(1)
)
PYTHON_10 = Form("cifar-10-batches-py", _TEN, ("test_batch",), pickles("labels"))
BINARY_100 = Form("cifar-100-binary", ("train.bin",), ("test.bin",), records(2))
PYTHON_100 = Form("cifar-100-python", ("train",), ("test",), pickles("fine_labels"))
