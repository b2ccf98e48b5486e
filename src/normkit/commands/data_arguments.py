"""Batches that an argument names: of a file, a directory of images, or a function of the user."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

DATA = """\
data:
  .pt, .pth, .npz, .safetensors   inputs (N, ...): the only tensor, or the one called x, images,
                                  inputs or data; and classes called y, labels or targets
  .pt, .pth                       also a tensor or a pair (x, y); a list of images (C, H, W), which
                                  detectors get as lists; or a list of batches: lists of images,
                                  (images, targets), (x, y) or mappings of arguments
  a directory of images           one directory a class, as torchvision's ImageFolder reads it,
                                  or, where no classes are needed, images alone; --size, --mean
                                  and --std say how images become inputs
  package.module:callable         a function that returns batches, such as a DataLoader"""
INPUTS = ("x", "images", "inputs", "data")
TARGETS = ("y", "labels", "targets", "classes")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def add_reading(parser: argparse.ArgumentParser) -> None:
    """How files become batches."""
    add = parser.add_argument
    add("--batch", type=int, default=64, metavar="N", help="samples at a time, of a file (64)")
    add("--size", type=int, default=224, metavar="PIXELS", help="of images, cut square (224)")
    add("--mean", type=float, nargs=3, default=IMAGENET[0], help="of images (ImageNet's)")
    add("--std", type=float, nargs=3, default=IMAGENET[1], help="likewise")


def batches_of(
    text: str, options: argparse.Namespace, training: bool = False, unlabelled: bool = False
) -> Iterable[Any]:
    """What an argument names, in batches; those of a file are shuffled for training.

    Unlabelled ones come in one random order, since only the first may be looked at.
    """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from normkit import models

    path = Path(text)
    if ":" in text and not path.exists():
        module, _, name = text.partition(":")
        return _called(text, models.callable_of(module, name))
    if options.batch < 1:
        raise OptionError(f"--batch got {options.batch}. Expected at least 1.")
    if path.is_dir():
        return _images(path, options, unlabelled)
    if not path.is_file():
        raise OptionError(
            f"There is no file or directory {text}. Expected one, or package.module:callable."
        )
    content = _read(path)
    if isinstance(content, list) and not _are_images(content):
        return content  # batches
    data: Any = content
    if isinstance(content, dict):
        inputs, targets = _pair(path, content)
        data = TensorDataset(inputs) if targets is None else TensorDataset(inputs, targets)
    return DataLoader(
        data,
        options.batch,
        shuffle=training or unlabelled,
        drop_last=training,
        generator=torch.Generator().manual_seed(0),
        collate_fn=list if data is content else None,
    )


@contextmanager
def reading(**sources: str | None) -> Iterator[None]:
    """An error of the system inside, or of a loader that ends the program, names the options that
    data come from."""
    from normkit.core.messages import error_words

    try:
        yield
    except (OSError, SystemExit) as error:
        given = [f"--{o.replace('_', '-')} {text}" for o, text in sources.items() if text]
        raise OptionError(
            f"{' or '.join(given)} could not be read: {error_words(error)}."
        ) from error


def _called(text: str, source: Any) -> Iterable[Any]:
    from torch import Tensor
    from torch.utils.data import DataLoader

    from normkit.core.messages import error_words

    try:
        given = source() if callable(source) and not isinstance(source, DataLoader) else source
    except (Exception, SystemExit) as error:  # whatever a user's function does
        raise OptionError(f"{text} failed: {error_words(error)}.") from error
    if isinstance(given, Tensor | str) or not isinstance(given, Iterable):
        raise OptionError(
            f"{text} gave a {type(given).__name__}, expected batches, such as a DataLoader."
        )
    return given


def _images(path: Path, options: argparse.Namespace, unlabelled: bool) -> Iterable[Any]:
    import torch
    from torch.utils.data import DataLoader

    from normkit.core.messages import first_line
    from normkit.models import require

    vision = require("torchvision", "models", "A directory of images")
    steps = vision.transforms
    prepare = steps.Compose(
        [
            steps.Resize(options.size),
            steps.CenterCrop(options.size),
            steps.ToTensor(),
            steps.Normalize(options.mean, options.std),
        ]
    )
    images: Any
    if unlabelled and not any(child.is_dir() for child in path.iterdir()):
        endings = vision.datasets.folder.IMG_EXTENSIONS
        files = sorted(f for f in path.iterdir() if f.suffix.lower() in endings)
        if not files:
            raise OptionError(f"{path} has no images ({', '.join(endings)}).")
        images = _ImageFiles(files, lambda f: prepare(vision.datasets.folder.default_loader(f)))
    else:
        try:
            images = vision.datasets.ImageFolder(path, prepare)
        except FileNotFoundError as error:
            raise OptionError(f"{path}: {first_line(error)}.") from error
    generator = torch.Generator().manual_seed(0)
    return DataLoader(images, options.batch, shuffle=unlabelled, generator=generator)


class _ImageFiles:
    """Images of a folder without classes, read when they are asked for."""

    def __init__(self, files: list[Path], read: Callable[[Path], Tensor]) -> None:
        self.files, self.read = files, read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.read(self.files[index])


def _are_images(content: Any) -> bool:
    import torch

    given = isinstance(content, list) and bool(content)
    return given and all(isinstance(x, torch.Tensor) and x.dim() == 3 for x in content)


def _pair(path: Path, content: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Inputs and targets in a file."""
    import torch

    tensors = {n: t for n, t in content.items() if isinstance(t, torch.Tensor) and t.dim() > 0}
    name = next((name for name in TARGETS if name in tensors), None)
    targets = None if name is None else tensors.pop(name)
    name = next((name for name in INPUTS if name in tensors), None)
    if name is None and len(tensors) == 1:
        (name,) = tensors
    if name is None:
        raise OptionError(
            f"{path} holds {len(tensors)} tensors ({', '.join(map(str, list(tensors)[:5]))}), "
            f"expected one, or one called {', '.join(INPUTS)}; or, in a .pt file, a list of images "
            "(C, H, W) or of batches."
        )
    inputs = tensors[name].float() if tensors[name].dtype == torch.float64 else tensors[name]
    if targets is not None and len(targets) != len(inputs):
        raise OptionError(f"{path} holds {len(inputs)} inputs and {len(targets)} targets.")
    return inputs, targets


