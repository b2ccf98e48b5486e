"""One normalization of a model, and all that is known about it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from normkit.layers.norm_act import NormAct

MODULES = ("module", "act", "drop")  # fields that hold part of the model, not a fact about it


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
