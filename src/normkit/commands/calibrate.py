"""Give the norms of a model the statistics that their inputs have on your data, and save it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit import checkpoints
from normkit.calibration import calibrate
from normkit.commands import outputs, subject
from normkit.commands.screen import console
from normkit.errors import OptionError
from normkit.models import first_line, require

NAME = "calibrate"
HELP = "give the norms of a model the statistics of your data"
EXAMPLES = f"""\
examples:
  normkit calibrate timm:resnet50 --weights swa.pth --data images.pt --out calibrated.safetensors
  normkit calibrate timm:resnet50 --weights resnet50.pth --data photos/ --until 0.01 --out new.pth
      stop when the standard error of every mean and variance is below 1 %
  normkit calibrate mypackage.nets:small_net --data x.npz --statistics night.safetensors
      keep the statistics apart; normkit.Statistics.load reads them, merges and applies them

data:
  .pt, .pth, .npz, .safetensors   a tensor of inputs (N, ...): the only one, or the one called
                                  x, images, inputs or data
  a directory of images           one directory a class, as torchvision's ImageFolder reads it;
                                  --size, --mean and --std say how images become inputs

{subject.REFERENCES}"""
CALLED = ("x", "images", "inputs", "data")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subject.add_model(parser)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="PATH", help="inputs: a file or a directory")
    add("--batch", type=int, default=64, metavar="N", help="images at a time (64)")
    add("--images", type=int, metavar="N", help="stop after so many images")
    add("--until", type=float, metavar="SHARE", help="stop at this standard error, such as 0.01")
    add("--mode", choices=("progressive", "layerwise"), default="progressive")
    add("--size", type=int, default=224, metavar="PIXELS", help="of images, cut square (224)")
    add("--mean", type=float, nargs=3, default=IMAGENET[0], help="of images (ImageNet's)")
    add("--std", type=float, nargs=3, default=IMAGENET[1], help="likewise")
    add("--out", type=Path, metavar="FILE", help="weights to write: .safetensors, .pt or .pth")
    add("--statistics", type=Path, metavar="FILE", help="statistics to write: .safetensors")
    add("--force", action="store_true", help="overwrite existing files")


def run(options: argparse.Namespace) -> int:
    if options.batch < 1:
        raise OptionError(f"--batch got {options.batch}. Expected at least 1.")
    outputs.check([p for p in (options.out, options.statistics) if p is not None], options.force)
    batches = batches_of(options)  # before a large model is built
    model = subject.model_of(options)
    save = None if options.out is None else checkpoints.writer(model, options.out)
    done = calibrate(model, batches, mode=options.mode, images=options.images, until=options.until)
    screen = console()
    screen.print(str(done), markup=False, soft_wrap=True)
    if options.statistics is not None:
        done.statistics.save(options.statistics)
    if save is not None:
        outputs.write({options.out: save})
    written = [str(path) for path in (options.out, options.statistics) if path is not None]
    said = f"Written: {' and '.join(written)}." if written else NOTHING
    screen.print(f"\n{said}", markup=False, soft_wrap=True)
    return 0


NOTHING = "Nothing was written: --out FILE keeps the weights, --statistics FILE the statistics."


def batches_of(options: argparse.Namespace) -> Iterable[Any]:
    """What --data names, in batches."""
    path: Path = options.data
    if path.is_dir():
        return _images(options)
    if not path.is_file():
        raise OptionError(f"There is no file or directory {path}.")
    return _tensor(path).split(options.batch)


def _images(options: argparse.Namespace) -> Iterable[Any]:
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
    try:
        found = vision.datasets.ImageFolder(options.data, prepare)
    except FileNotFoundError as error:
        raise OptionError(f"{options.data}: {first_line(error)}.") from error
    return torch.utils.data.DataLoader(found, batch_size=options.batch)


def _tensor(path: Path) -> Tensor:
    """The inputs in a file."""
    if path.suffix == ".npz":
        numpy = require("numpy", "lab", str(path))
        try:
            with numpy.load(path) as opened:
                found = {name: torch.from_numpy(opened[name]) for name in opened.files}
        except (ValueError, OSError, TypeError) as error:
            raise OptionError(f"{path} is no .npz file: {first_line(error)}.") from error
    elif path.suffix in (".pt", ".pth"):
        found = _loaded(path)
    elif path.suffix == checkpoints.SAFETENSORS:
        found = checkpoints.read(path)
    else:
        raise OptionError(
            f"{path.name}: expected .pt, .pth, .npz or .safetensors, or a directory of images."
        )
    return _chosen(found, path)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever pickle makes of a file that is none
        raise OptionError(f"{path} cannot be read as tensors: {first_line(error)}.") from error
    if isinstance(found, Tensor):
        return {"x": found}
    if isinstance(found, tuple | list):
        found = dict(enumerate(found))
        return {"x": found.get(0)}
    return dict(found) if isinstance(found, dict) else {}


def _chosen(found: dict[str, Any], path: Path) -> Tensor:
    tensors = {name: t for name, t in found.items() if isinstance(t, Tensor) and t.dim() > 0}
    name = next((name for name in CALLED if name in tensors), None)
    if name is None and len(tensors) == 1:
        (name,) = tensors
    if name is None:
        raise OptionError(
            f"{path} holds {len(tensors)} tensors ({', '.join(map(str, list(tensors)[:5]))}), "
            f"expected one, or one called {', '.join(CALLED)}."
        )
    inputs = tensors[name]
    return inputs.float() if inputs.dtype == torch.float64 else inputs
