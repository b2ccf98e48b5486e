"""Batches that an argument names: of a file, a directory of images, or a function of the user."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from normkit import checkpoints, models
from normkit.commands import calibrate
from normkit.errors import OptionError

DATA = """\
data:
  .pt, .pth, .npz, .safetensors   inputs called x, images, inputs or data, and classes called y,
                                  labels or targets; of .pt also a tensor or a pair (x, y)
  a directory of images           one directory a class, as torchvision's ImageFolder reads it;
                                  --size, --mean and --std say how images become inputs
  package.module:callable         a function that returns batches, such as a DataLoader"""
TARGETS = ("y", "labels", "targets", "classes")


def add_reading(parser: argparse.ArgumentParser) -> None:
    """How files become batches."""
    add = parser.add_argument
    add("--batch", type=int, default=64, metavar="N", help="samples at a time, of a file (64)")
    add("--size", type=int, default=224, metavar="PIXELS", help="of images, cut square (224)")
    add("--mean", type=float, nargs=3, default=calibrate.IMAGENET[0], help="of images (ImageNet's)")
    add("--std", type=float, nargs=3, default=calibrate.IMAGENET[1], help="likewise")


def batches_of(text: str, options: argparse.Namespace, training: bool = False) -> Iterable[Any]:
    """What an argument names, in batches; those of a file are shuffled for training."""
    path = Path(text)
    if ":" in text and not path.exists():
        module, _, name = text.partition(":")
        return _called(text, models._callable(module, name))
    if options.batch < 1:
        raise OptionError(f"--batch got {options.batch}. Expected at least 1.")
    if path.is_dir():
        return calibrate.batches_of(argparse.Namespace(**{**vars(options), "data": path}))
    if not path.is_file():
        raise OptionError(
            f"There is no file or directory {text}. Expected one, or package.module:callable."
        )
    inputs, targets = _pair(path)
    data = TensorDataset(inputs) if targets is None else TensorDataset(inputs, targets)
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        data, options.batch, shuffle=training, drop_last=training, generator=generator
    )


def _called(text: str, found: Any) -> Iterable[Any]:
    try:
        given = found() if callable(found) and not isinstance(found, DataLoader) else found
    except Exception as error:  # whatever a user's function does
        raise OptionError(
            f"{text} failed: {type(error).__name__}: {models.first_line(error)}."
        ) from error
    if isinstance(given, Tensor | str) or not isinstance(given, Iterable):
        raise OptionError(
            f"{text} gave a {type(given).__name__}, expected batches, such as a DataLoader."
        )
    return given


def _pair(path: Path) -> tuple[Tensor, Tensor | None]:
    """Inputs and targets in a file."""
    if path.suffix in (".pt", ".pth"):
        found = calibrate._loaded(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(loaded, tuple | list) and len(loaded) == 2:
            found = dict(zip(("x", "y"), loaded, strict=True))
    elif path.suffix == ".npz":
        numpy = models.require("numpy", "lab", str(path))
        with numpy.load(path) as opened:
            found = {name: torch.from_numpy(opened[name]) for name in opened.files}
    elif path.suffix == checkpoints.SAFETENSORS:
        found = dict(checkpoints.read(path))
    else:
        raise OptionError(
            f"{path.name}: expected .pt, .pth, .npz or .safetensors, a directory of images, or "
            "package.module:callable."
        )
    name = next((name for name in TARGETS if isinstance(found.get(name), Tensor)), None)
    targets = None if name is None else found.pop(name)
    inputs = calibrate._chosen(found, path)
    if targets is not None and len(targets) != len(inputs):
        raise OptionError(f"{path} holds {len(inputs)} inputs and {len(targets)} targets.")
    return inputs, targets
