"""The optimizer, with all its state from the start, and the learning rates of its groups.

Those of the lab are so made that their steps can be recorded; others run as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from normkit import param_groups
from normkit.errors import OptionError, nearest
from normkit.lab.experiment import Train
from normkit.lab.experiment.rules import CHOICES, NATIVE_OPTIMIZERS
from normkit.lab.own_code import find, own_error_words
from normkit.lab.train.schedule import rate
from normkit.layers.base import Normalizer
from normkit.models import require

OF_TIMM = {"lars": "timm.optim:Lars", "lamb": "timm.optim:Lamb"}

Learns = Callable[[str, nn.Parameter], bool]


def groups_of(
    model: nn.Module, train: Train, learns: Learns = lambda name, parameter: True
) -> list[dict[str, Any]]:
    """The parameters by rate and decay, of those that learn.

    ``train.rates`` multiplies the rate of parameters by a pattern of their names, the first that
    fits; ``train.layer_decay`` that of each part of the model, from its last to its first.

    decay="all" decays every parameter, as most papers' scripts do; "weights" spares norms and
    biases. With slower_scale = c the norms' scales learn at lr / c.
    """
    if train.decay not in CHOICES["train.decay"]:
        hint = nearest(train.decay, CHOICES["train.decay"])
        raise OptionError(f"train.decay is {train.decay!r}. {hint}")
    groups = param_groups(model, train.lr, train.weight_decay, scale_lr_divisor=train.slower_scale)
    others = {id(p) for name, p in model.named_parameters() if not learns(name, p)}
    factors = {id(p): factor for p, factor in rate_factors(model, train)}
    alike: dict[tuple[float, float], list[nn.Parameter]] = {}  # fewer groups, fewer kernels
    for group in groups:
        decay = train.weight_decay if train.decay == "all" else group["weight_decay"]
        for p in group["params"]:
            if p.requires_grad and id(p) not in others:
                alike.setdefault((group["lr"] * factors.get(id(p), 1.0), decay), []).append(p)
    return [
        {"params": members, "lr": lr, "weight_decay": decay}
        for (lr, decay), members in alike.items()
    ]


def rate_factors(model: nn.Module, train: Train) -> Iterator[tuple[nn.Parameter, float]]:
    """What the learning rate of each parameter is multiplied by, where that is not 1."""
    parts: nn.Module = model
    while len(children := [c for c in parts.children() if any(True for _ in c.parameters())]) == 1:
        parts = children[0]
    depth = {id(p): i for i, part in enumerate(reversed(children)) for p in part.parameters()}
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        fits = (pattern for pattern in train.rates if fnmatchcase(name, pattern))
        pattern = next(fits, None)
        factor = train.layer_decay ** depth.get(id(parameter), len(children))
        if pattern is not None:
            used.add(pattern)
            factor *= float(train.rates[pattern])
        if factor != 1:
            yield parameter, factor
    if unused := [pattern for pattern in train.rates if pattern not in used]:
        first = next((name for name, _ in model.named_parameters()), "none")
        raise OptionError(
            f"train.rates has {unused[0]!r}, and no parameter has such a name. They are like "
            f"{first!r}; * stands for any part of it."
        )


def optimizer_of(
    model: nn.Module,
    train: Train,
    device: torch.device,
    learns: Learns = lambda name, parameter: True,
    folder: str = "",
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
        return _other_optimizer(groups, train, folder)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].update(_first_state(parameter, train))
    return optimizer


def _other_optimizer(
    groups: list[dict[str, Any]], train: Train, folder: str
) -> torch.optim.Optimizer:
    """Any class of torch.optim's kind, such as LARS and LAMB of timm."""
    name = train.optimizer
    if name in OF_TIMM:
        require("timm.optim", "models", f"train.optimizer = {name!r}")
    elif ":" not in name:
        hint = nearest(name, CHOICES["train.optimizer"])
        raise OptionError(f"train.optimizer is {name!r}. {hint}")
    kind = find(OF_TIMM.get(name, name), folder)
    try:
        optimizer = kind(groups, lr=train.lr, **train.optimizer_options)
    except (Exception, SystemExit) as error:
        raise OptionError(
            f"train.optimizer: {name} could not be made: {own_error_words(error)}."
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"train.optimizer: {name} made a {type(optimizer).__name__}.")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptionError(
            f"train.optimizer: {name} evaluates the loss several times a step, which the lab's "
            "training does not."
        )
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

    They are tensors, written in place: a recorded step reads them where they are. Optimizers that
    are not the lab's get numbers, since not all of them take tensors, and so do those on a CPU,
    where a number costs less. Layers that follow the learning rate get that of unslowed
    parameters, as ``normkit.follow_learning_rate`` does it with hooks, which a recorded step would
    not run.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        train: Train,
        steps: int,
        followers: Sequence[Normalizer],
        folder: str = "",
        in_tensors: bool = True,
    ) -> None:
        self.train, self.steps, self.folder = train, steps, folder
        self.in_tensors = in_tensors and train.optimizer in NATIVE_OPTIMIZERS
        self.groups = optimizer.param_groups
        self.bases = [float(group["lr"]) for group in optimizer.param_groups]
        self.tensors: list[Tensor] = []
        for group, base in zip(optimizer.param_groups, self.bases, strict=True):
            if not self.in_tensors:
                continue
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
        wanted = [rate(self.train, base, step, self.steps, self.folder) for base in self.bases]
        if wanted == self.now:
            return
        if self.in_tensors:
            for tensor, value in zip(self.tensors, wanted, strict=True):
                tensor.fill_(value)
        else:
            for group, value in zip(self.groups, wanted, strict=True):
                group["lr"] = value
        if self.followed:
            torch._foreach_zero_(self.followed)
            torch._foreach_add_(self.followed, min(self.base_rate(step), 1.0))
        self.now = wanted

    def base_rate(self, step: int) -> float:
        """The rate of parameters that are not slowed down."""
        return rate(self.train, self.train.lr, step, self.steps, self.folder)

    def forget(self) -> None:
        """Write again next time: somebody else has written to the tensors."""
        self.now = []


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The state of each parameter, in the order of the groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [dict(optimizer.state[p]) for p in parameters]


def group_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What some optimizers keep with their groups, such as the number of steps (timm's LAMB)."""
    kept = (int, float, Tensor)
    return [
        {name: value for name, value in group.items() if type(value) in kept and name != "lr"}
        for group in optimizer.param_groups
    ]


def load_group_state(optimizer: torch.optim.Optimizer, state: Sequence[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, state, strict=True):
        device = group["params"][0].device
        for name, value in saved.items():
            group[name] = value.to(device, copy=True) if isinstance(value, Tensor) else value


def load_state(optimizer: torch.optim.Optimizer, state: list[dict[str, Any]]) -> None:
    """Copy a state into the tensors that are there; what an optimizer has yet to make, as it is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, given in zip(parameters, state, strict=True):
        mine = optimizer.state[parameter]
        for name, value in given.items():
            if isinstance(mine.get(name), Tensor):
                mine[name].copy_(value)
            elif isinstance(value, Tensor):
                own = value.shape == parameter.shape and value.dim()  # a count stays on the host
                mine[name] = value.to(parameter.device if own else value.device, copy=True)
            else:
                mine[name] = value
