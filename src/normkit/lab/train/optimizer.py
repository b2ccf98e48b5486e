"""The optimizer, with all its state from the start, and the learning rate of every step.

So made that its steps can be recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit import param_groups
from normkit.errors import OptionError, nearest
from normkit.lab.experiment import Train
from normkit.lab.experiment.rules import CHOICES
from normkit.layers.base import Normalizer

Learns = Callable[[str, nn.Parameter], bool]


def groups_of(
    model: nn.Module, train: Train, learns: Learns = lambda name, parameter: True
) -> list[dict[str, Any]]:
    """The parameters by rate and decay, of those that learn.

    decay="all" decays every parameter, as most papers' scripts do; "weights" spares norms and
    biases. With slower_scale = c the norms' scales learn at lr / c.
    """
    if train.decay not in CHOICES["train.decay"]:
        hint = nearest(train.decay, CHOICES["train.decay"])
        raise OptionError(f"train.decay is {train.decay!r}. {hint}")
    groups = param_groups(model, train.lr, train.weight_decay, scale_lr_divisor=train.slower_scale)
    others = {id(p) for name, p in model.named_parameters() if not learns(name, p)}
    alike: dict[tuple[float, float], list[nn.Parameter]] = {}  # fewer groups, fewer kernels
    for group in groups:
        decay = train.weight_decay if train.decay == "all" else group["weight_decay"]
        learning = [p for p in group["params"] if p.requires_grad and id(p) not in others]
        alike.setdefault((group["lr"], decay), []).extend(learning)
    return [
        {"params": members, "lr": lr, "weight_decay": decay}
        for (lr, decay), members in alike.items()
        if members
    ]


def optimizer_of(
    model: nn.Module,
    train: Train,
    device: torch.device,
    learns: Learns = lambda name, parameter: True,
) -> torch.optim.Optimizer:
    """The optimizer of a run; one kernel for all parameters, on CPUs too."""
    groups = groups_of(model, train, learns)
    optimizer: torch.optim.Optimizer
    if train.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            groups, lr=train.lr, momentum=train.momentum, nesterov=train.nesterov, fused=True
        )
    elif train.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
        optimizer = kind(groups, lr=train.lr, fused=True, capturable=device.type == "cuda")
    else:
        hint = nearest(train.optimizer, CHOICES["train.optimizer"])
        raise OptionError(f"train.optimizer is {train.optimizer!r}. {hint}")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].update(_first_state(parameter, train))
    return optimizer


def _first_state(parameter: Tensor, train: Train) -> dict[str, Tensor]:
    """What torch would make in the first step, with the same numbers: a sum that is still 0."""
    if train.optimizer == "sgd":
        return {"momentum_buffer": torch.zeros_like(parameter)} if train.momentum else {}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


class Rates:
    """The learning rates of an optimizer's groups, and of the layers that follow them.

    They are tensors, written in place: a recorded step reads them where they are. Layers that
    follow the learning rate get that of unslowed parameters, as ``normkit.follow_learning_rate``
    does it with hooks, which a recorded step would not run.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        train: Train,
        steps: int,
        followers: Sequence[Normalizer],
    ) -> None:
        self.train, self.steps = train, steps
        self.bases = [float(group["lr"]) for group in optimizer.param_groups]
        self.tensors: list[Tensor] = []
        for group, base in zip(optimizer.param_groups, self.bases, strict=True):
            device = group["params"][0].device
            wide = torch.float32 if device.type != "cpu" else torch.float64  # kernels read floats
            group["lr"] = torch.tensor(base, dtype=wide, device=device)
            self.tensors.append(group["lr"])
        self.now: list[float] = []
        self.followed = [layer.rate for layer in followers]
        for layer in followers:
            layer.set_update_rate(train.lr)

    def write(self, step: int) -> None:
        """Set the rates for a step, counted from 0 over all epochs; waits for nothing."""
        wanted = [rate(self.train, base, step, self.steps) for base in self.bases]
        if wanted == self.now:
            return
        for tensor, value in zip(self.tensors, wanted, strict=True):
            tensor.fill_(value)
        if self.followed:
            torch._foreach_zero_(self.followed)
            torch._foreach_add_(self.followed, min(self.base_rate(step), 1.0))
        self.now = wanted

    def base_rate(self, step: int) -> float:
        """The rate of parameters that are not slowed down."""
        return rate(self.train, self.train.lr, step, self.steps)

    def forget(self) -> None:
        """Write again next time: somebody else has written to the tensors."""
        self.now = []


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """The state of each parameter, in the order of the groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [dict(optimizer.state[p]) for p in parameters]


def load_state(optimizer: torch.optim.Optimizer, state: list[dict[str, Tensor]]) -> None:
    """Copy a state into the tensors that are there."""
    for mine, given in zip(state_of(optimizer), state, strict=True):
        for name, tensor in mine.items():
            tensor.copy_(given[name])


def rate(train: Train, base: float, step: int, steps: int) -> float:
    """The rate of a group that starts at ``base`` for a step, counted from 0 over all epochs.

    ``steps`` are those of an epoch; t is the time in epochs, a whole number with per="epoch":

        constant   base
        step       base · factor^(milestones that t has reached)
        cosine     floor + (base − floor) · (1 + cos(π·t/epochs)) / 2
        poly       floor + (base − floor) · (1 − t/epochs)^power

    The floor is the same for all groups, as eta_min of torch's CosineAnnealingLR is: a group with
    a lower base ends there too. A warm-up is a factor that rises with every step, from 0 at the
    first one to 1 after so many epochs; the schedule runs on underneath.

    >>> train = Train(epochs=10, lr=0.1, schedule="step", milestones=(5,), warmup=1)
    >>> [round(rate(train, 0.1, step, 100), 4) for step in (0, 50, 100, 500)]
    [0.0, 0.05, 0.1, 0.01]
    """
    passed = step / steps
    time = passed if train.per == "step" else float(step // steps)
    warm = min(1.0, passed / train.warmup) if train.warmup > 0 else 1.0
    if train.schedule == "constant":
        return warm * base
    if train.schedule == "step":
        return warm * (base * train.factor ** sum(mark <= time for mark in train.milestones))
    if train.schedule == "cosine":
        shape = (1 + math.cos(math.pi * time / train.epochs)) / 2
    elif train.schedule == "poly":
        shape = (1 - time / train.epochs) ** train.power
    else:
        hint = nearest(train.schedule, CHOICES["train.schedule"])
        raise OptionError(f"train.schedule is {train.schedule!r}. {hint}")
    return warm * (train.floor + (base - train.floor) * shape)
