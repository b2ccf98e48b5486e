"""Diseases of training: batches and data, counters, modes, copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.layers import BN
from tools.diseases.healthy import moving_average, rank_states
from tools.diseases.networks import CheckpointedCnn, Cnn, DroppedCnn
from tools.diseases.reference_models import (
    BATCH,
    Case,
    Disease,
    ReferenceModels,
    loader_of,
    norms_of,
)


def double(models: ReferenceModels) -> Case:
    model, steps = models.train_new(lambda: CheckpointedCnn(nn.BatchNorm2d), epochs=3)
    return models.case(model, steps)


def extra(models: ReferenceModels) -> Case:
    model = models.untrained(lambda: Cnn(nn.BatchNorm2d)).train()

    @torch.no_grad()
    def validate(_: int) -> None:  # without model.eval()
        for images, _labels in models.test_loader():
            model(images)

    steps = models.train(model, epochs=3, after=validate)
    return models.case(model, steps)


def missed(models: ReferenceModels) -> Case:
    model = models.untrained(lambda: Cnn(nn.BatchNorm2d)).train()

    def hold(epoch: int) -> None:
        for norm in norms_of(model):
            norm.train(epoch < 2)

    steps = models.train(model, epochs=4, rate=0.02, before=hold)
    return models.case(model, steps)


def ranks(models: ReferenceModels) -> Case:
    model, _, _ = models.cnn()
    images, _ = models.digits.train
    shards = [images[0::2], 0.4 * images[1::2] + 0.3]
    return models.case(model, ranks=rank_states(model, shards))


def diverged(models: ReferenceModels) -> Case:
    model, _, states = models.cnn()
    return models.case(
        model, ranks=[states[-1], {**states[-1], "conv2.weight": states[-2]["conv2.weight"]}]
    )


def overflowed(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    model.train()
    return models.case(model, steps + models.train(model, epochs=1, rate=1e30))


def average(models: ReferenceModels) -> Case:
    model, live, _ = moving_average(models, buffers=False)
    return models.case(model, ema_of=live)


def in_training(models: ReferenceModels) -> Case:
    model, steps, _ = models.residual()
    case = models.case(model, steps)
    norms_of(model)[2].train()
    return case


def fragile(models: ReferenceModels) -> Case:
    model, steps, _ = models.residual()
    case = models.case(model, steps)
    model.train()
    for norm in norms_of(model):
        norm.eval()
    return case


def untracked(models: ReferenceModels) -> Case:
    model, steps = models.train_new(
        lambda: Cnn(lambda c: nn.BatchNorm2d(c, track_running_stats=False)), epochs=3
    )
    return models.case(model, steps)


def dropout(models: ReferenceModels) -> Case:
    model, steps = models.train_new(lambda: DroppedCnn(BN, drop=0.5), epochs=4)
    return models.case(model, steps)


def orphaned(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net: Any = model
    net.norm2 = BN.from_batch_norm(net.norm2)  # after the optimizer was made
    return models.case(model, steps, optimizer=optimizer)


def tiny(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    return models.case(model, steps, train_loader=models.train_loader(2))


def last_of_one(models: ReferenceModels) -> Case:
    model, steps, _ = models.mlp()
    images, labels = (each[: BATCH * 22 + 1] for each in models.digits.train)
    loader = loader_of(images, labels, seed=models.seed, drop_last=False)
    return models.case(model, steps, train_loader=loader)


def unshuffled(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    images, labels = models.digits.train
    order = labels.argsort(stable=True)
    loader = loader_of(images[order], labels[order], seed=None)
    return models.case(model, steps, train_loader=loader)


def shifted(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()

    def other_camera(images: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(models.seed)
        return 0.9 * images + 0.5 + 0.2 * torch.randn(images.shape, generator=generator)

    return models.case(model, steps, loader=models.test_loader(other_camera))


def inverted(models: ReferenceModels) -> Case:
    """Its input has the same mean and deviation once both are taken over all pixels."""
    model, steps, _ = models.mlp()
    images, _ = models.digits.train
    middle = 2 * float(images.mean())
    return models.case(model, steps, loader=models.test_loader(lambda x: middle - x))


def rescaled(models: ReferenceModels) -> Case:
    model, steps, _ = models.residual()
    return models.case(model, steps, loader=models.test_loader(lambda images: images * 16))


def rescaled_alone(models: ReferenceModels) -> Case:
    model, _, _ = models.mlp()
    case = models.case(model, loader=models.test_loader(lambda images: images / 255))
    del case.arguments["train_loader"]
    return case


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
    Disease("tiny batch", "tiny-batch", "A training loader with batches of 2.", tiny),
    Disease(
        "last batch of one",
        "last-batch-of-one",
        "1,409 samples in batches of 64, drop_last=False.",
        last_of_one,
    ),
    Disease(
        "sorted batches",
        "unshuffled-batches",
        "A training loader sorted by class.",
        unshuffled,
    ),
    Disease(
        "distribution shift",
        "input-shift",
        "Test images from another camera: brighter, less contrast, noise.",
        shifted,
    ),
    Disease(
        "inverted images",
        "input-shift",
        "Test images black on white instead of white on black, mean and deviation the same.",
        inverted,
    ),
    Disease(
        "wrong input scaling",
        "wrong-input-scaling",
        "Test images from 0 to 16 instead of 0 to 1.",
        rescaled,
    ),
    Disease(
        "wrong input scaling, no training data",
        "wrong-input-scaling",
        "Test images divided by 255 once more; the training data are not given.",
        rescaled_alone,
    ),
)
