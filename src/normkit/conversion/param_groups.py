"""Parameter groups for an optimizer: which parameters are decayed, and at which learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from normkit.core.trained import DECAYED, NOT_DECAYED, SCALES
from normkit.errors import NothingToDo, OptionError, ShapeError, nearest
from normkit.inspection import kind_of
from normkit.layers.base import Normalizer
from normkit.layers.weight import WeightNormalizer


def param_groups(
    model: nn.Module,
    lr: float | Tensor,
    weight_decay: float,
    *,
    scale_lr_divisor: float = 100.0,
    rule: str = "module",
    no_decay: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer: decayed weights, what is not decayed, and norms' scales.

    rule="module" looks at what a parameter belongs to:
        scales       the weight γ of every norm: lr / scale_lr_divisor, no decay
        not_decayed  other parameters of norms (β, gates, bn's inner_weight), biases, and what
                     else is a vector or number, as in LayerScale and PReLU: lr
        decayed      the rest, kernels of bnet and ubn included: lr and weight_decay
    rule="official_shape" is that of the code of revisiting-bn, for comparison: whatever has one
    axis longer than 1 is not decayed, and at lr / scale_lr_divisor if its name contains "weight".
    It takes depthwise 1×1 kernels and classifiers with one row for scales, and decays norms of
    one channel.

    Every parameter is in exactly one group, shared and frozen ones too; groups without any are
    left out. Norms are all those that ``survey`` lists. ``no_decay`` are patterns
    of names of further parameters to spare, such as "*pos_embed". scale_lr_divisor=1 leaves one
    learning rate.

    Schedulers that multiply (LambdaLR, StepLR, CosineAnnealingLR with eta_min=0) keep the ratio.
    Those with an absolute rate do not: eta_min of CosineAnnealingLR and min_lr of
    ReduceLROnPlateau are the same for all groups, and OneCycleLR and CyclicLR need a list,
    ``max_lr=[group["lr"] for group in groups]``. LBFGS takes no groups, Muon matrices only.

    Make the groups after all conversions: a replaced norm has new parameters.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), nk.BN(8))
    >>> groups = nk.param_groups(model, lr=0.1, weight_decay=1e-4)
    >>> [(g["name"], len(g["params"]), round(g["lr"], 6)) for g in groups]
    [('decayed', 1, 0.1), ('not_decayed', 2, 0.1), ('scales', 1, 0.001)]
    >>> optimizer = torch.optim.SGD(groups, momentum=0.9)
    """
    rules: dict[str, Callable[[nn.Module], dict[nn.Parameter, str]]] = {
        "module": roles_by_module,
        "official_shape": roles_by_shape,
    }
    if rule not in rules:
        raise OptionError(f"param_groups got rule={rule!r}. {nearest(str(rule), rules)}")
    if not (math.isfinite(scale_lr_divisor) and scale_lr_divisor > 0):
        raise OptionError(
            f"param_groups expects scale_lr_divisor above 0, got {scale_lr_divisor!r}."
        )
    for option, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            raise OptionError(f"param_groups expects {option} ≥ 0, got {value!r}.")
    names = {parameter: name for name, parameter in model.named_parameters()}
    _check(names)
    roles = rules[rule](model)
    for parameter in _spared(names, no_decay):
        roles[parameter] = NOT_DECAYED if roles[parameter] == DECAYED else roles[parameter]
    if rule == "official_shape":
        scale_lr_divisor = max(scale_lr_divisor, 1.0)  # only a reduction acts there
    settings = {
        DECAYED: (lr, weight_decay),
        NOT_DECAYED: (lr, 0.0),
        SCALES: (lr / scale_lr_divisor, 0.0),
    }
    groups = []
    for name, (rate, decay) in settings.items():
        rate = rate.clone() if isinstance(rate, Tensor) else rate  # schedulers write into tensors
        if members := [parameter for parameter in names if roles[parameter] == name]:
            groups.append({"name": name, "params": members, "lr": rate, "weight_decay": decay})
    return groups


def _check(names: dict[nn.Parameter, str]) -> None:
    if not names:
        raise NothingToDo("param_groups found no parameters in the model.")
    for parameter, name in names.items():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ShapeError(f"{name} is lazy. Run one batch through the model first.")
        if type(parameter).__name__ == "FlatParameter":
            raise OptionError(
                f"{name} is a FlatParameter, which FSDP has made of many. Try "
                "use_orig_params=True, or fully_shard."
            )


def _spared(names: dict[nn.Parameter, str], patterns: Iterable[str]) -> list[nn.Parameter]:
    """The parameters whose names match a pattern; each pattern must match."""
    spared: list[nn.Parameter] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = [p for p, name in names.items() if fnmatchcase(name, pattern)]
        if not matches:
            raise OptionError(
                f"no_decay={pattern!r} matches no parameter. "
                f"{nearest(pattern.strip('*'), names.values())[:300]}"
            )
        spared += matches
    return spared


# -------------------------------------------------------------------- the role of a parameter


def roles_by_module(model: nn.Module) -> dict[nn.Parameter, str]:
    """The role of every parameter, by the module that owns it."""
    strength = {DECAYED: 0, NOT_DECAYED: 1, SCALES: 2}
    roles: dict[nn.Parameter, str] = {}
    for owner, name, parameter in _owned(model):
        role = _role(owner, name, parameter)
        # shared by a norm and something else: what the norm needs
        if strength[role] >= strength[roles.get(parameter, role)]:
            roles[parameter] = role
    return roles


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter with its module and name there; a parametrized one is what it stands for."""
    stands_for: dict[nn.Module, tuple[nn.Module, str]] = {}
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name, steps in module.parametrizations.items():  # type: ignore[operator, union-attr]
                stands_for[steps] = module, name
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield (*stands_for.get(module, (module, name)), parameter)


def _role(owner: nn.Module, name: str, parameter: nn.Parameter) -> str:
    if isinstance(owner, Normalizer | WeightNormalizer):
        return owner.parameter_role(name).group
    if kind_of(owner) is not None:  # a norm of another library
        return SCALES if name == "weight" else NOT_DECAYED
    # a weight of any layer has two axes at least; one is a scale such as that of LayerScale
    return NOT_DECAYED if parameter.dim() < 2 or "bias" in name.split("_") else DECAYED


def roles_by_shape(model: nn.Module) -> dict[nn.Parameter, str]:
    """The rule of the official code: by the number of axes after squeeze(), and by the name."""
    return {
        p: DECAYED if p.squeeze().dim() != 1 else SCALES if "weight" in name else NOT_DECAYED
        for name, p in model.named_parameters()
    }
