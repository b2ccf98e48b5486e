"""Diseases that keep running statistics at their start."""

from __future__ import annotations

from torch import nn

from normkit.diagnosis.diseases.healthy import freeze_norms
from normkit.diagnosis.diseases.nets import Cnn
from normkit.diagnosis.diseases.of_statistics import with_momentum
from normkit.diagnosis.diseases.patient import Disease, Patient
from normkit.diagnosis.diseases.ward import Ward, norms_of
from normkit.layers import BCN, UBN


def momentum_zero(ward: Ward) -> Patient:
    return with_momentum(ward, 0.0)


def never_updated(ward: Ward) -> Patient:
    model = ward.new(lambda: Cnn(nn.BatchNorm2d)).train()
    model.get_submodule("norm2").eval()
    steps = ward.teach(model, epochs=3)
    return ward.patient(model, steps)


def frozen_at_start(ward: Ward) -> Patient:
    model = ward.new(lambda: Cnn(nn.BatchNorm2d))
    freeze_norms(model)
    model.train()
    steps = ward.teach(model)
    return ward.patient(model, steps)


def lost(ward: Ward) -> Patient:
    trained, steps, _ = ward.residual()
    model = ward.residual()[0]
    for norm in norms_of(model):
        norm.reset_running_stats()
    model.load_state_dict(dict(trained.named_parameters()), strict=False)
    return ward.patient(model, steps)


def eval_trained(ward: Ward) -> Patient:
    model = ward.new(lambda: Cnn(nn.BatchNorm2d)).eval()
    steps = ward.teach(model)
    return ward.patient(model, steps)


def ubn_frozen(ward: Ward) -> Patient:
    model, steps = ward.taught(lambda: Cnn(lambda c: UBN(c, tau=1.0)), epochs=3)
    return ward.patient(model, steps)


def rate_zero(ward: Ward) -> Patient:
    model, _ = ward.taught(
        lambda: Cnn(lambda c: BCN(c, groups=4, micro=True, update_rate=0.0)), epochs=3
    )
    return ward.patient(model)


DISEASES = (
    Disease("momentum 0", "momentum-zero", "Trained with momentum=0.", momentum_zero),
    Disease(
        "never updated",
        "never-updated",
        "One norm in eval mode all through training.",
        never_updated,
    ),
    Disease(
        "frozen at the start",
        "frozen-at-start",
        "Frozen norms in a network that is trained from scratch.",
        frozen_at_start,
    ),
    Disease(
        "weights without buffers",
        "lost-statistics",
        "load_state_dict of named_parameters(), strict=False.",
        lost,
    ),
    Disease(
        "trained in eval mode", "eval-trained", "model.eval() before the training.", eval_trained
    ),
    Disease(
        "ubn frozen early",
        "ubn-frozen-early",
        "A threshold that no score can pass: frozen from the first batch.",
        ubn_frozen,
    ),
    Disease(
        "bcn without a rate",
        "update-rate-zero",
        "Micro-batch bcn with update rate 0, as in the released class.",
        rate_zero,
    ),
)
