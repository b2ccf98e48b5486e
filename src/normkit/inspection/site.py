"""One normalization of a model, and all that is known about it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from normkit.core.card import Card
from normkit.inspection.kinds import channel_axis_of, kind_of, layer_of, weight_kind_of
from normkit.layers.norm_act import NormAct

LIBRARIES = ("normkit", "torch", "timm", "torchvision")
MODULES = ("module", "act", "drop")  # fields that hold part of the model, not a fact about it
ACTS = ("act", "activation")
DROPS = ("drop", "dropout")


@dataclass(frozen=True, eq=False)
class Site:
    """One norm of a model: what it is, and where it stands.

    Two sites are equal if they are the same object: the same layer seen by another survey may have
    changed in between. An activation that is fused into the norm belongs to the site.
    """

    path: str  # the first path, as in named_modules(); "" if the norm is the model
    paths: tuple[str, ...]  # every path: more than one if the module is shared
    module: nn.Module
    kind: str  # a name of the catalog, or another one of kinds.py, or "other"
    library: str  # "normkit", "torch", "timm", "torchvision" or "other"
    class_name: str
    channels: int | None = None  # None if not known, as for a lazy norm
    groups: int | None = None
    eps: float | None = None
    momentum: float | None = None
    affine: bool = False
    tracked: bool = False  # keeps running statistics
    training: bool = False
    channel_axis: int = 1  # 1 for (N, C, *), -1 for norms over the last axis
    act: nn.Module | None = None  # the activation inside the norm, None if it has none
    drop: nn.Module | None = None  # likewise
    fed_by: str | None = None  # path of the convolution or linear layer whose output it gets
    followed_by: str | None = None  # path of the activation after it; its class name if inside
    block: str | None = None  # path of the residual block, or repeated unit, that it stands in
    position: int | None = None  # 1 for the first norm of the block; shortcuts do not count
    last_in_block: bool = False
    stem: bool = False  # before the first block
    shortcut: bool = False  # on the branch that passes the block by
    block_index: int | None = None  # 0 for the first block of the model
    own_forward: bool = False  # its forward is a user's own, and may do more than the kind says

    @property
    def norm(self) -> nn.Module:
        """The module without what NormAct adds to it."""
        return self.module.norm if isinstance(self.module, NormAct) else self.module

    @property
    def card(self) -> Card | None:
        """The card of the catalog's layer of this kind; None if there is none."""
        layer = layer_of(self.kind)
        return None if layer is None else layer.card

    @property
    def frozen(self) -> bool:
        """Whether it keeps running statistics that training does not change."""
        marked = getattr(getattr(self.norm, "_frozen", None), "statistics", False)
        layer = layer_of(self.kind)
        return bool(marked or (self.tracked and layer is not None and layer.is_fixed))

    @property
    def of_batches(self) -> bool:
        """Whether it is a batch norm or a relative, with statistics of batches or stored ones."""
        card = self.card
        if card is None:
            return self.kind == "lazy_bn"
        stored = card.statistics == "stored" and not card.normalizes_input
        return card.pools_samples or card.links_samples or stored

    @property
    def shared(self) -> bool:
        """Whether the module has more than one place in the model."""
        return len(self.paths) > 1

    @property
    def where(self) -> str:
        """The place in words, blocks numbered from 1: "stem", "block 3, norm 2 (last)", or ""."""
        if self.stem:
            return "stem"
        if self.block_index is None:
            return ""
        block = f"block {self.block_index + 1}"
        if self.shortcut:
            return f"{block}, shortcut"
        if self.position is None:
            return block
        last = " (last)" if self.last_in_block else ""
        return f"{block}, norm {self.position}{last}"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the modules, in values that JSON can hold."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in MODULES}
        return {**facts, "paths": list(self.paths), "shared": self.shared}


@dataclass(frozen=True, eq=False)
class WeightSite:
    """A convolution or linear layer with a normalized weight."""

    path: str
    module: nn.Module
    kind: str  # "ws", "wn" or "cwn" of the catalog, "scaled_ws" or "spectral"
    library: str
    class_name: str


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
        "eps": _number(norm, "eps", "variance_epsilon") if getattr(norm, "has_eps", True) else None,
        "momentum": momentum if tracked and isinstance(momentum, int | float) else None,
        "affine": _is_affine(norm),
        "tracked": tracked,
        "training": norm.training,
        "channel_axis": channel_axis_of(norm, kind),
        "act": _inside(module, ACTS),
        "drop": _inside(module, DROPS),
        "own_forward": _has_own_forward(norm),
    }


def channels_of(module: nn.Module) -> int | None:
    """How many channels a norm has; None for what is no norm, and for lazy ones."""
    if kind_of(module) is None:
        return None
    return channel_count(module.norm if isinstance(module, NormAct) else module)


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
    option = getattr(norm, "affine", getattr(norm, "elementwise_affine", None))
    return option if isinstance(option, bool) else getattr(norm, "weight", None) is not None


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


def weights_of(model: nn.Module) -> tuple[WeightSite, ...]:
    """Every layer with a normalized weight: by its class, a parametrization, or a hook."""
    return tuple(
        WeightSite(path, module, kind, library_of(module), type(module).__name__)
        for path, module in model.named_modules()
        if (kind := weight_kind_of(module)) is not None
    )
