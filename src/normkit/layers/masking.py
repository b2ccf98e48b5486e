"""Padded batches: statistics over the valid positions alone, and zeros at the others."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.layout import Layout
from normkit.core.masks import MaskContext, MaskedCells, blank, checked, fitted
from normkit.core.messages import title
from normkit.core.recomputation import as_first_seen, is_recomputation
from normkit.core.statistics import MapResult
from normkit.engine.dispatch import Path, looked_into
from normkit.engine.epilogue import check as check_epilogue
from normkit.errors import OptionError

NO_KERNEL = "a mask is given, and no kernel takes one"


class _Here(threading.local):
    """The block that the code at hand is in: micro-batches may run side by side, in threads."""

    def __init__(self) -> None:  # of each thread: graphs of torch 2.11 would see a class's default
        self.context: MaskContext | None = None


_here = _Here()
_was_used = False  # until then no layer looks for one


class masked:
    """A block in which every normalizer leaves out padded positions.

    ``mask`` is true where the network's input counts: (N, H, W), (N, 1, H, W), (N, T) and so on,
    booleans or 0 and 1. Each layer gets it in the size of its map: ``resize="any"`` lets a position
    count if anything does that it covers, "nearest" if the first does. Statistics are those of
    valid positions alone, and the output is zero at the others, so that the next convolution
    sees what its own padding would be. Sizes that are no multiple of the network's strides round as
    the padded size does: pad to such a multiple.

    None ends masking for a part of the network. Activation checkpointing repeats a forward with the
    mask it had; for compiled layers inside a checkpoint, call backward inside the block.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), nk.GN(8, groups=2))
    >>> mask = torch.ones(2, 8, 8, dtype=torch.bool)
    >>> mask[1, 4:] = False  # the second image is 4 × 8
    >>> with nk.masked(mask):
    ...     y = model(torch.randn(2, 3, 8, 8))
    >>> y[1, :, 2:].abs().max().item()
    0.0
    """

    def __init__(self, mask: Tensor | None, *, resize: str = "any") -> None:
        self.context = None if mask is None else MaskContext(mask, resize)
        self.before: list[MaskContext | None] = []

    def __enter__(self) -> None:
        global _was_used
        self.before.append(_here.context)
        _here.context, _was_used = self.context, True

    def __exit__(self, kind: Any, *error: object) -> None:
        _here.context = self.before.pop()
        unused = self.context is not None and not self.context.used
        if unused and kind is None and not torch.compiler.is_compiling():
            warnings.warn(
                "No layer of normkit ran inside normkit.masked, so the mask had no effect. Layers "
                "of torch.nn do not know masks: try normkit.convert(model, …).",
                stacklevel=2,
            )


def mask_in_force(layer: Any) -> MaskContext | None:
    """That of the block around this forward, or around the one that this forward repeats."""
    if not _was_used:
        return None
    if torch.compiler.is_compiling():
        return _here.context
    # left with the checkpoint around, if there is one: the backward may be outside of the block
    seen = as_first_seen(("mask", id(layer)), lambda: _here.context)
    return seen if is_recomputation() else _here.context


def path_with_mask(*, compiled: bool | None = None) -> Path:
    """Which code computes a padded batch."""
    graph = looked_into() if compiled is None else compiled
    return Path("expression" if graph else "torch", NO_KERNEL)


def valid_positions(norm: Any, x: Tensor) -> Tensor | None:
    """Which positions of an input count for a norm, (N, 1, *spatial), by the block around; None if
    there is no mask, or the norm knows none."""
    if _here.context is None or not isinstance(norm, Masking):
        return None
    return norm.valid(x, _here.context)


@contextmanager
def call_mask(mask: Tensor | None) -> Iterator[None]:
    """The block of one call, for who looks at a norm that is given a mask of its own."""
    before = _here.context
    if mask is not None:
        _here.context = MaskContext(mask, "any")
    try:
        yield
    finally:
        _here.context = before


class Masking:
    """What a normalizer does with a mask."""

    card: ClassVar[Card]

    def masks_refused(self) -> str:
        """Why the layer cannot leave out positions; empty if it can."""
        return ""

    def valid(self: Any, x: Tensor, mask: Any) -> Tensor:
        """A mask as (N, 1, *spatial), checked against the input."""
        if reason := self.masks_refused():
            raise OptionError(f"{title(self)} takes no mask: {reason}.")
        if isinstance(mask, MaskContext):
            return mask.for_input(x, self)
        return fitted(checked(mask, self), x, self)

    def without_padding(
        self, x: Tensor, valid: Tensor, residual: Tensor | None, activation: str
    ) -> Tensor:
        """What the layer gives of valid positions, and zeros at the others, whatever stood there:
        no gradient comes from them, NaN or not."""
        check_epilogue(x, residual, activation)
        residual = None if residual is None else blank(residual, valid)
        return blank(self.normalize_masked(blank(x, valid), valid, residual, activation), valid)

    def normalize_masked(
        self: Any, x: Tensor, valid: Tensor, residual: Tensor | None, activation: str
    ) -> Tensor:
        """``normalize`` with the statistics of valid positions, (N, 1, *spatial), of an input that
        is zero at the others; its output there does not matter.

        An affine map of moments, unless a layer overrides this.
        """
        if not self.uses_moments():  # every value by itself
            result: Tensor = self.normalize(x, residual, activation)
            return result
        y: Tensor = self.mapped_masked(x, valid, residual, activation)[0]
        return y

    def mapped_masked(
        self: Any,
        x: Tensor,
        valid: Tensor,
        residual: Tensor | None = None,
        activation: str = "none",
    ) -> tuple[Tensor, MapResult]:
        """The map of an input that is zero where the mask is false: new statistics are written."""

        def cells(x: Tensor) -> Layout:
            return MaskedCells(self.cells(x), valid)

        y, result = self.mapped(x, self.state(), residual, activation, path_with_mask(), cells)
        self.write(result.update)
        return y, result
