"""The optimizer, made so that its steps can be recorded: all its state is there from the start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit import param_groups
from normkit.errors import OptionError, nearest
from normkit.lab.experiment import Train
from normkit.lab.train.schedule import rate
from normkit.layers.bcn import BCN

OPTIMIZERS = ("sgd", "adam", "adamw")


def groups_of(model: nn.Module, train: Train) -> list[dict[str, Any]]:
    """The parameters by rate and decay.

    decay="all" decays every parameter, as most papers' scripts do; "weights" spares norms and
    biases. With slower_scale = c the norms' scales learn at lr / c.
    """
    if train.decay not in ("all", "weights"):
        raise OptionError(f"train.decay is {train.decay!r}. {nearest(train.decay, _DECAYS)}")
    found = param_groups(model, train.lr, train.weight_decay, scale_lr_divisor=train.slower_scale)
    alike: dict[tuple[float, float], list[nn.Parameter]] = {}  # fewer groups, fewer kernels
    for group in found:
        decay = train.weight_decay if train.decay == "all" else group["weight_decay"]
        learning = [p for p in group["params"] if p.requires_grad]
        alike.setdefault((group["lr"], decay), []).extend(learning)
    return [
        {"params": members, "lr": lr, "weight_decay": decay}
        for (lr, decay), members in alike.items()
        if members
    ]


_DECAYS = ("all", "weights")


def optimizer_of(model: nn.Module, train: Train, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of a run; one kernel for all parameters, on CPUs too."""
    groups = groups_of(model, train)
    made: torch.optim.Optimizer
    if train.optimizer == "sgd":
        made = torch.optim.SGD(
            groups, lr=train.lr, momentum=train.momentum, nesterov=train.nesterov, fused=True
        )
    elif train.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
        made = kind(groups, lr=train.lr, fused=True, capturable=device.type == "cuda")
    else:
        known = nearest(train.optimizer, OPTIMIZERS)
        raise OptionError(f"train.optimizer is {train.optimizer!r}. {known}")
    for group in made.param_groups:
        for parameter in group["params"]:
            made.state[parameter].update(_first_state(parameter, train))
    return made


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

    They are tensors, written in place: a recorded step reads them where they are. Layers of
    micro-batch normalization without a rate of their own update at the rate of the first group, as
    ``normkit.follow_learning_rate`` does it with hooks, which a recorded step would not run.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, train: Train, steps: int, followers: list[BCN]
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
