"""Diseases of data: how training batches are made, and what a model is evaluated on."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.diagnosis.diseases.patient import Disease, Patient
from normkit.diagnosis.diseases.schooling import BATCH, loader_of
from normkit.diagnosis.diseases.ward import Ward


def tiny(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    return ward.patient(model, steps, train_loader=ward.train_loader(2))


def last_of_one(ward: Ward) -> Patient:
    model, steps, _ = ward.mlp()
    images, labels = (each[: BATCH * 22 + 1] for each in ward.digits.train)
    loader = loader_of(images, labels, seed=ward.seed, drop_last=False)
    return ward.patient(model, steps, train_loader=loader)


def unshuffled(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    images, labels = ward.digits.train
    order = labels.argsort(stable=True)
    loader = loader_of(images[order], labels[order], seed=None)
    return ward.patient(model, steps, train_loader=loader)


def shifted(ward: Ward) -> Patient:
    model, steps, _ = ward.host()

    def other_camera(images: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(ward.seed)
        return 0.9 * images + 0.5 + 0.2 * torch.randn(images.shape, generator=generator)

    return ward.patient(model, steps, loader=ward.test_loader(other_camera))


def inverted(ward: Ward) -> Patient:
    """Its input has the same mean and deviation once both are taken over all pixels."""
    model, steps, _ = ward.mlp()
    images, _ = ward.digits.train
    middle = 2 * float(images.mean())
    return ward.patient(model, steps, loader=ward.test_loader(lambda x: middle - x))


def rescaled(ward: Ward) -> Patient:
    model, steps, _ = ward.residual()
    return ward.patient(model, steps, loader=ward.test_loader(lambda images: images * 16))


def rescaled_alone(ward: Ward) -> Patient:
    model, _, _ = ward.mlp()
    patient = ward.patient(model, loader=ward.test_loader(lambda images: images / 255))
    del patient.arguments["train_loader"]
    return patient


DISEASES = (
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
