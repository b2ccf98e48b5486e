"""What a norm says about itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normkit.inspection.kinds import kind_of
from normkit.layers.norm_act import NormAct

LIBRARIES = ("normkit", "torch", "timm", "torchvision")
ACTS = ("act", "activation")
DROPS = ("drop", "dropout")
OVER_THE_LAST_AXIS = ("ln", "rms", "simple", "grn")


def facts_of(module: nn.Module) -> dict[str, Any]:
    """The fields of a ``Site`` that the norm itself knows; empty for what is no norm."""
    kind = kind_of(module)
    if kind is None:
        return {}
    norm = module.norm if isinstance(module, NormAct) else module
    tracked = any(k.startswith("running_") and b is not None for k, b in norm._buffers.items())
    groups = _number(norm, "groups", "num_groups")
    momentum = getattr(norm, "momentum", None)
    return {
        "kind": kind,
        "library": library_of(norm),
        "class_name": type(module).__name__,
        "channels": channel_count(norm),
        "groups": None if groups is None else int(groups),
        "eps": _number(norm, "eps", "variance_epsilon"),
        "momentum": momentum if tracked and isinstance(momentum, int | float) else None,
        "affine": _is_affine(norm),
        "tracked": tracked,
        "training": norm.training,
        "channel_axis": _channel_axis(norm, kind),
        "act": _inside(module, ACTS),
        "drop": _inside(module, DROPS),
        "own_forward": _has_own_forward(norm),
    }


def library_of(module: nn.Module) -> str:
    """Where the class of a module comes from."""
    root = type(module).__module__.split(".")[0]
    return root if root in LIBRARIES else "other"


def channel_count(norm: nn.Module) -> int | None:
    """How many channels a norm has; None if it does not say, as a lazy one."""
    for name in ("num_features", "num_channels", "channels"):
        channels = getattr(norm, name, None)
        if isinstance(channels, int) and not isinstance(channels, bool):
            return channels or None
    if shape := getattr(norm, "normalized_shape", None):
        return int(shape[0]) if isinstance(shape, tuple | list) else int(shape)
    weight = getattr(norm, "weight", None)
    lazy = isinstance(weight, nn.UninitializedParameter)
    if lazy or not isinstance(weight, Tensor) or weight.numel() == 0:
        return None
    return weight.numel() if weight.numel() == max(weight.shape, default=0) else None


def _is_affine(norm: nn.Module) -> bool:
    said = getattr(norm, "affine", getattr(norm, "elementwise_affine", None))
    return said if isinstance(said, bool) else getattr(norm, "weight", None) is not None


def _channel_axis(norm: nn.Module, kind: str) -> int:
    """-1 if the channels are on the last axis, as in a transformer."""
    if library_of(norm) == "normkit" or kind not in OVER_THE_LAST_AXIS:
        return 1
    if any("2d" in base.__name__ for base in type(norm).__mro__):
        return 1
    whole_maps = len(getattr(norm, "normalized_shape", ())) > 1  # nn.LayerNorm((C, H, W))
    return 1 if whole_maps else int(getattr(norm, "channel_dim", -1))  # timm's GRN says it


def _inside(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """A child of one of these names that does something."""
    for name, child in module.named_children():
        if name in names and not isinstance(child, nn.Identity):
            return child
    return None


def _has_own_forward(norm: nn.Module) -> bool:
    """Whether forward was written outside of the known libraries, or replaced on the instance."""
    owner = next(base for base in type(norm).__mro__ if "forward" in vars(base))
    return "forward" in vars(norm) or owner.__module__.split(".")[0] not in LIBRARIES


def _number(norm: nn.Module, *names: str) -> float | None:
    """The first of these attributes that is a number."""
    for name in names:
        value = getattr(norm, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None
