"""Pickles of plain data and NumPy arrays, read without NumPy and without trusting them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from normkit.lab.data.errors import CorruptData


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
KNOWN = {"_reconstruct": _reconstruct, "ndarray": _Array, "dtype": _Type}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] != "numpy" or name not in KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image needs")
        return KNOWN[name]


def arrays(content: bytes, where: str) -> dict[Any, Any]:
    """A pickled dictionary; arrays of bytes in it become tensors."""
    try:
        found = _Reader(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can fail in any way
        raise CorruptData(f"{where} cannot be read as a pickle of images: {error}.") from error
    if not isinstance(found, dict):
        raise CorruptData(f"{where} holds a {type(found).__name__}, expected a dictionary.")
    return {
        key: value.tensor if isinstance(value, _Array) else value for key, value in found.items()
    }
