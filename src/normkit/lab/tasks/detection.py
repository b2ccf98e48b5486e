"""Detection of objects by boxes and masks: torchvision's detectors, COCO's average precision."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.optional_dependencies import require
from normkit.errors import OptionError
from normkit.lab.data import Sets
from normkit.lab.data.boxes import (
    box_listing,
    check_has_masks,
    check_objects,
    load_boxes,
)
from normkit.lab.data.pairs import check_pairs
from normkit.lab.experiment.records import Setting
from normkit.lab.models.build import build
from normkit.lab.results import Epoch, TaskMetric
from normkit.lab.tasks.base import Evaluation, Losses, Task, TaskError, Values
from normkit.lab.tasks.drawing import LARGEST_SIDE, beside, colours
from normkit.lab.tasks.sets import is_own

BOXES = ("ap", "ap50", "ap75")
MASKS = ("mask_ap", "mask_ap50", "mask_ap75")
EVALUATED = 8  # images of a batch
PICTURES = 3
SHOWN = 0.5  # score from which on an answer is drawn
MOST = (1, 10)  # answers of an image at which COCO's recall is measured, beside all of them
NOTHING = 1e-3  # of AP50: what a detector that has learned nothing may reach


class Detection(Task):
    """Objects in images. With ``masks`` the detector is judged by masks as well, and by the
    ``detections`` of the highest score in each image: 100 of them, as COCO says.

    A model is called as torchvision's are: ``model(images, targets)`` gives losses by name in
    training mode, ``model(images)`` boxes, labels, scores and masks in eval mode.
    """

    def __init__(self, masks: bool = False, detections: int = 100) -> None:
        if not isinstance(detections, int) or detections < MOST[-1]:
            raise OptionError(f"detections is {detections!r}, expected {MOST[-1]} or more.")
        self.masks, self.detections = masks, detections
        self.own = False  # whether the data are the author's own, which nobody has looked at
        names = (*BOXES, *MASKS) if masks else BOXES
        self.metrics: Mapping[str, TaskMetric] = {name: TaskMetric() for name in names}

    # ---------------------------------------------------------------- data and model

    def check(self, setting: Setting) -> None:
        if not is_own(setting.data.name):
            check_pairs(setting.data, "boxes")
        everywhere = [s.name for s in setting.steps if s.kind == "norm" and s.where is None]
        if setting.model.options.get("frozen") is True and everywhere:
            raise OptionError(
                f'model.options.frozen is true, and norm = "{everywhere[0]}" of the variant '
                "replaces the frozen norms: nothing is frozen. Leave out one of the two, or say "
                "where the norm goes."
            )

    def load(self, setting: Setting, device: torch.device | str) -> Sets:
        self.own = is_own(setting.data.name)
        if self.own:
            return super().load(setting, device)
        return load_boxes(setting.data, self.masks, device)

    def locate(self, setting: Setting) -> None:
        if is_own(setting.data.name):
            super().locate(setting)
        else:
            listing = box_listing(setting.data)
            if self.masks:
                check_has_masks(setting.data, listing)
            check_objects(listing, self.masks)

    def evaluation_batches(self, part: str) -> Iterator[Any]:
        """Images of one size at a time: among larger ones a detector fills up an image, and norms
        that take their statistics from it would see the filling."""
        for images, targets in getattr(self.sets, part).batches(EVALUATED):
            sizes = dict.fromkeys(tuple(image.shape) for image in images)
            for size in sizes:
                rows = [n for n, image in enumerate(images) if tuple(image.shape) == size]
                yield self.format.nested(([images[n] for n in rows], [targets[n] for n in rows]))

    def network(self, setting: Setting, classes: int, shape: tuple[int, ...]) -> nn.Module:
        """The background is a class more."""
        return build(setting.model, classes + 1, shape, folder=setting.code.folder)

    def example(self, shape: tuple[int, ...], samples: int) -> list[Tensor]:
        return [torch.rand(*shape) for _ in range(samples)]

    def try_model(
        self, model: nn.Module, samples: int, classes: int, shape: tuple[int, ...]
    ) -> None:
        images = self.example(shape, samples)
        height, width = shape[1:]
        box = torch.tensor([[0.25 * width, 0.25 * height, 0.75 * width, 0.75 * height]])
        target = {"boxes": box, "labels": torch.tensor([classes])}
        if self.masks:
            target["masks"] = torch.ones(1, height, width, dtype=torch.uint8)
        if model.training:
            losses = model(images, [dict(target) for _ in images])
            if not isinstance(losses, Mapping) or not losses:
                raise OptionError(
                    f"the model gives a {type(losses).__name__} for images and targets, expected "
                    "losses by name. Try native:faster_rcnn."
                )
            return
        answers = model(images)
        wanted = {"boxes", "labels", "scores"} | ({"masks"} if self.masks else set())
        lacking = wanted - set(answers[0]) if answers else wanted
        if lacking:
            raise OptionError(
                f"the model's answers have no {', '.join(sorted(lacking))}."
                + " Try native:mask_rcnn." * ("masks" in lacking)
            )

    def forward(self, model: nn.Module, batch: Any) -> Any:
        images, targets = batch
        return model(images, targets) if model.training else model(images)

    # ---------------------------------------------------------------- training and judging

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        images, targets = batch
        if not images:
            raise TaskError("A batch has no images: expected one or more.")
        if self.own:
            check_targets(images, targets, self.sets.classes, self.masks)
        with self.format.autocast():
            losses: Mapping[str, Tensor] = model(images, targets)
        return {name.removeprefix("loss_"): value.float() for name, value in losses.items()}

    def evaluation(self, part: str) -> DetectionScore:
        return DetectionScore(self)

    def collapsed(self, epochs: Sequence[Epoch]) -> str | None:
        """Hardly anything found."""
        if not epochs:
            return ""
        name = "mask_ap50" if self.masks else "ap50"
        score = statistics.median(each.test(name) for each in epochs)
        return "" if score > NOTHING else f"AP50 {score:.2%}: no objects were found"

    def pictures(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """A test image with its objects, and with the answers."""
        for number, (images, targets) in enumerate(self.evaluation_batches("test")):
            if number == PICTURES:
                return
            (answer,) = model(images[:1])
            sure = answer["scores"] > SHOWN
            answer = {key: value[sure] for key, value in answer.items()}
            caption = f"{len(targets[0]['boxes'])} objects, and {int(sure.sum())} answers"
            yield (
                f"a test image with its {caption} of a score above {SHOWN:g}",
                beside(*(self.drawn(images[0], objects) for objects in (targets[0], answer))),
            )

    def drawn(self, image: Tensor, objects: Mapping[str, Tensor]) -> Tensor:
        """An image with its objects: masks where there are some, else boxes, a colour a class."""
        drawing = require("torchvision.utils", "models", "pictures of boxes")
        image = (image.float().clamp(0, 1) * 255).to(torch.uint8).cpu()
        if len(objects["boxes"]) == 0:
            return image / 255
        if self.masks:
            masks = objects["masks"].cpu().view(-1, *image.shape[1:]) > 0.5
            return drawing.draw_segmentation_masks(image, masks, alpha=0.7) / 255
        bright = [tuple(round(255 * part) for part in each) for each in colours(self.sets.classes)]
        return (
            drawing.draw_bounding_boxes(
                image,
                objects["boxes"].float().cpu(),
                colors=[bright[label - 1] for label in objects["labels"].tolist()],
                width=-(-max(image.shape[1:]) // LARGEST_SIDE),  # seen when the image is shrunk
            )
            / 255
        )


def check_targets(
    images: Sequence[Tensor], targets: Sequence[Any], classes: int, masks: bool
) -> None:
    """Refuse objects that cannot be learned; the message names the sample of the batch, from 1."""
    if len(targets) != len(images):
        raise TaskError(f"A batch has {len(images)} images and {len(targets)} targets.")
    for number, (image, target) in enumerate(zip(images, targets, strict=True), 1):
        height, width = image.shape[-2:]
        wrong = _fault(target, height, width, classes, masks)
        if wrong:
            raise TaskError(f"Sample {number} of a batch, {width}×{height} pixels: {wrong}.")


def _fault(target: Any, height: int, width: int, classes: int, masks: bool) -> str:
    wanted = ("boxes", "labels", "masks") if masks else ("boxes", "labels")
    for name in wanted:
        if not isinstance(target, Mapping) or not isinstance(target.get(name), Tensor):
            return f"its target has no {name}, expected a mapping with {', '.join(wanted)}"
    boxes, labels = target["boxes"], target["labels"]
    if boxes.dim() != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
        shapes = f"{tuple(boxes.shape)} and {tuple(labels.shape)}"
        return f"its boxes and labels are {shapes}, expected (n, 4) and (n,)"
    limits = boxes.new_tensor([width, height, width, height])
    for bad, what in (
        (((boxes < 0) | (boxes > limits)).any(1) | ~boxes.isfinite().all(1), "leaves the image"),
        ((boxes[:, 2:] <= boxes[:, :2]).any(1), "has no area"),
        ((labels < 1) | (labels > classes), f"has a label that is none of 1 to {classes}"),
    ):
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            shown = ", ".join(f"{side:g}" for side in boxes[row].tolist())
            return f"box {row + 1} ({shown}; label {int(labels[row])}) {what}"
    expected = (len(boxes), height, width)
    if masks and target["masks"].shape != expected:
        return f"its masks are {tuple(target['masks'].shape)}, expected {expected}"
    return ""


class DetectionScore(Evaluation):
    """Average precision as COCO defines it, by torchmetrics."""

    def __init__(self, task: Detection) -> None:
        self.task = task
        metrics = require("torchmetrics.detection", "tasks", "detection")
        require("faster_coco_eval", "tasks", "average precision")
        kinds = ("bbox", "segm") if task.masks else ("bbox",)
        self.precision = metrics.MeanAveragePrecision(
            iou_type=kinds,
            backend="faster_coco_eval",
            max_detection_thresholds=[*MOST, task.detections],
        )
        self.precision.warn_on_many_detections = False

    def add(self, model: nn.Module, batch: Any) -> None:
        images, targets = batch
        with self.task.format.autocast():
            answers = model(images)
        keys = ("boxes", "labels", "scores", "masks")
        self.precision.update(
            [_judged(each, keys) for each in answers],
            [_judged(each, ("boxes", "labels", "iscrowd", "masks")) for each in targets],
        )

    def values(self) -> Values:
        found = self.precision.compute()
        values: dict[str, float | list[float]] = {}
        both = (("bbox_", BOXES), ("segm_", MASKS)) if self.task.masks else (("", BOXES),)
        for prefix, names in both:
            for name, theirs in zip(names, ("map", "map_50", "map_75"), strict=True):
                # COCO says −1 where there was no object to be found
                values[name] = max(0.0, float(found[f"{prefix}{theirs}"]))
        return values


def _judged(objects: Mapping[str, Tensor], keys: Sequence[str]) -> dict[str, Tensor]:
    """On the CPU, where the matching is done, as torchmetrics wants it."""
    chosen = {key: objects[key].detach().cpu() for key in keys if key in objects}
    chosen["boxes"] = chosen["boxes"].float()
    if "iscrowd" in chosen:
        chosen["iscrowd"] = chosen["iscrowd"].long()
    if "masks" in chosen:
        masks = chosen["masks"].float() > 0.5
        chosen["masks"] = masks.view(-1, *masks.shape[-2:])
    return chosen
