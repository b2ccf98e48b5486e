"""Reference models that nothing is wrong with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from normkit.diagnosis.diseases.nets import Cnn, PreActNet
from normkit.diagnosis.diseases.patient import Patient, Reference
from normkit.diagnosis.diseases.ward import Ward
from normkit.layers import BCN, BN, GN, RBN, UBN, WS, BatchRenorm, FrozenBN
from normkit.layers.following import follow_learning_rate


def _with_optimizer(patient: Patient) -> Patient:
    patient.arguments["optimizer"] = torch.optim.SGD(patient.model.parameters(), lr=0.1)
    return patient


def cnn_bn(ward: Ward) -> Patient:
    model, steps, _ = ward.host()
    return _with_optimizer(ward.patient(model, steps))


def resnet_bn(ward: Ward) -> Patient:
    model, steps, _ = ward.residual()
    return _with_optimizer(ward.patient(model, steps))


def mlp_bn(ward: Ward) -> Patient:
    model, steps, _ = ward.mlp()
    return ward.patient(model, steps)


def cnn_gn(ward: Ward) -> Patient:
    model, steps, _ = ward.known("cnn-gn", lambda: Cnn(lambda c: nn.GroupNorm(4, c)))
    return ward.patient(model, steps)


def cnn_bcn(ward: Ward) -> Patient:
    model, steps, _ = ward.known("cnn-bcn", lambda: Cnn(lambda c: BCN(c, groups=4), WS.attach))
    return ward.patient(model, steps)


def cnn_ubn(ward: Ward) -> Patient:
    model, steps, _ = ward.known("cnn-ubn", lambda: Cnn(UBN))
    return ward.patient(model, steps)


def cnn_rbn(ward: Ward) -> Patient:
    model, steps, _ = ward.known("cnn-rbn", lambda: Cnn(RBN))
    return ward.patient(model, steps)


def cnn_renorm(ward: Ward) -> Patient:
    model, steps, _ = ward.known("cnn-renorm", lambda: Cnn(lambda c: BatchRenorm(c, momentum=0.1)))
    return ward.patient(model, steps)


def preact_gn(ward: Ward) -> Patient:
    model, steps, _ = ward.known(
        "preact-gn", lambda: PreActNet(lambda c: GN(c, groups=4), WS.attach)
    )
    return ward.patient(model, steps)


def dropout_bn(ward: Ward) -> Patient:
    model, steps, _ = ward.known("dropout-bn", lambda: Cnn(BN, drop=0.3))
    return ward.patient(model, steps)


def frozen(ward: Ward) -> Patient:
    """Fine-tuned with frozen norms, on data that are somewhat brighter."""
    model, _, _ = ward.residual()
    freeze_norms(model)
    model.train()
    ward.teach(model, epochs=2, rate=0.02)
    return ward.patient(model)


def freeze_norms(model: nn.Module) -> None:
    """Frozen layers instead of batch norms."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, FrozenBN.from_batch_norm(child))


def averaged(ward: Ward) -> Patient:
    """A moving average of weights and buffers."""
    model, live, steps = moving_average(ward, buffers=True)
    return ward.patient(model, steps, ema_of=live)


def moving_average(ward: Ward, buffers: bool) -> tuple[nn.Module, nn.Module, int]:
    """A model trained on, its average over the batches, and the steps."""
    live, steps, states = ward.host()
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
    more = ward.teach(
        live,
        epochs=2,
        rate=0.02,
        prepare=lambda optimizer: optimizer.register_step_post_hook(blend),
    )
    return average, live, steps + more


def ranks(ward: Ward) -> Patient:
    """Two processes with random shards of the data."""
    model, steps, _ = ward.host()
    images, _ = ward.digits.train
    return ward.patient(model, steps, ranks=rank_states(model, [images[0::2], images[1::2]]))


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


def micro_bcn(ward: Ward) -> Patient:
    """Batches of four, with estimates that follow the learning rate."""

    def follow(optimizer: torch.optim.Optimizer) -> None:
        follow_learning_rate(model, optimizer)

    model = ward.new(lambda: Cnn(lambda c: BCN(c, groups=4, micro=True))).train()
    steps = ward.teach(model, batch=4, epochs=1, rate=0.02, prepare=follow)
    return ward.patient(model, steps, train_loader=ward.train_loader(4))


HEALTHY: tuple[Reference, ...] = (
    Reference("cnn-bn", "convolutions with torch.nn's batch norm", cnn_bn),
    Reference("resnet-bn", "residual network with torch.nn's batch norm", resnet_bn),
    Reference("mlp-bn", "linear layers with BatchNorm1d", mlp_bn),
    Reference("cnn-gn", "convolutions with torch.nn's group norm", cnn_gn),
    Reference("cnn-bcn-ws", "batch-channel norm and weight standardization", cnn_bcn),
    Reference("cnn-ubn", "unified batch norm", cnn_ubn),
    Reference("cnn-rbn", "representative batch norm, with gates", cnn_rbn),
    Reference("cnn-batch-renorm", "batch renormalization", cnn_renorm),
    Reference("preact-gn-ws", "norms before standardized convolutions, residual", preact_gn),
    Reference("cnn-bn-dropout", "normkit's batch norm, dropout behind the last norm", dropout_bn),
    Reference("frozen-finetune", "residual network, fine-tuned with frozen norms", frozen),
    Reference("ema-with-buffers", "moving average of weights and buffers", averaged),
    Reference("two-ranks", "two processes with random shards", ranks),
    Reference("micro-bcn", "micro-batch bcn, trained on batches of four", micro_bcn),
)
