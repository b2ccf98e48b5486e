"""HealthyModel models that nothing is wrong with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from normkit.layers import BCN, BN, GN, RBN, UBN, WS, BatchRenorm, FrozenBN
from normkit.layers.bcn import follow_learning_rate
from tools.diseases.networks import Cnn, PreActNet
from tools.diseases.reference_models import Case, HealthyModel, ReferenceModels


def _with_optimizer(case: Case) -> Case:
    case.arguments["optimizer"] = torch.optim.SGD(case.model.parameters(), lr=0.1)
    return case


def cnn_bn(models: ReferenceModels) -> Case:
    model, steps, _ = models.cnn()
    return _with_optimizer(models.case(model, steps))


def resnet_bn(models: ReferenceModels) -> Case:
    model, steps, _ = models.residual()
    return _with_optimizer(models.case(model, steps))


def mlp_bn(models: ReferenceModels) -> Case:
    model, steps, _ = models.mlp()
    return models.case(model, steps)


def cnn_gn(models: ReferenceModels) -> Case:
    model, steps, _ = models.trained("cnn-gn", lambda: Cnn(lambda c: nn.GroupNorm(4, c)))
    return models.case(model, steps)


def cnn_bcn(models: ReferenceModels) -> Case:
    model, steps, _ = models.trained("cnn-bcn", lambda: Cnn(lambda c: BCN(c, groups=4), WS.attach))
    return models.case(model, steps)


def cnn_ubn(models: ReferenceModels) -> Case:
    model, steps, _ = models.trained("cnn-ubn", lambda: Cnn(UBN))
    return models.case(model, steps)


def cnn_rbn(models: ReferenceModels) -> Case:
    model, steps, _ = models.trained("cnn-rbn", lambda: Cnn(RBN))
    return models.case(model, steps)


def cnn_renorm(models: ReferenceModels) -> Case:
    model, steps, _ = models.trained(
        "cnn-renorm", lambda: Cnn(lambda c: BatchRenorm(c, momentum=0.1))
    )
    return models.case(model, steps)


def preact_gn(models: ReferenceModels) -> Case:
    model, steps, _ = models.trained(
        "preact-gn", lambda: PreActNet(lambda c: GN(c, groups=4), WS.attach)
    )
    return models.case(model, steps)


def dropout_bn(models: ReferenceModels) -> Case:
    model, steps, _ = models.trained("dropout-bn", lambda: Cnn(BN, drop=0.3))
    return models.case(model, steps)


def frozen(models: ReferenceModels) -> Case:
    """Fine-tuned with frozen norms, on data that are somewhat brighter."""
    model, _, _ = models.residual()
    freeze_norms(model)
    model.train()
    models.train(model, epochs=2, rate=0.02)
    return models.case(model)


def freeze_norms(model: nn.Module) -> None:
    """Frozen layers instead of batch norms."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, FrozenBN.from_batch_norm(child))


def averaged(models: ReferenceModels) -> Case:
    """A moving average of weights and buffers."""
    model, live, steps = moving_average(models, buffers=True)
    return models.case(model, steps, ema_of=live)


def moving_average(models: ReferenceModels, buffers: bool) -> tuple[nn.Module, nn.Module, int]:
    """A model trained on, its average over the batches, and the steps."""
    live, steps, states = models.cnn()
    average = copy.deepcopy(live)
    average.load_state_dict(states[0 if not buffers else -1])
    names = dict(average.named_parameters())
    tensors = average.state_dict()

    def blend(*_: Any) -> None:
        for name, value in live.state_dict().items():
            if name in names or (buffers and value.is_floating_point()):
                tensors[name].lerp_(value, 0.1)
            elif buffers:
                tensors[name].copy_(value)

    live.train()
    more = models.train(
        live,
        epochs=2,
        rate=0.02,
        prepare=lambda optimizer: optimizer.register_step_post_hook(blend),
    )
    return average, live, steps + more


def ranks(models: ReferenceModels) -> Case:
    """Two processes with random shards of the data."""
    model, steps, _ = models.cnn()
    images, _ = models.digits.train
    return models.case(model, steps, ranks=rank_states(model, [images[0::2], images[1::2]]))


def rank_states(model: nn.Module, shards: list[torch.Tensor]) -> list[dict[str, Any]]:
    """The states of processes that have gone once through their own shard."""
    states = []
    for images in shards:
        own = copy.deepcopy(model).train()
        with torch.no_grad():
            for chosen in torch.randperm(len(images), generator=_fixed()).split(64):
                own(images[chosen])
        states.append(own.state_dict())
    return states


def _fixed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def micro_bcn(models: ReferenceModels) -> Case:
    """Batches of four, with estimates that follow the learning rate."""

    def follow(optimizer: torch.optim.Optimizer) -> None:
        follow_learning_rate(model, optimizer)

    model = models.untrained(lambda: Cnn(lambda c: BCN(c, groups=4, micro=True))).train()
    steps = models.train(model, batch=4, epochs=1, rate=0.02, prepare=follow)
    return models.case(model, steps, train_loader=models.train_loader(4))


HEALTHY: tuple[HealthyModel, ...] = (
    HealthyModel("cnn-bn", "convolutions with torch.nn's batch norm", cnn_bn),
    HealthyModel("resnet-bn", "residual network with torch.nn's batch norm", resnet_bn),
    HealthyModel("mlp-bn", "linear layers with BatchNorm1d", mlp_bn),
    HealthyModel("cnn-gn", "convolutions with torch.nn's group norm", cnn_gn),
    HealthyModel("cnn-bcn-ws", "batch-channel norm and weight standardization", cnn_bcn),
    HealthyModel("cnn-ubn", "unified batch norm", cnn_ubn),
    HealthyModel("cnn-rbn", "representative batch norm, with gates", cnn_rbn),
    HealthyModel("cnn-batch-renorm", "batch renormalization", cnn_renorm),
    HealthyModel("preact-gn-ws", "norms before standardized convolutions, residual", preact_gn),
    HealthyModel(
        "cnn-bn-dropout", "normkit's batch norm, dropout behind the last norm", dropout_bn
    ),
    HealthyModel("frozen-finetune", "residual network, fine-tuned with frozen norms", frozen),
    HealthyModel("ema-with-buffers", "moving average of weights and buffers", averaged),
    HealthyModel("two-ranks", "two processes with random shards", ranks),
    HealthyModel("micro-bcn", "micro-batch bcn, trained on batches of four", micro_bcn),
)
