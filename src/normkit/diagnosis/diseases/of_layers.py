"""Diseases of layers themselves: channels, scales, gates, groups, weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normkit.diagnosis.diseases.nets import Cnn, Mlp, SharedCnn
from normkit.diagnosis.diseases.patient import Disease, Patient
from normkit.diagnosis.diseases.ward import Ward, refresh
from normkit.layers import RBN, WS


def _followed(ward: Ward, model: nn.Module, steps: int) -> Patient:
    """With statistics that have followed the change, so that they are not ill as well."""
    return ward.patient(model, steps + refresh(model, ward.train_loader()))


def dead(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    host: Any = model
    with torch.no_grad():
        host.norm2.bias[::2] = -20  # as after one step with a far too large gradient
        host.norm2.bias[1::8] = -20
    return _followed(ward, model, steps)


def zero_scale(ward: Ward) -> Patient:
    model, steps, _ = ward.residual()
    host: Any = model
    with torch.no_grad():
        host.blocks[1].norm2.weight.zero_()  # as zero-init leaves it if it is never trained
    return _followed(ward, model, steps)


def exploding(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    host: Any = model
    with torch.no_grad():
        host.norm3.weight[:3] *= 300
    return _followed(ward, model, steps)


def swallowed(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    host: Any = model
    with torch.no_grad():
        host.conv2.weight *= 1e-3  # as weight decay does to a layer that nothing else moves
    return _followed(ward, model, steps)


def gates(ward: Ward) -> Patient:
    model, steps, _ = ward.known("cnn-rbn", lambda: Cnn(RBN))
    host: Any = model
    with torch.no_grad():
        host.norm2.gate_bias.fill_(-6.0)
    return _followed(ward, model, steps)


def one_element(ward: Ward) -> Patient:
    model, steps = ward.taught(lambda: Mlp(lambda c: nn.GroupNorm(c, c)), epochs=1)
    return ward.patient(model, steps)


def two_elements(ward: Ward) -> Patient:
    model, steps = ward.taught(lambda: Mlp(lambda c: nn.GroupNorm(c // 2, c)), rate=0.02)
    return ward.patient(model, steps)


def bare_weights(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    host: Any = model
    WS.attach(host.head)
    return ward.patient(model, steps)


def shared(ward: Ward) -> Patient:
    model, steps = ward.taught(lambda: SharedCnn(_shared_norm), epochs=6)
    return ward.patient(model, steps)


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
