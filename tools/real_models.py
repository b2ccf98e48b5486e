"""Diagnose a detector, a segmentation network and a model with two inputs, trained on real images.

    NORMKIT_DATA=FOLDER python -m tools.real_models detector
    NORMKIT_DATA=FOLDER python -m tools.real_models segmentation pair --steps 100

FOLDER holds bccd.zip (blood cells in boxes), camvid-320.zip (streets, a class for each pixel) and
pacs-96.zip (photos of seven classes), or has them in tasks/, as for the lab. Each model is trained
from scratch for a few steps. Then it is diagnosed three times on images it has not seen: as it is;
with the statistics that its norms had after a tenth of the training, as a bad checkpoint or an
average of weights may leave it; and after ``normkit.calibrate`` on training images.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk
from normkit.errors import NormkitError, OptionError
from normkit.lab.data import locate
from normkit.lab.experiment import Data
from normkit.models import require

Batches = list[tuple[Any, Any]]


@dataclass
class Task:
    """A model, batches to train on and to diagnose with, and what a batch costs."""

    model: nn.Module
    train: Batches
    test: Batches
    forward: Callable[[nn.Module, Any], Any] | None  # None: the model is called with the inputs
    loss: Callable[[Any, Any], Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.real_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tasks", nargs="+", choices=sorted(TASKS), metavar="TASK")
    parser.add_argument("--steps", type=int, default=200, help="of training (%(default)s)")
    parser.add_argument("--images", type=int, default=32, help="to test on (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        archives = {name: archive(SETS[name]) for name in options.tasks}
    except NormkitError as error:
        print(error, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    for name in options.tasks:
        torch.manual_seed(0)
        random.seed(0)
        _report(name, TASKS[name](archives[name], options.images), options.steps)
    return 0


def _report(name: str, task: Task, steps: int) -> None:
    start = time.process_time()
    early = train(task, steps)
    kind = type(task.model).__name__
    spent = time.process_time() - start
    print(f"{name}: {kind}, {steps} steps, {spent:.0f} s of CPU time", flush=True)
    own = {key: value.clone() for key, value in task.model.state_dict().items()}
    _diagnose("as trained", task, steps)
    task.model.load_state_dict({**own, **early})
    _diagnose("statistics of the first tenth", task, steps)
    nk.calibrate(task.model, task.train, forward=task.forward)
    _diagnose("and calibrated", task, None)


def _diagnose(what: str, task: Task, steps: int | None) -> None:
    """One line for the findings, and one for where the gap enters."""
    found = nk.diagnose(
        task.model,
        task.test,
        loss=task.loss,
        train_loader=task.train,
        steps=steps,
        max_batches=8,
        forward=task.forward,
    )
    alarms = [f"{f.severity}: {f.kind}" for f in found.findings if f.severity != "note"]
    print(f"  {what}: {', '.join(alarms) or 'no alarm'}")
    gap = nk.attribute_gap(task.model, task.test, task.loss, forward=task.forward)
    for line in str(gap).splitlines()[:3]:
        print(f"    {line.strip()}", flush=True)


def train(task: Task, steps: int) -> dict[str, Tensor]:
    """Train the model, leave it in eval mode; the buffers it had after a tenth of the steps."""
    model = task.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    early: dict[str, Tensor] = {}
    for step in range(steps):
        inputs, target = task.train[step % len(task.train)]
        optimizer.zero_grad()
        forward = task.forward or _call
        task.loss(forward(model, (inputs, target)), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step + 1 == max(1, steps // 10):
            early = {name: b.clone() for name, b in model.named_buffers() if "running" in name}
    model.eval()
    return early


def _call(model: nn.Module, batch: tuple[Any, Any]) -> Any:
    return model(*batch[0]) if isinstance(batch[0], tuple) else model(batch[0])


# ---------------------------------------------------------------- the three of them


def detector(path: Path, images: int) -> Task:
    """Torchvision's Faster R-CNN on a small backbone, and blood cells."""
    detection = require("torchvision.models.detection", "lab", "The detector")
    sizes = {"min_size": 160, "max_size": 224}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that no weights are loaded
        model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
            weights=None, weights_backbone=None, num_classes=4, **sizes
        )
    with zipfile.ZipFile(path) as file:
        names = _names(file, "BCCD/Annotations/", ".xml")
        random.shuffle(names)
        samples = [_boxes(file, name) for name in names[: 64 + images]]
    batches = [([x for x, _ in part], [y for _, y in part]) for part in _cut(samples, 4)]
    return Task(model, batches[:16], batches[16:], detector_losses, lambda output, target: output)


def detector_losses(model: nn.Module, batch: tuple[Any, Any]) -> Tensor:
    """The losses of a detector of torchvision, whatever mode its norms are in.

    It computes them in training mode only. The mode that counts for that is those of three parts;
    the norms below them keep theirs.
    """
    images, targets = batch
    with in_training_mode(model, model.rpn, model.roi_heads), torch.random.fork_rng([]):
        torch.manual_seed(0)  # it draws which boxes count: the same ones whenever it is asked
        return torch.stack(list(model(images, targets).values())).sum()


