"""Accidents around a model: colours, resolution, domains, fusing twice, learning rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.diseases.networks import Cnn, ColorCnn
from tools.diseases.reference_models import Case, Disease, HealthyModel, ReferenceModels, train

Pairs = list[tuple[Tensor, Tensor]]


def colored(images: Tensor) -> Tensor:
    """Digits with a tint, and a shadow in blue, as red, green, blue."""
    shadow = images.roll((1, 1), (2, 3))
    return torch.cat([0.9 * images + 0.1, 0.7 * images + 0.15, 0.2 * images + 0.5 * shadow], 1)


def _color_case(models: ReferenceModels, reverse: bool) -> Case:
    def loader(pairs: Any, change: Any) -> Pairs:
        return [(change(x), y) for x, y in pairs]

    model = models.untrained(lambda: ColorCnn(nn.BatchNorm2d)).train()
    batches: Any = loader(models.train_loader(), colored)
    with torch.random.fork_rng([]):
        torch.manual_seed(models.seed)
        steps = train(model, batches, epochs=3)
    seen = loader(models.test_loader(), lambda x: colored(x).flip(1) if reverse else colored(x))
    return models.case(model, steps, loader=seen, train_loader=batches)


def bgr(models: ReferenceModels) -> Case:
    return _color_case(models, reverse=True)


def rgb(models: ReferenceModels) -> Case:
    return _color_case(models, reverse=False)


def resized(models: ReferenceModels) -> Case:
    model, steps, _ = models.residual()

    def larger(images: Tensor) -> Tensor:
        return F.interpolate(images, scale_factor=4.0, mode="bilinear")

    return models.case(model, steps, loader=models.test_loader(larger))


def wrong_labels(models: ReferenceModels) -> Case:
    """The test labels belong to other images: no fault of the norms."""
    model, steps, _ = models.cnn()
    pairs = [(x, y.roll(7)) for x, y in models.test_loader()]
    return models.case(model, steps, loader=pairs)


def _negative(images: Tensor) -> Tensor:
    return 1 - 0.6 * images


def _domain_batches(models: ReferenceModels, together: bool) -> Pairs:
    pairs: Pairs = []
    for x, y in models.train_loader():
        if together:
            half = len(x) // 2
            pairs.append((torch.cat([x[:half], _negative(x[half:])]), y))
        else:
            pairs += [(x, y), (_negative(x), y)]
    return pairs


def _domains(models: ReferenceModels, together: bool) -> Case:
    model, steps, _ = models.cnn()
    batches: Any = _domain_batches(models, together)
    steps += train(model.train(), batches, epochs=3, rate=0.05)
    test = [(x, y) for x, y in models.test_loader()]
    both = [pair for x, y in test for pair in ((x, y), (_negative(x), y))]
    return models.case(model, steps, loader=both, train_loader=batches)


def domains(models: ReferenceModels) -> Case:
    return _domains(models, together=False)


def domains_together(models: ReferenceModels) -> Case:
    return _domains(models, together=True)


@torch.no_grad()
def fused_twice(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    net: Any = model
    for conv, norm in ((net.conv1, net.norm1), (net.conv2, net.norm2), (net.conv3, net.norm3)):
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        conv.weight.mul_(factor[:, None, None, None])
        conv.bias = nn.Parameter(norm.bias - norm.running_mean * factor)
    return models.case(model, steps)


def too_fast(models: ReferenceModels) -> Case:
    model, steps = models.train_new(lambda: Cnn(nn.BatchNorm2d), rate=10.0)
    return models.case(model, steps)


DISEASES = (
    Disease(
        "colours reversed",
        "channel-order",
        "Test images read as blue, green, red; trained on red, green, blue.",
        bgr,
    ),
    Disease(
        "another resolution", "other-resolution", "Test images of 32×32 for 8×8 pixels.", resized
    ),
    Disease(
        "two domains",
        "mixed-domains",
        "Trained on batches of digits and of faint negatives in turn.",
        domains,
    ),
    Disease(
        "fused twice",
        "fused-twice",
        "Norms fused into the convolutions, and kept behind them.",
        fused_twice,
    ),
    Disease(
        "learning rate too high",
        "learning-rate-too-high",
        "Trained with a rate of 10, a hundred times too high.",
        too_fast,
    ),
)
HEALTHY = (
    HealthyModel("colours as in training", "twin of colours reversed", rgb),
    HealthyModel("domains in every batch", "twin of two domains", domains_together),
    HealthyModel("wrong labels", "test labels of other images", wrong_labels),
)
