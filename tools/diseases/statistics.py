"""Diseases of running statistics, those that keep them at their start among them."""

from __future__ import annotations

import math
import warnings

import torch
from torch import nn

from normkit.errors import NonFiniteWarning
from normkit.layers import BCN, BN, UBN
from tools.diseases.healthy import freeze_norms
from tools.diseases.networks import Cnn
from tools.diseases.reference_models import Case, Disease, ReferenceModels, norms_of, set_statistics


def poisoned(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    images = models.digits.train[0][:64].clone()
    images[0, 0, 0, 0] = math.inf
    with torch.no_grad():
        model.train()(images)
    return models.case(model, steps)


def left_out(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn(BN)
    images = models.digits.train[0][:64].clone()
    images[0, 0, 0, 0] = math.inf
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        model.train()(images)
    return models.case(model, steps)


def negative(models: ReferenceModels) -> Case:
    model, steps, states = models.residual()
    last, before = states[-1], states[-2]
    changed = {k: last[k] - 2 * before[k] for k in last if k.endswith("running_var")}
    model.load_state_dict({**last, **changed})
    return models.case(model, steps)


def narrow(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    half = [
        [(x.bfloat16(), y) for x, y in loader]
        for loader in (models.test_loader(), models.train_loader())
    ]
    case = models.case(model.bfloat16(), steps, loader=half[0], train_loader=half[1])
    case.model.train()
    return case


def momentum_one(models: ReferenceModels) -> Case:
    return with_momentum(models, 1.0)


def momentum_inverted(models: ReferenceModels) -> Case:
    return with_momentum(models, 0.9)


def unripe(models: ReferenceModels) -> Case:
    return with_momentum(models, 0.002)


def with_momentum(models: ReferenceModels, momentum: float) -> Case:
    model, steps = models.train_new(
        lambda: Cnn(lambda c: nn.BatchNorm2d(c, momentum=momentum)), epochs=3
    )
    return models.case(model, steps)


def stale(models: ReferenceModels) -> Case:
    model, _, states = models.residual()
    set_statistics(model, states[1])
    return models.case(model)


def stale_alone(models: ReferenceModels) -> Case:
    case = stale(models)
    del case.arguments["train_loader"]
    return case


def pruned(models: ReferenceModels) -> Case:
    model, steps, _ = models.residual()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                limit = module.weight.abs().quantile(0.8)
                module.weight[module.weight.abs() < limit] = 0
    return models.case(model, steps)


def momentum_zero(models: ReferenceModels) -> Case:
    return with_momentum(models, 0.0)


def never_updated(models: ReferenceModels) -> Case:
    model = models.untrained(lambda: Cnn(nn.BatchNorm2d)).train()
    model.get_submodule("norm2").eval()
    steps = models.train(model, epochs=3)
    return models.case(model, steps)


def frozen_at_start(models: ReferenceModels) -> Case:
    model = models.untrained(lambda: Cnn(nn.BatchNorm2d))
    freeze_norms(model)
    model.train()
    steps = models.train(model)
    return models.case(model, steps)


def lost(models: ReferenceModels) -> Case:
    trained, steps, _ = models.residual()
    model = models.residual()[0]
    for norm in norms_of(model):
        norm.reset_running_stats()
    model.load_state_dict(dict(trained.named_parameters()), strict=False)
    return models.case(model, steps)


def eval_trained(models: ReferenceModels) -> Case:
    model = models.untrained(lambda: Cnn(nn.BatchNorm2d)).eval()
    steps = models.train(model)
    return models.case(model, steps)


def ubn_frozen(models: ReferenceModels) -> Case:
    model, steps = models.train_new(lambda: Cnn(lambda c: UBN(c, tau=1.0)), epochs=3)
    return models.case(model, steps)


def rate_zero(models: ReferenceModels) -> Case:
    model, _ = models.train_new(
        lambda: Cnn(lambda c: BCN(c, groups=4, micro=True, update_rate=0.0)), epochs=3
    )
    return models.case(model)


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
