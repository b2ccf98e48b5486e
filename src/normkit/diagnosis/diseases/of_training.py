"""Diseases of how a model is trained: batches, counters, modes, copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normkit.diagnosis.diseases.healthy import moving_average, rank_states
from normkit.diagnosis.diseases.nets import CheckpointedCnn, Cnn, DroppedCnn
from normkit.diagnosis.diseases.patient import Disease, Patient
from normkit.diagnosis.diseases.ward import Ward, norms_of
from normkit.layers import BN


def double(ward: Ward) -> Patient:
    model, steps = ward.taught(lambda: CheckpointedCnn(nn.BatchNorm2d), epochs=3)
    return ward.patient(model, steps)


def extra(ward: Ward) -> Patient:
    model = ward.new(lambda: Cnn(nn.BatchNorm2d)).train()

    @torch.no_grad()
    def validate(_: int) -> None:  # without model.eval()
        for images, _labels in ward.test_loader():
            model(images)

    steps = ward.teach(model, epochs=3, after=validate)
    return ward.patient(model, steps)


def missed(ward: Ward) -> Patient:
    model = ward.new(lambda: Cnn(nn.BatchNorm2d)).train()

    def hold(epoch: int) -> None:
        for norm in norms_of(model):
            norm.train(epoch < 2)

    steps = ward.teach(model, epochs=4, rate=0.02, before=hold)
    return ward.patient(model, steps)


def ranks(ward: Ward) -> Patient:
    model, _, _ = ward.host()
    images, _ = ward.digits.train
    shards = [images[0::2], 0.4 * images[1::2] + 0.3]
    return ward.patient(model, ranks=rank_states(model, shards))


def diverged(ward: Ward) -> Patient:
    model, _, states = ward.host()
    return ward.patient(
        model, ranks=[states[-1], {**states[-1], "conv2.weight": states[-2]["conv2.weight"]}]
    )


def overflowed(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    model.train()
    return ward.patient(model, steps + ward.teach(model, epochs=1, rate=1e30))


def average(ward: Ward) -> Patient:
    model, live, _ = moving_average(ward, buffers=False)
    return ward.patient(model, ema_of=live)


def in_training(ward: Ward) -> Patient:
    model, steps, _ = ward.residual()
    patient = ward.patient(model, steps)
    norms_of(model)[2].train()
    return patient


def fragile(ward: Ward) -> Patient:
    model, steps, _ = ward.residual()
    patient = ward.patient(model, steps)
    model.train()
    for norm in norms_of(model):
        norm.eval()
    return patient


def untracked(ward: Ward) -> Patient:
    model, steps = ward.taught(
        lambda: Cnn(lambda c: nn.BatchNorm2d(c, track_running_stats=False)), epochs=3
    )
    return ward.patient(model, steps)


def dropout(ward: Ward) -> Patient:
    model, steps = ward.taught(lambda: DroppedCnn(BN, drop=0.5), epochs=4)
    return ward.patient(model, steps)


def orphaned(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    host: Any = model
    host.norm2 = BN.from_batch_norm(host.norm2)  # after the optimizer was made
    return ward.patient(model, steps, optimizer=optimizer)


DISEASES = (
    Disease(
        "double update",
        "double-update",
        "Activation checkpointing with torch.nn's batch norm.",
        double,
    ),
    Disease(
        "validation in train mode",
        "extra-updates",
        "A validation after each epoch without model.eval().",
        extra,
    ),
    Disease(
        "missed updates",
        "missed-updates",
        "Norms in eval mode for the second half of the training.",
        missed,
    ),
    Disease(
        "rank disagreement",
        "rank-disagreement",
        "Two processes, one of them with images of less contrast.",
        ranks,
    ),
    Disease(
        "ranks apart", "rank-weights-differ", "One convolution was not synchronized.", diverged
    ),
    Disease(
        "diverged training",
        "weights-not-finite",
        "An epoch with a learning rate of 1e30.",
        overflowed,
    ),
    Disease(
        "ema without buffers",
        "ema-without-buffers",
        "A moving average of parameters(); buffers as at the start.",
        average,
    ),
    Disease(
        "norm left in train mode",
        "norm-in-train-mode",
        "model.eval(), but one norm is in training mode.",
        in_training,
    ),
    Disease(
        "freeze that does not last",
        "fragile-freeze",
        "model.train(), then eval() of all norms.",
        fragile,
    ),
    Disease(
        "no running statistics",
        "batch-dependent-eval",
        "Batch norms with track_running_stats=False.",
        untracked,
    ),
    Disease(
        "dropout before norm",
        "dropout-before-norm",
        "Dropout of a half between convolutions and norms.",
        dropout,
    ),
    Disease(
        "parameters without optimizer",
        "untrained-parameters",
        "A norm replaced after the optimizer was made.",
        orphaned,
    ),
)
