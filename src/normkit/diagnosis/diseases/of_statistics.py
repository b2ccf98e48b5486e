"""Diseases of running statistics that nothing outside of the layer is needed for."""

from __future__ import annotations

import math
import warnings

import torch
from torch import nn

from normkit.diagnosis.diseases.nets import Cnn
from normkit.diagnosis.diseases.patient import Disease, Patient
from normkit.diagnosis.diseases.ward import Ward, set_statistics
from normkit.errors import NonFiniteWarning
from normkit.layers import BN


def poisoned(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    images = ward.digits.train[0][:64].clone()
    images[0, 0, 0, 0] = math.inf
    with torch.no_grad():
        model.train()(images)
    return ward.patient(model, steps)


def left_out(ward: Ward) -> Patient:
    model, steps, _ = ward.host(BN)
    images = ward.digits.train[0][:64].clone()
    images[0, 0, 0, 0] = math.inf
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        model.train()(images)
    return ward.patient(model, steps)


def negative(ward: Ward) -> Patient:
    model, steps, states = ward.residual()
    last, before = states[-1], states[-2]
    changed = {k: last[k] - 2 * before[k] for k in last if k.endswith("running_var")}
    model.load_state_dict({**last, **changed})
    return ward.patient(model, steps)


def narrow(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    half = [
        [(x.bfloat16(), y) for x, y in loader]
        for loader in (ward.test_loader(), ward.train_loader())
    ]
    patient = ward.patient(model.bfloat16(), steps, loader=half[0], train_loader=half[1])
    patient.model.train()
    return patient


def momentum_one(ward: Ward) -> Patient:
    return with_momentum(ward, 1.0)


def momentum_inverted(ward: Ward) -> Patient:
    return with_momentum(ward, 0.9)


def unripe(ward: Ward) -> Patient:
    return with_momentum(ward, 0.002)


def with_momentum(ward: Ward, momentum: float) -> Patient:
    model, steps = ward.taught(
        lambda: Cnn(lambda c: nn.BatchNorm2d(c, momentum=momentum)), epochs=3
    )
    return ward.patient(model, steps)


def stale(ward: Ward) -> Patient:
    model, _, states = ward.residual()
    set_statistics(model, states[1])
    return ward.patient(model)


def stale_alone(ward: Ward) -> Patient:
    patient = stale(ward)
    del patient.arguments["train_loader"]
    return patient


def pruned(ward: Ward) -> Patient:
    model, steps, _ = ward.residual()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                limit = module.weight.abs().quantile(0.8)
                module.weight[module.weight.abs() < limit] = 0
    return ward.patient(model, steps)


DISEASES = (
    Disease(
        "poisoned statistics",
        "poisoned-statistics",
        "One image with an infinite pixel in one training batch.",
        poisoned,
    ),
    Disease(
        "batches left out",
        "nonfinite-batches",
        "The same with normkit's bn, which keeps the batch out and counts it.",
        left_out,
    ),
    Disease(
        "negative variance",
        "negative-variance",
        "Arithmetic with checkpoints, last − 2 · the one before, on running variances too.",
        negative,
    ),
    Disease(
        "bfloat16 statistics",
        "narrow-statistics",
        "model.bfloat16(), and training goes on.",
        narrow,
    ),
    Disease("momentum 1", "momentum-one", "Trained with momentum=1.", momentum_one),
    Disease(
        "momentum of TensorFlow",
        "momentum-inverted",
        "Trained with momentum=0.9, which means 0.1 elsewhere.",
        momentum_inverted,
    ),
    Disease(
        "unripe statistics",
        "unripe-statistics",
        "66 training batches with momentum=0.002.",
        unripe,
    ),
    Disease(
        "stale statistics",
        "stale-statistics",
        "Weights of the last epoch with statistics of the first.",
        stale,
    ),
    Disease(
        "stale statistics, no training data",
        "estimation-shift",
        "The same, but the training data are not given: the finding asks for them.",
        stale_alone,
    ),
    Disease(
        "pruned without calibration",
        "stale-statistics",
        "80 % of the convolution weights set to 0 after training.",
        pruned,
    ),
)