@contextmanager
def in_training_mode(*parts: Any) -> Iterator[None]:
    """These modules alone, not what is inside them."""
    modes = [part.training for part in parts]
    try:
        for part in parts:
            part.training = True
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def segmentation(path: Path, images: int) -> Task:
    """Torchvision's DeepLabv3 on a small backbone, and streets."""
    models = require("torchvision.models.segmentation", "lab", "The segmentation network")
    model = models.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=11)
    with zipfile.ZipFile(path) as file:
        train, test = (
            [_stacked(each) for each in _cut(_streets(file, part, count), 4)]
            for part, count in (("train", 64), ("test", images))
        )
    return Task(model, train, test, logits_of_pixels, F.cross_entropy)


def logits_of_pixels(model: nn.Module, batch: tuple[Any, Any]) -> Tensor:
    out: Tensor = model(batch[0])["out"]
    return out


def pair(path: Path, images: int) -> Task:
    """A photo and a table of its colours in: what does it show?"""
    with zipfile.ZipFile(path) as file:
        names = _names(file, "PACS/photo/", ".webp")
        classes = sorted({name.split("/")[2] for name in names})
        chosen = random.sample(names, 512 + 4 * images)
        samples = [(*_photo(file, name), classes.index(name.split("/")[2])) for name in chosen]
    batches = []
    for part in _cut(samples, 32):
        photos, tables, labels = zip(*part, strict=True)
        batches.append(((torch.stack(photos), torch.stack(tables)), torch.tensor(labels)))
    return Task(PhotoAndTable(len(classes)), batches[:16], batches[16:], None, F.cross_entropy)


class PhotoAndTable(nn.Module):
    """Convolutions for the one, linear layers for the other, and a head for both."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        convolutions = [
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise((3, 16, 32, 64))
        ]
        self.photo = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.table = nn.Sequential(nn.Linear(3 * BINS, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(64 + 32, classes)

    def forward(self, photo: Tensor, table: Tensor) -> Tensor:
        y: Tensor = self.head(torch.cat([self.photo(photo), self.table(table)], 1))
        return y


TASKS: dict[str, Callable[[Path, int], Task]] = {
    "detector": detector,
    "segmentation": segmentation,
    "pair": pair,
}
SETS = {"detector": "bccd", "segmentation": "camvid", "pair": "pacs"}

# ---------------------------------------------------------------- reading


def archive(name: str) -> Path:
    """The zip file of a data set, where the lab finds it."""
    path = locate(Data(name))
    if path is None or path.suffix != ".zip":
        raise OptionError(f"{name} is expected as a zip file, found {path}.")
    return path


CELLS = {"RBC": 1, "WBC": 2, "Platelets": 3}


def _names(file: zipfile.ZipFile, start: str, end: str) -> list[str]:
    return sorted(n for n in file.namelist() if n.startswith(start) and n.endswith(end))


def _image(file: zipfile.ZipFile, name: str) -> Tensor:
    """Bytes (C, H, W)."""
    decode = require("torchvision.io", "lab", "Reading images").decode_image
    x: Tensor = decode(torch.frombuffer(bytearray(file.read(name)), dtype=torch.uint8))
    return x


def _boxes(file: zipfile.ZipFile, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """An image, and the boxes and kinds of its cells, in the form of torchvision."""
    tree = ElementTree.parse(io.BytesIO(file.read(name)))
    boxes, labels = [], []
    for cell in tree.iter("object"):
        box = [float(cell.findtext(f"bndbox/{side}") or 0) for side in SIDES]
        if box[0] < box[2] and box[1] < box[3]:
            boxes.append(box)
            labels.append(CELLS[cell.findtext("name") or ""])
    image = _image(file, name.replace("Annotations", "JPEGImages").replace(".xml", ".jpg"))
    target = {"boxes": torch.tensor(boxes).reshape(-1, 4), "labels": torch.tensor(labels)}
    return image[:3].float() / 255, target


SIDES = ("xmin", "ymin", "xmax", "ymax")


def _streets(file: zipfile.ZipFile, part: str, count: int) -> list[tuple[Tensor, Tensor]]:
    names = random.sample(_names(file, f"CamVid/{part}/", ".webp"), count)
    return [_pixels(file, name) for name in names]


def _pixels(file: zipfile.ZipFile, name: str) -> tuple[Tensor, Tensor]:
    """A street at half its size and the class of each pixel; −100 where there is none."""
    folder, _, image = name.rpartition("/")
    labels = file.read(f"{folder}annot/{image.replace('.webp', '.png')}")
    # numbers in a palette of 4 bits, which torchvision's decode_image gets wrong
    plain = require("PIL.Image", "lab", "Reading classes").open(io.BytesIO(labels))
    numbers = bytearray(plain.convert("P").tobytes())
    classes = torch.frombuffer(numbers, dtype=torch.uint8).reshape(plain.size[::-1])
    classes = classes[::2, ::2].long()
    x = F.avg_pool2d(_image(file, name)[:3].float() / 255, 2)
    return (x - 0.45) / 0.25, classes.masked_fill(classes == 11, -100)


BINS = 8


def _photo(file: zipfile.ZipFile, name: str) -> tuple[Tensor, Tensor]:
    """A photo at half its size, and how much of it is of which red, green and blue."""
    x = F.avg_pool2d(_image(file, name)[:3].float() / 255, 2)
    table = torch.cat([torch.histc(channel, BINS, 0, 1) for channel in x]) / x[0].numel()
    return x, table


def _cut(samples: list[Any], size: int) -> list[list[Any]]:
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def _stacked(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(each) for each in zip(*samples, strict=True))
    return x, y


if __name__ == "__main__":
    sys.exit(main())
