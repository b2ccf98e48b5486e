"""What a norm can become: a layer of the catalog, one of torch's own, torchvision's frozen one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normkit.catalog import ENTRIES, meant, names, spoken_form, suggestion
from normkit.conversion.groups import PER_GROUP, with_groups
from normkit.core.groups import resolve_groups
from normkit.core.optional_dependencies import require
from normkit.core.trained import STATISTICS, TrainedBN
from normkit.errors import OptionError, UnknownName, nearest
from normkit.layers.base import Normalizer

Taken = dict[str, str]
"""Which tensors of a new layer hold something of the old one, and what."""
TORCH_BN = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
WEIGHTS = names("weight")
BATCH_OPTIONS = ("eps", "momentum", "affine", "track_running_stats")
FROZEN = "torchvision.ops.misc.FrozenBatchNorm2d"


@dataclass(frozen=True)
class Target:
    """A kind of norm, and how to make one from what another knows."""

    name: str
    make: Callable[[TrainedBN, int, dict[str, Any]], tuple[nn.Module, Taken]]
    """From a batch norm, the number of spatial axes and options."""
    options: tuple[str, ...]
    classes: tuple[type, ...]
    """What is of this kind already."""
    from_bn: bool
    """Whether it equals a batch norm in eval mode."""
    class_name: str = ""
    """Of a class that is not imported before it is needed: module and name."""

    def has(self, kind: type) -> bool:
        """Whether a class is of this kind already."""
        return kind in self.classes or f"{kind.__module__}.{kind.__name__}" == self.class_name

    @property
    def missing_choice(self) -> Callable[[dict[str, Any]], str]:
        layer = next(iter(self.classes), nn.Module)
        if not issubclass(layer, Normalizer):
            return lambda asked: ""
        return lambda asked: "" if PER_GROUP in asked else layer.missing_choice(asked)

    def check(self, options: dict[str, Any]) -> None:
        for option in options:
            if option not in self.options:
                raise OptionError(
                    f"{self.name} has no option {option!r}. {nearest(option, self.options)}"
                )


def find_target(to: str | type) -> Target:
    """The target of a name or class, or an error that suggests the nearest one.

    "GroupNorm" and "group_norm" are gn of the catalog; torch's own is "torch_gn", or the class.
    """
    if isinstance(to, type):
        for target in TARGETS.values():
            if target.has(to):
                return target
        raise UnknownName(
            f"{to.__name__} is no layer that norms can be converted to. Try one of "
            f"{', '.join(sorted(TARGETS))}."
        )
    if method := meant(to, WEIGHTS):
        raise UnknownName(
            f"{to!r} normalizes weights, not activations. "
            f"Try normkit.standardize(model, {method!r})."
        )
    name = to if to in TARGETS else meant(to, TARGETS) or _meant_of_torch(to)
    if name is None:
        raise UnknownName(f"There is no target {to!r}. {suggestion(to, TARGETS)}")
    return TARGETS[name]


def _meant_of_torch(name: str) -> str | None:
    """The target for the name of a class of torch that the catalog has not."""
    word = spoken_form(name)
    return next((t.name for t in _OF_TORCH for c in t.classes if word == c.__name__.lower()), None)


def _catalog_target(name: str) -> Target:
    layer = ENTRIES[name]
    options = tuple(option for option in layer.options() if option not in ("device", "dtype"))
    per_group = (PER_GROUP,) if "groups" in options else ()

    def make(bn: TrainedBN, rank: int, asked: dict[str, Any]) -> tuple[nn.Module, Taken]:
        dims = {"dims": rank} if "dims" in options else {}
        asked = with_groups(bn.channels, asked, layer.__name__)
        started: tuple[nn.Module, Taken] = layer.from_trained(bn, **{**dims, **asked})
        return started

    return Target(name, make, (*options, *per_group), (layer,), layer.card.exact_from_bn)


def _torch_bn(bn: TrainedBN, rank: int, asked: dict[str, Any]) -> tuple[nn.Module, Taken]:
    return _filled(TORCH_BN[rank], bn, asked)


def _sync_bn(bn: TrainedBN, rank: int, asked: dict[str, Any]) -> tuple[nn.Module, Taken]:
    if not (bn.tracked or bn.pools_samples):
        raise OptionError("it has nothing to synchronise: only batch norms have that form")
    return _filled(nn.SyncBatchNorm, bn, asked)


def _torch_gn(bn: TrainedBN, rank: int, asked: dict[str, Any]) -> tuple[nn.Module, Taken]:
    asked = with_groups(bn.channels, asked, "GroupNorm")
    rest = {key: value for key, value in asked.items() if key not in ("groups", "group_policy")}
    wish, policy = asked.get("groups"), asked.get("group_policy", "error")
    groups = resolve_groups(bn.channels, wish, policy, owner="GroupNorm")
    options: dict[str, Any] = {"eps": bn.eps, "affine": bn.affine, **rest, **_type(bn)}
    return _started(nn.GroupNorm(groups, bn.channels, **options), bn)


def _torchvision_frozen_bn(
    bn: TrainedBN, rank: int, asked: dict[str, Any]
) -> tuple[nn.Module, Taken]:
    if not bn.tracked:
        raise OptionError("it keeps no running statistics that could be frozen")
    if rank != 2:
        raise OptionError(f"it is for images, and this norm has {rank} spatial axes: try frozen_bn")
    misc = require("torchvision.ops", "models", "torchvision_frozen_bn")
    layer = misc.FrozenBatchNorm2d(bn.channels, **{"eps": bn.eps, **asked})
    return _started(layer.to(**_type(bn)), bn)


def _filled(kind: type[nn.Module], bn: TrainedBN, asked: dict[str, Any]) -> tuple[nn.Module, Taken]:
    usual = {"eps": bn.eps, "momentum": bn.momentum, "affine": bn.affine}
    if bn.pools_samples and not bn.tracked:  # or eval mode would use statistics of nothing
        usual["track_running_stats"] = False
    return _started(kind(bn.channels, **{**usual, **asked}, **_type(bn)), bn)


def _type(bn: TrainedBN) -> dict[str, Any]:
    return {"device": bn.mean.device, "dtype": bn.weight.dtype}


@torch.no_grad()
def _started(layer: nn.Module, bn: TrainedBN) -> tuple[nn.Module, Taken]:
    """Values, mode and whether to train, as ``from_trained`` does for our layers."""
    taken = {}
    for name, value, what in (
        ("weight", bn.weight, "weight"),
        ("bias", bn.bias, "bias"),
        ("running_mean", bn.mean, STATISTICS),
        ("running_var", bn.var, STATISTICS),
        ("num_batches_tracked", bn.batches, STATISTICS),
    ):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            tensor.copy_(value)
            taken[name] = what
    layer.requires_grad_(bn.trainable).train(bn.training)
    bias = layer._parameters.get("bias")
    if bn.affine and "bias" in bn.missing and bias is not None:
        bias.requires_grad_(False)
    return layer, taken


_OF_TORCH = (
    Target("torch_bn", _torch_bn, BATCH_OPTIONS, tuple(TORCH_BN.values()), True),
    Target("torch_gn", _torch_gn, ("groups", PER_GROUP, "group_policy", "eps", "affine"),
           (nn.GroupNorm,), False),
    Target("sync_bn", _sync_bn, (*BATCH_OPTIONS, "process_group"), (nn.SyncBatchNorm,), True),
    Target("torchvision_frozen_bn", _torchvision_frozen_bn, ("eps",), (), True, FROZEN),
)  # fmt: skip
TARGETS: dict[str, Target] = {
    **{name: _catalog_target(name) for name in names("activation")},
    **{target.name: target for target in _OF_TORCH},
}
"""Every name that ``convert`` takes."""
