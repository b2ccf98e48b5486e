"""A ResNet-18 that the lab trains with batch norm on CIFAR-10, right after conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fitted import rows
from benchmarks.fitted.conversions import fitted, only_fitted, plain, refusal
from normkit.core.precision import deterministic_cudnn
from normkit.errors import NormkitError
from normkit.lab.data import load
from normkit.lab.experiment import Data, Model, Run, Setting, Train
from normkit.lab.models.build import build
from normkit.lab.train import Training

CLOSER = ("gn:1", "gn:8", "gn:32")  # all numbers of images, both ways to distil
OTHERS = ("ln", "rms", "gn:fit", "in", "bcn", "pn", "dyt", "sn", "ibn", "bgn")
IMAGES = (64, 256, 1024)
DISTILLED_ON = 1024  # images
BATCH = 64  # of a step


def setting(epochs: int, data: str) -> Setting:
    train = Train(
        epochs=epochs, batch=128, lr=0.1, nesterov=True, weight_decay=5e-4, warmup=1,
        precision="bf16", channels_last=True, evaluate_every=epochs,
    )  # fmt: skip
    model = Model("torchvision:resnet18", stem="cifar")
    return Setting(Data(data, flip=True, crop=4), model, train=train)


def train(device: torch.device, epochs: int, data: str, weights: Path) -> rows.Row:
    """Train with batch norm, and write the weights."""
    run = Run(setting(epochs, data), seed=1)
    sets = load(run.setting.data, device)
    with deterministic_cudnn():
        training = Training(run, sets, device=device)
        while training.step():
            pass
    result = training.result()
    temporary = weights.with_suffix(".part")
    torch.save(training.trainer.model.state_dict(), temporary)
    temporary.rename(weights)
    return {"kind": "cifar-train", "epochs": epochs, "seconds": result.seconds}


class Conversions:
    """The trained network and its images; ``measure`` gives the rows of a target."""

    def __init__(self, device: torch.device, epochs: int, data: str, weights: Path) -> None:
        spec = setting(epochs, data)
        sets = load(spec.data, device)
        self.model = build(spec.model, sets.classes, sets.shape)
        self.model.load_state_dict(torch.load(weights, weights_only=True))
        self.model.to(device).eval()
        batches = sets.train.batches(512, seed=0, epoch=0, shuffle=True, augment=False)
        self.images = _joined(batches, max(DISTILLED_ON, *IMAGES), device)[0]
        self.test = list(sets.test.batches(500))
        self.device = device

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        right = count = 0
        for images, labels in self.test:
            answers = model(images.to(self.device).float()).argmax(1)
            right += int((answers == labels.to(self.device)).sum())
            count += len(labels)
        return right / count

    def measure(self, target: str, steps: int, emit: Callable[[rows.Row], None]) -> None:
        def row(how: str, images: int, model: nn.Module, **more: Any) -> None:
            entry = {"kind": "cifar", "target": target, "how": how, "images": images}
            emit({**entry, "test": self.accuracy(model), **more})

        if target == "bn":
            return row("", 0, self.model, end=True)
        closer = target in CLOSER
        steps = steps if closer else steps // 4
        try:
            if not only_fitted(target):
                row("plain", 0, plain(self.model, target))
            for count in IMAGES if closer else IMAGES[:2]:
                model, seconds, report = fitted(self.model, target, self.images[:count])
                row("fitted", count, model, seconds=seconds, agreement=report.agreement)
            for count in IMAGES if closer else ():
                model, seconds, report = fitted(
                    self.model, target, self.images[:count], parameters="all"
                )
                row("fitted, all", count, model, seconds=seconds, agreement=report.agreement)
            for parameters in ("norms", "all") if closer else ("norms",):
                model, seconds, report = fitted(
                    self.model, target, self.images[:DISTILLED_ON],
                    batch=BATCH, distill=steps, parameters=parameters,
                )  # fmt: skip
                more = {"agreement": report.agreement, "steps": steps, "best": report.distilled}
                row(f"distilled, {parameters}", DISTILLED_ON, model, seconds=seconds, **more)
            emit({"kind": "cifar", "target": target, "end": True})
        except NormkitError as error:
            emit({"kind": "cifar", "target": target, "refused": refusal(error), "end": True})


def _joined(
    batches: Iterator[tuple[Tensor, Tensor]], count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    images, labels, seen = [], [], 0
    for x, y in batches:
        images.append(x.to(device).float())
        labels.append(y)
        seen += len(x)
        if seen >= count:
            break
    return torch.cat(images)[:count], torch.cat(labels)[:count]
