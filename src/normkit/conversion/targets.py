"""What a norm can become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from normkit.catalog import ENTRIES, names
from normkit.core.groups import resolve_groups
from normkit.core.trained import TrainedBN
from normkit.errors import OptionError, UnknownName, nearest

TORCH_BN = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
BOTH = ("weight", "bias")
# The parameters that mean what scale and shift of a batch norm mean. rbn and iebn scale their
# weight against the gate, ubn both; a kernel is no scale.
ROLES: dict[str, tuple[str, ...]] = {
    "rbn": ("bias",),
    "iebn": ("bias",),
    "bnet": ("bias",),
    "ubn": (),
    "frozen_bn": (),  # buffers
    "input_norm": ("weight",),  # its bias is not trained
}


@dataclass(frozen=True)
class Target:
    """A kind of norm, and how to make one from what another knows."""

    name: str
    make: Callable[[Any, int, dict[str, Any]], nn.Module]
    """From the fields of a batch norm, the number of spatial axes and options."""
    options: tuple[str, ...]
    classes: tuple[type, ...]
    """What is of this kind already."""
    from_bn: bool
    """Whether it equals a batch norm in eval mode."""

    @property
    def roles(self) -> tuple[str, ...]:
        return ROLES.get(self.name, BOTH)

    def check(self, options: dict[str, Any]) -> None:
        for option in options:
            if option not in self.options:
                raise OptionError(
                    f"{self.name} has no option {option!r}. {nearest(option, self.options)}"
                )


def find_target(to: str | type) -> Target:
    """The target of a name or class, or an error that suggests the nearest one."""
    if isinstance(to, type):
        for target in TARGETS.values():
            if to in target.classes:
                return target
        raise UnknownName(
            f"{to.__name__} is no layer that norms can be converted to. Try one of "
            f"{', '.join(sorted(TARGETS))}."
        )
    if to in names("weight"):
        raise UnknownName(
            f"{to!r} normalizes weights, not activations. Try normkit.standardize(model, {to!r})."
        )
    if to not in TARGETS:
        raise UnknownName(f"There is no target {to!r}. {nearest(str(to).lower(), TARGETS)}")
    return TARGETS[to]


def _of_the_catalog(name: str) -> Target:
    entry = ENTRIES[name]
    known = tuple(option for option in entry.options() if option not in ("device", "dtype"))

    momentum = entry.options().get("momentum")
    # a source without momentum reads as 0.1; some layers want another one
    slow = momentum.default if momentum is not None and momentum.default != 0.1 else None

    def make(bn: Any, rank: int, options: dict[str, Any]) -> nn.Module:
        if "dims" in known:
            options = {"dims": rank, **options}
        if slow is not None and not hasattr(bn, "momentum"):
            options = {"momentum": slow, **options}
        made: nn.Module = entry.from_batch_norm(bn, **options)
        return made

    return Target(name, make, known, (entry,), entry.card.exact_from_bn)


def _torch_bn(bn: Any, rank: int, options: dict[str, Any]) -> nn.Module:
    return _filled(TORCH_BN[rank], bn, options)


def _sync_bn(bn: Any, rank: int, options: dict[str, Any]) -> nn.Module:
    return _filled(nn.SyncBatchNorm, bn, options)


def _torch_gn(bn: Any, rank: int, options: dict[str, Any]) -> nn.Module:
    known = TrainedBN.read(bn)
    rest = {key: value for key, value in options.items() if key not in ("groups", "group_policy")}
    wish, policy = options.get("groups"), options.get("group_policy", "error")
    groups = resolve_groups(known.channels, wish, policy, owner="GroupNorm")
    made = nn.GroupNorm(
        groups,
        known.channels,
        **{"eps": known.eps, "affine": known.affine, **rest},
        device=known.mean.device,
        dtype=known.weight.dtype,
    )
    return _start(made, known)


def _filled(kind: type[nn.Module], bn: Any, options: dict[str, Any]) -> nn.Module:
    known = TrainedBN.read(bn)
    usual = {"eps": known.eps, "momentum": known.momentum, "affine": known.affine}
    made = kind(
        known.channels,
        **{**usual, **options},
        device=known.mean.device,
        dtype=known.weight.dtype,
    )
    return _start(made, known)


def _start(made: Any, known: TrainedBN) -> nn.Module:
    """Values, mode and whether to train, as ``from_batch_norm`` does for our layers."""
    values = {
        "weight": known.weight,
        "bias": known.bias,
        "running_mean": known.mean,
        "running_var": known.var,
        "num_batches_tracked": known.batches,
    }
    for name, value in values.items():
        tensor = getattr(made, name, None)
        if tensor is not None:
            tensor.detach().copy_(value)
    made.requires_grad_(known.trainable)
    module: nn.Module = made.train(known.training)
    return module


_BATCH_OPTIONS = ("eps", "momentum", "affine", "track_running_stats")
TARGETS: dict[str, Target] = {
    **{name: _of_the_catalog(name) for name in names("activation")},
    "torch_bn": Target("torch_bn", _torch_bn, _BATCH_OPTIONS, tuple(TORCH_BN.values()), True),
    "torch_gn": Target(
        "torch_gn", _torch_gn, ("groups", "group_policy", "eps", "affine"), (nn.GroupNorm,), False
    ),
    "sync_bn": Target(
        "sync_bn", _sync_bn, (*_BATCH_OPTIONS, "process_group"), (nn.SyncBatchNorm,), True
    ),
}
"""Every name that ``convert`` takes."""
