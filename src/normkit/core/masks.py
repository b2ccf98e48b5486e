"""Masks: which positions of a padded batch count, and the cells of a tensor without the others.

A mask is a boolean for each sample and position, the same for all channels. A layout with a mask
takes means over what is valid, and its ``count`` is a table (N, 1): the moments of samples of
different sizes are then pooled by how many values each has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.core.layout import Batch, Channels, Layout
from normkit.core.messages import title
from normkit.errors import DeviceError, DtypeError, OptionError, ShapeError

RESIZE = ("any", "nearest")
_LARGEST: dict[int, Any] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}


class MaskedCells:
    """A layout whose means are over the valid values of each cell; of none they are 0.

    The tensor must be finite where the mask is false: zero, see ``blank``.
    """

    splits = False

    def __init__(self, inner: Layout, valid: Tensor) -> None:
        """``valid`` is (N, 1, *spatial)."""
        assert isinstance(inner, Batch | Channels)
        self.inner, self.valid = inner, valid
        self.rows, self.columns, self.extent = inner.rows, inner.columns, inner.extent
        self.cells = inner.view(valid.expand(inner.shape))
        count = valid.sum() if isinstance(inner, Batch) else valid.flatten(1).sum(1)
        self.count: int | Tensor = count.reshape(-1, 1)  # (N, 1), or (1, 1) of the whole batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # how memory is laid: as without a mask

    def sum(self, values: Tensor) -> Tensor:
        """Of values that are zero outside, as gradients are: the output is blanked."""
        return self.inner.sum(values)

    def mean(self, values: Tensor) -> Tensor:
        return self.mean_of_blank(torch.where(self.cells, values, 0))

    def mean_of_blank(self, values: Tensor) -> Tensor:
        """The same of values that are zero outside."""
        assert isinstance(self.count, Tensor)
        count = self.count.clamp(min=1).to(values.dtype).expand(self.rows, self.columns)
        return self.inner.sum(values) / self.inner.lay(count)

    def near(self, cells: Tensor, values: int = 1) -> Tensor:
        return self.mean(cells)


def blank(x: Tensor, valid: Tensor) -> Tensor:
    """x with zeros where the mask (N, 1, *spatial) is false, whatever stood there, NaN included."""
    return torch.where(valid, x, 0)


def checked(mask: Any, owner: Any) -> Tensor:
    """A mask as booleans; numbers must be 0 and 1, which is looked up for what is no boolean."""
    if not isinstance(mask, Tensor):
        kind = type(mask).__name__
        raise DtypeError(f"{_name(owner)} expects a mask that is a tensor of booleans, got {kind}.")
    if mask.dtype is torch.bool:
        return mask
    if mask.is_complex():
        raise DtypeError(
            f"{_name(owner)} expects a mask of booleans or of 0 and 1, got {mask.dtype}."
        )
    known = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if not known and not mask.is_meta and not bool(((mask == 0) | (mask == 1)).all()):
        raise DtypeError(
            f"{_name(owner)} expects a mask of booleans or of 0 and 1, true where a position "
            f"counts, got {mask.dtype} with other values. Try mask > 0, or mask == 0 for one that "
            "is added to the logits of an attention."
        )
    return mask != 0


def fitted(mask: Tensor, x: Tensor, owner: Any) -> Tensor:
    """A mask (N, *spatial) or (N, 1, *spatial) of just the size of x, as (N, 1, *spatial)."""
    size = (x.shape[0], *x.shape[2:])
    if tuple(mask.shape) == size:
        mask = mask.unsqueeze(1)
    elif tuple(mask.shape) != (x.shape[0], 1, *x.shape[2:]):
        wide = tuple(mask.shape) == tuple(x.shape)
        raise ShapeError(
            f"{_name(owner)} expects a mask {size} or {(size[0], 1, *size[1:])} for input "
            f"{tuple(x.shape)}, got {tuple(mask.shape)}. "
            + (
                "All channels have one mask: try mask[:, :1]."
                if wide
                else "Try normkit.masked(mask), which resizes a mask to each map."
            )
        )
    _check_device(mask, x, owner)
    return mask


def resized(mask: Tensor, size: Sequence[int], how: str) -> Tensor:
    """A mask (N, 1, *spatial) for maps of another size, (N, 1, *size).

    "any": a position of the map counts if anything does that it covers; "nearest": if the first
    one does. For maps without axes, (N, C), samples count in which anything does.
    """
    old, size = tuple(mask.shape[2:]), tuple(size)
    if old == size:
        return mask
    if not size:
        return mask.flatten(1).any(1, keepdim=True)
    if how == "any" and len(size) in _LARGEST:
        result: Tensor = _LARGEST[len(size)](mask.to(torch.float32), size)
        return result > 0
    for axis, (many, wanted) in enumerate(zip(old, size, strict=True), start=2):
        index = torch.arange(wanted, device=mask.device) * many // wanted
        mask = mask.index_select(axis, index)
    return mask


class MaskContext:
    """A mask of the network's input, and its forms for the maps inside."""

    def __init__(self, mask: Tensor, resize: str) -> None:
        if resize not in RESIZE:
            raise OptionError(f"masked expects resize to be one of {RESIZE}, got {resize!r}.")
        mask = checked(mask, "masked")
        if mask.dim() < 1:
            raise ShapeError("masked expects a mask (N, *spatial), got one without axes.")
        self.mask, self.resize = mask, resize
        self.used = False
        self._sizes: dict[tuple[int, ...], Tensor] = {}

    def for_input(self, x: Tensor, owner: Any) -> Tensor:
        """The mask for a map, (N, 1, *spatial)."""
        mask, size = self.mask, tuple(x.shape[2:])
        if mask.dim() == x.dim() and mask.dim() > 2 and mask.shape[1] == 1:
            pass  # (N, 1, *spatial) already
        elif mask.dim() > 2 and mask.shape[1] == 1 and not size:
            pass
        else:
            mask = mask.unsqueeze(1)
        if mask.shape[0] != x.shape[0] or (size and mask.dim() != x.dim()):
            raise ShapeError(
                f"{_name(owner)} got input {tuple(x.shape)} inside normkit.masked with a mask "
                f"{tuple(self.mask.shape)}: samples or axes do not agree. Try layer(x, mask=…), or "
                "normkit.masked(None) around this part of the network."
            )
        _check_device(mask, x, owner)
        self.used = True  # written and never read here: a graph would be made for each value
        if torch.compiler.is_compiling():
            return resized(mask, size, self.resize)
        known = self._sizes.get(size)
        if known is None:
            known = self._sizes[size] = resized(mask, size, self.resize)
        return known


def _name(owner: Any) -> str:
    """Who complains: only messages pay for the path of a layer."""
    return owner if isinstance(owner, str) else title(owner)


def _check_device(mask: Tensor, x: Tensor, owner: Any) -> None:
    if mask.device != x.device:
        raise DeviceError(
            f"{_name(owner)} got an input on {x.device} and a mask on {mask.device}. "
            f"Try mask.to({str(x.device)!r})."
        )
