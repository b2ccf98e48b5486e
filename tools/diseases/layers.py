"""Diseases of layers themselves: channels, scales, gates, groups, weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normkit.layers import RBN, WS
from tools.diseases.networks import Cnn, Mlp, SharedCnn
from tools.diseases.reference_models import Case, Disease, ReferenceModels, refresh


def _followed(models: ReferenceModels, model: nn.Module, steps: int) -> Case:
    """With statistics that have followed the change, so that they are not ill as well."""
    return models.case(model, steps + refresh(model, models.train_loader()))


def dead(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    net: Any = model
    with torch.no_grad():
        net.norm2.bias[::2] = -20  # as after one step with a far too large gradient
        net.norm2.bias[1::8] = -20
    return _followed(models, model, steps)


def zero_scale(models: ReferenceModels) -> Case:
    model, steps, _ = models.residual()
    net: Any = model
    with torch.no_grad():
        net.blocks[1].norm2.weight.zero_()  # as zero-init leaves it if it is never trained
    return _followed(models, model, steps)


def exploding(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    net: Any = model
    with torch.no_grad():
        net.norm3.weight[:3] *= 300
    return _followed(models, model, steps)


def swallowed(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    net: Any = model
    with torch.no_grad():
        net.conv2.weight *= 1e-3  # as weight decay does to a layer that nothing else moves
    return _followed(models, model, steps)


def gates(models: ReferenceModels) -> Case:
    model, steps, _ = models.trained("cnn-rbn", lambda: Cnn(RBN))
    net: Any = model
    with torch.no_grad():
        net.norm2.gate_bias.fill_(-6.0)
    return _followed(models, model, steps)


def one_element(models: ReferenceModels) -> Case:
    model, steps = models.train_new(lambda: Mlp(lambda c: nn.GroupNorm(c, c)), epochs=1)
    return models.case(model, steps)


def two_elements(models: ReferenceModels) -> Case:
    model, steps = models.train_new(lambda: Mlp(lambda c: nn.GroupNorm(c // 2, c)), rate=0.02)
    return models.case(model, steps)


def bare_weights(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    net: Any = model
    WS.attach(net.head)
    return models.case(model, steps)


def shared(models: ReferenceModels) -> Case:
    model, steps = models.train_new(lambda: SharedCnn(_shared_norm), epochs=6)
    return models.case(model, steps)


def _shared_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels)


DISEASES = (
    Disease("dead channels", "dead-channels", "More than half of the biases at −20.", dead),
    Disease(
        "scale at zero",
        "dead-channels",
        "The last norm of a residual block with scale 0, where some recipes start.",
        zero_scale,
    ),
    Disease("exploding scale", "exploding-scale", "Three scales, 300 times too large.", exploding),
    Disease(
        "eps dominates",
        "eps-dominates",
        "A convolution whose weights have shrunk by 1,000.",
        swallowed,
    ),
    Disease("saturated gates", "saturated-gates", "Gates of rbn with bias −6.", gates),
    Disease(
        "group norm of one element",
        "tiny-groups",
        "As many groups as channels, on inputs (N, C).",
        one_element,
    ),
    Disease("group norm of two", "tiny-groups", "Two channels a group, on (N, C).", two_elements),
    Disease(
        "standardized classifier",
        "standardized-without-norm",
        "Weight standardization of the last linear layer.",
        bare_weights,
    ),
    Disease(
        "shared norm",
        "shared-statistics",
        "One batch norm behind two convolutions.",
        shared,
    ),
)