def _read(path: Path) -> dict[str, Any] | list[Any]:
    """What a file holds, by name; or a list of images, or of batches."""
    import torch

    from normkit import checkpoints
    from normkit.core.messages import first_line
    from normkit.inspection.batches import tensors_in
    from normkit.models import require

    if path.suffix == checkpoints.SAFETENSORS:
        return dict(checkpoints.read(path))
    if path.suffix == ".npz":
        numpy = require("numpy", "lab", str(path))
        try:
            with path.open("rb") as file, numpy.load(file) as opened:
                return {name: torch.from_numpy(opened[name]) for name in opened.files}
        except Exception as error:  # such as zipfile's, zlib's and numpy's own
            damage = checkpoints.damage(path) or f"is not an .npz file: {first_line(error)}."
            raise OptionError(f"{path} {damage}") from error
    if path.suffix not in checkpoints.PICKLED:
        raise OptionError(
            f"{path.name}: expected .pt, .pth, .npz or .safetensors, a directory of images, or "
            "package.module:callable."
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever pickle makes of a file that is none
        damage = checkpoints.damage(path) or f"cannot be read as tensors: {first_line(error)}."
        raise OptionError(f"{path} {damage}") from error
    if isinstance(content, tuple | list):
        pair = len(content) <= 2 and all(isinstance(x, torch.Tensor) for x in content)
        if pair and not _are_images(content):
            return dict(zip(("x", "y"), content, strict=False))
        batches = content if isinstance(content, list) else [content]
        known = all(next(tensors_in(batch), None) is not None for batch in batches)
        return list(batches) if known else {}
    return dict(content) if isinstance(content, dict) else {"x": content}
