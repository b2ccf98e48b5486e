"""Writers of the formats, independent of the readers."""

from __future__ import annotations

import bz2
import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import ClassVar

import numpy as np


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels(count: int, classes: int = 10) -> np.ndarray:
    return (np.arange(count) % classes).astype(np.uint8)


def idx(path: Path, array: np.ndarray) -> None:
    head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    content = head + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def mnist(folder: Path, train: int = 30, test: int = 20, ending: str = ".gz") -> None:
    for seed, (part, count) in enumerate((("train", train), ("t10k", test))):
        idx(folder / f"{part}-images-idx3-ubyte{ending}", pixels(count, 28, 28, seed=seed))
        idx(folder / f"{part}-labels-idx1-ubyte{ending}", labels(count))


def records(images: np.ndarray, *columns: np.ndarray) -> bytes:
    return np.concatenate([*(c[:, None] for c in columns), images], 1).tobytes()


class _Old(pickle._Pickler):
    """Pickles as Python 2 made them: text and bytes are one kind of string."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text: bytes | str) -> None:
        content = text.encode() if isinstance(text, str) else text
        if len(content) < 256:
            self.write(pickle.SHORT_BINSTRING + bytes([len(content)]) + content)
        else:
            self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_string


def old_pickle(content: dict[bytes, object]) -> bytes:
    made = io.BytesIO()
    _Old(made, protocol=2).dump(content)
    return made.getvalue()


def cifar_parts(name: str, binary: bool, count: int = 20) -> dict[str, bytes]:
    """The files of an archive: every part has ``count`` images."""
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    if name == "cifar100":
        names = ["train", "test"]
    made = {}
    for seed, part in enumerate(names):
        images, fine = pixels(count, 3072, seed=seed), labels(count)
        coarse = np.full_like(fine, 7)
        if binary and name == "cifar10":
            made[f"{part}.bin"] = records(images, fine)
        elif binary:
            made[f"{part}.bin"] = records(images, coarse, fine)
        elif name == "cifar10":
            made[part] = old_pickle({b"data": images, b"labels": fine.tolist()})
        else:
            both = {b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()}
            made[part] = old_pickle({b"data": images, **both})
    return made


def archive(path: Path, folder: str, parts: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as made:
        for name, content in {"readme.html": b"hello", **parts}.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))


def unpacked(folder: Path, parts: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in parts.items():
        (folder / name).write_bytes(content)


def usps(folder: Path, count: int, *, svm: bool) -> np.ndarray:
    """Two files of ``count`` digits each; gives back the values of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    files = ("usps.bz2", "usps.t.bz2") if svm else ("zip.train.gz", "zip.test.gz")
    tables = []
    for seed, name in enumerate(files):
        values = np.random.default_rng(seed).integers(-1000, 1001, (count, 256)) / 1000
        lines = []
        for label, row in zip(labels(count), values, strict=True):
            if svm:
                words = [f"{i}:{v:.3f}" for i, v in enumerate(row, 1)]
                lines.append(" ".join([str(label + 1), *words]))
            else:
                lines.append(" ".join([f"{label:.4f}", *(f"{v:.4f}" for v in row)]) + " ")
        content = "\n".join(lines).encode() + b"\n"
        packed = bz2.compress(content) if svm else gzip.compress(content)
        (folder / name).write_bytes(packed)
        tables.append(values)
    return tables[0]


def picture(path: Path, array: np.ndarray) -> None:
    """An image file of (H, W, 3) bytes, in the format of its name."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def tree(folder: Path, counts: dict[str, int], side: tuple[int, int] = (40, 30)) -> None:
    """A folder of images for each class; the red of an image tells its class."""
    for label, (name, count) in enumerate(counts.items()):
        for number in range(count):
            array = pixels(*side, 3, seed=100 * label + number)
            array[..., 0] = 50 * label
            picture(folder / name / f"{number}.png", array)
