"""Semantic segmentation: a class for every pixel, cross-entropy, mean intersection over union."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.core.optional_dependencies import require
from normkit.errors import OptionError
from normkit.lab.data import Sets
from normkit.lab.data.map_files import VOID
from normkit.lab.data.maps import check_maps, load_maps, map_listing
from normkit.lab.data.pairs import check_pairs
from normkit.lab.experiment.records import Setting
from normkit.lab.formats import wide
from normkit.lab.results import Epoch, TaskMetric
from normkit.lab.tasks.base import Evaluation, Losses, Task, Values
from normkit.lab.tasks.drawing import beside, coloured, pixels
from normkit.lab.tasks.sets import is_own

PIXELS = 1 << 20  # of an evaluated batch
PICTURES = 3


class Segmentation(Task):
    """Images with maps of classes; what is void is neither trained on nor judged.

    ``scales`` are the smallest and the largest factor of a training window of data.size pixels.
    """

    metrics: Mapping[str, TaskMetric] = {
        "miou": TaskMetric(),  # mean over the classes of the test set
        "pixel_accuracy": TaskMetric(),
        "loss": TaskMetric(higher_is_better=False, percent=False),
    }
    batch_values = ("loss",)

    def __init__(self, scales: Sequence[float] = (1.0, 1.0)) -> None:
        if len(scales) != 2 or not 0 < scales[0] <= scales[1]:
            raise OptionError(f"scales={list(scales)}, expected two factors, such as [0.5, 2.0].")
        self.scales = (float(scales[0]), float(scales[1]))

    # ---------------------------------------------------------------- data and model

    def check(self, setting: Setting) -> None:
        if not is_own(setting.data.name):
            check_pairs(setting.data, "maps")

    def load(self, setting: Setting, device: torch.device | str) -> Sets:
        if is_own(setting.data.name):
            return super().load(setting, device)
        return load_maps(setting.data, self.scales, device)

    def locate(self, setting: Setting) -> None:
        if is_own(setting.data.name):
            super().locate(setting)
        else:
            check_maps(map_listing(setting.data))

    def evaluation_batches(self, part: str) -> Iterator[Any]:
        _, height, width = self.sets.shape
        size = max(1, PIXELS // (height * width))
        for batch in getattr(self.sets, part).batches(size):
            yield self.format.nested(batch)

    def try_model(
        self, model: nn.Module, samples: int, classes: int, shape: tuple[int, ...]
    ) -> None:
        output = model(self.example(shape, samples))
        expected = (samples, classes, *shape[1:])
        if not isinstance(output, Tensor) or output.shape != expected:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise OptionError(
                f"the model gives {got} for images {(samples, *shape)} of {classes} classes, "
                f"expected logits {expected}. Try native:deeplabv3."
            )

    # ---------------------------------------------------------------- training and judging

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        images, maps = batch
        with self.format.autocast():
            logits = model(images)
        return map_loss(logits, maps, self.setting.train.label_smoothing)

    def agreement(self, output: Any, target: Any) -> float:
        labelled = target != VOID
        right = (output.argmax(1) == target) & labelled
        return float(right.sum() / labelled.sum().clamp(min=1))

    def evaluation(self, part: str) -> MapScore:
        return MapScore(self)

    def collapsed(self, epochs: Sequence[Epoch]) -> str | None:
        """No better than the best single class everywhere."""
        if not epochs:
            return ""
        score = statistics.median(each.test("miou") for each in epochs)
        constant = statistics.median(each.test("constant_miou") for each in epochs)
        if score > constant:
            return ""
        return f"mIoU {score:.1%}; one class everywhere has {constant:.1%}"

    def pictures(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Image, truth and answer."""
        count = self.sets.classes
        for number, (images, maps) in enumerate(self.evaluation_batches("test")):
            if number == PICTURES:
                return
            answer = model(images[:1])[0].argmax(0)
            shown = pixels(images[:1], self.sets.test)[0]
            drawn = beside(shown, coloured(maps[0], count), coloured(answer, count))
            yield "a test image, its map, and the answer", drawn


class MapScore(Evaluation):
    """Counts of classes answered for classes, by torchmetrics, and the sum of losses."""

    def __init__(self, task: Segmentation) -> None:
        self.task, device = task, task.format.device
        metrics = require("torchmetrics.classification", "tasks", "segmentation")
        self.iou = metrics.MulticlassJaccardIndex(
            task.sets.classes, average=None, ignore_index=VOID, validate_args=False
        ).to(device)
        self.losses = torch.zeros((), dtype=torch.float64, device=device)
        self.batches = 0

    def add(self, model: nn.Module, batch: Any) -> None:
        images, maps = batch
        with self.task.format.autocast():
            logits = model(images)
        self.iou.update(logits.argmax(1), maps)
        self.losses += map_loss(logits, maps).double()
        self.batches += 1

    def values(self) -> Values:
        counts = self.iou.confmat.double()  # truth × answer
        truth = counts.sum(1)
        there = truth > 0  # a class that no image has cannot be found
        total = truth.sum().clamp(min=1)
        return {
            "miou": float(self.iou.compute().double()[there].mean()),
            "pixel_accuracy": float(counts.diagonal().sum() / total),
            "loss": float(self.losses / max(1, self.batches)),
            # of the most frequent class as the only answer
            "constant_miou": float(truth.max() / total / there.sum().clamp(min=1)),
        }


def map_loss(logits: Tensor, maps: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of the labelled pixels, in float32; 0 where there is none."""
    summed = F.cross_entropy(
        wide(logits), maps, ignore_index=VOID, reduction="sum", label_smoothing=smoothing
    )
    return summed / (maps != VOID).sum().clamp(min=1)
