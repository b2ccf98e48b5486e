"""A norm, what is added to it, and the activation after it, as one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from normkit.core.messages import title
from normkit.engine.activations import module_of, name_of_module
from normkit.errors import OptionError
from normkit.layers.base import Normalizer


class NormAct(nn.Module):
    """act(drop(norm(x)) + residual).

    With a normalizer of normkit, a usual activation (ReLU, SiLU, GELU and so on, by the names of
    ``engine/activations.py``) and no drop layer, all of it is one pass over memory: the sum and the
    activation ride on the affine map, and backward stores nothing more. Any other norm, activation
    or drop layer is called one after the other, with the same result.

    Attributes that this module has not are those of the norm, and a state_dict may name the norm's
    tensors with or without ``norm.``: a layer that has its norm replaced by a NormAct still loads
    the checkpoints it used to.

    >>> import torch, normkit as nk
    >>> layer = nk.NormAct(nk.make("gn", 8, groups=4), "relu")
    >>> x = torch.randn(2, 8, 5, 5)
    >>> layer(x, residual=x).min() >= 0
    tensor(True)
    """

    def __init__(
        self,
        norm: nn.Module,
        act: str | nn.Module | None = "relu",
        *,
        drop: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.norm: nn.Module = norm
        self.drop: nn.Module = nn.Identity() if drop is None else drop
        self.act: nn.Module = act if isinstance(act, nn.Module) else module_of(act or "none")

    @property
    def fused(self) -> str | None:
        """The activation that rides on the norm's own pass; None if the parts run one by one."""
        if not (isinstance(self.norm, Normalizer) and type(self.drop) is nn.Identity):
            return None
        return name_of_module(self.act)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        fused, named = self.fused, {} if mask is None else {"mask": mask}
        if fused is not None:
            y: Tensor = self.norm(x, residual, fused, **named)
            return y
        if named and not isinstance(self.norm, Normalizer):
            raise OptionError(
                f"{title(self)} has a {type(self.norm).__name__}, which takes no mask. "
                "Try a normalizer of normkit."
            )
        y = self.drop(self.norm(x, **named))
        return self.act(y if residual is None else y + residual)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            norm = self.__dict__.get("_modules", {}).get("norm")
            if norm is None or name.startswith("__"):
                raise
            return getattr(norm, name)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for key in self.norm.state_dict():
            inner, outer = f"{prefix}norm.{key}", prefix + key
            if inner not in state_dict and outer in state_dict:
                state_dict[inner] = state_dict.pop(outer)  # type: ignore[index,attr-defined]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
