"""Tensors with a description, in .safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from normkit.core.atomic_write import atomic_write
from normkit.core.optional_dependencies import require
from normkit.errors import OptionError


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file: complete, or not at all."""
    library = require("safetensors.torch", "lab", "A file of statistics")
    whole = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    atomic_write(
        _checked(path), lambda name: library.save_file(whole, name, metadata=dict(metadata))
    )


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the description of a file."""
    library = require("safetensors", "lab", "A file of statistics")
    source = Path(path)
    if not source.is_file():
        raise OptionError(f"There is no file {source}.")
    try:
        with library.safe_open(source, "pt") as opened:
            names = list(opened.keys())
            return {k: opened.get_tensor(k) for k in names}, opened.metadata() or {}
    except OSError:
        raise
    except Exception as error:  # its error class is not a public name in all versions
        raise OptionError(f"{source} is no safetensors file: {error}.") from error


def _checked(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".safetensors":
        raise OptionError(f"{target.name}: the name has to end in .safetensors.")
    if not target.resolve().parent.is_dir():
        raise OptionError(f"There is no directory {target.parent} for {target.name}.")
    return target
