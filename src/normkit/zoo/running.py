"""A model of the zoo in use: what it is run on, and what a run tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit import models

BATCH = 2  # the least with which batch norms train on maps of one pixel
SIZES = (32, 64, 96, 128, 224, 299)  # tried from the smallest, up to the model's own
IMAGE = 64  # for detectors
KEYPOINTS = 17  # of a person, as the detectors of torchvision have them
DETECTION = "torchvision.models.detection"
FEW_BOXES = {  # of the thousands that go through the second stage
    "rpn_post_nms_top_n_train": 8,
    "rpn_post_nms_top_n_test": 8,
    "box_batch_size_per_image": 8,
    "box_detections_per_img": 4,
}


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass in training mode."""

    names: frozenset[str]
    """The parameters that got a gradient."""
    finite: bool
    """Whether the loss and all gradients are."""


def options(reference: str) -> dict[str, Any]:
    """What the constructor of a detector needs so that it stays quick."""
    library, _, name = reference.partition(":")
    if library != "torchvision":
        return {}
    found = models.require("torchvision.models", "models", reference)
    if name not in found.list_models(found.detection) or name.startswith("ssd"):
        return {}  # ssd has one size, which is not ours to choose
    small = {"min_size": IMAGE, "max_size": IMAGE}
    return {**small, **FEW_BOXES} if "rcnn" in name else small


def first(model: nn.Module) -> tuple[tuple[Any, ...], Pass]:
    """Positional arguments, as small as the model can be trained on, and what came of them."""
    if is_detector(model):
        args: tuple[Any, ...] = images_and_targets()
        return args, train(model, args)
    problem: Exception | None = None
    for shape in shapes(model):
        args = (torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0)),)
        try:
            return args, train(model, args)
        except Exception as error:  # too small for a stride or a window, in as many words
            problem = error
    assert problem is not None
    raise problem


def shapes(model: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Channels, height and width to try."""
    about = getattr(model, "pretrained_cfg", None) or {}  # of timm
    channels, height, width = about.get("input_size", (3, SIZES[-1], SIZES[-1]))
    if not about.get("fixed_input_size"):
        least = max(about.get("min_input_size") or (0,))
        yield from ((channels, size, size) for size in SIZES if least <= size < height)
    yield channels, height, width


def images_and_targets() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two images with one object each, for the detectors of torchvision."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, IMAGE, IMAGE, generator=generator) for _ in range(BATCH)]
    points = torch.full((1, KEYPOINTS, 3), IMAGE / 2)
    points[..., 2] = 1.0  # visible
    target = {
        "boxes": torch.tensor([[IMAGE / 8, IMAGE / 8, IMAGE / 1.5, IMAGE / 1.5]]),
        "labels": torch.tensor([1]),
        "masks": torch.ones(1, IMAGE, IMAGE, dtype=torch.uint8),
        "keypoints": points,
    }
    return images, [dict(target) for _ in images]


def train(model: nn.Module, args: tuple[Any, ...]) -> Pass:
    """One batch in training mode. Parameters stay what they are; buffers go on."""
    model.train()
    torch.manual_seed(0)  # of dropout and its kin
    largest: dict[str, Tensor] = {}

    def take(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        largest[name] = parameter.grad.abs().amax()
        parameter.grad = None  # at once: all together are as large as the model

    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(partial(take, name))
                stack.callback(hook.remove)
        loss = torch.stack([t.float().square().mean() for t in tensors(model(*args))]).sum()
        loss.backward()
    finite = bool(torch.stack([loss.detach(), *largest.values()]).isfinite().all())
    return Pass(frozenset(largest), finite)


@torch.no_grad()
def evaluate(model: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    """What the model gives in eval mode; of a detector, the features that it looks at."""
    model.eval()
    torch.manual_seed(0)
    if is_detector(model):
        return list(tensors(model.backbone(torch.stack(args[0]))))  # type: ignore[operator]
    return list(tensors(model(*args)))


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest difference of an output, relative to its largest number."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return float("inf")
    found = [
        ((a - b).abs().max() / a.abs().max().clamp(min=torch.finfo(a.dtype).tiny)).item()
        for a, b in zip(before, after, strict=True)
        if a.numel()
    ]
    return max(found, default=0.0)


def tensors(found: Any) -> Iterator[Tensor]:
    """The floating-point tensors in whatever a model returned."""
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from tensors(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from tensors(value)


def is_detector(model: nn.Module) -> bool:
    """Whether it gives boxes: these change by leaps, as a score near a threshold decides."""
    return type(model).__module__.startswith(DETECTION)


def shape(args: tuple[Any, ...]) -> str:
    """The input in a word: 2x3x32x32."""
    first = torch.stack(args[0]) if isinstance(args[0], list) else args[0]
    return "x".join(map(str, first.shape))
