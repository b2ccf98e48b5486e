"""How a tensor is cut into cells, without copying it.

A layout shows a tensor (N, C, *spatial) to the backends as a dense view whose axis 1 runs through
one cell, and lays tables over that view so that they broadcast. With it one line of arithmetic
serves contiguous and channels_last tensors, whole channels, strips of channels and pixels:

    cells      memory          view                 table on the view
    channels   contiguous      (N·C·S, L/S)         (N·C·S, 1)
    channels   channels_last   (N·S, L/S, C)        (N·S, 1, C)
    batch      channels_last   (1, N·L, C)          (1, 1, C)
    pixels     contiguous      (N, C, L)            (N, 1, L)
    pixels     channels_last   (N·L, C)             (N·L, 1)
    pieces     either          (N, D)               gathered by an index of D entries

L is the number of positions, S the number of equal strips a channel is cut into.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Layout(Protocol):
    """What the backends need to know about the cells of a tensor."""

    count: int | Tensor  # values in a cell
    rows: int  # of a table: samples, or one for the whole batch
    columns: int  # of a table: cells in a row
    splits: bool  # whether a part of axis 1 can be worked on alone

    def view(self, x: Tensor) -> Tensor:
        """The dense view of a tensor of the layout's shape; copies only if x is laid otherwise."""

    def unview(self, cells: Tensor) -> Tensor:
        """The inverse of ``view``: a tensor (N, C, *spatial) on the same memory."""

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of the view."""

    def aligned(self, x: Tensor) -> Tensor:
        """x itself if its memory is laid as the layout's, else a copy that is: for kernels."""

    def like(self, x: Tensor) -> Tensor:
        """A new tensor of x's type in the memory format of the layout."""

    def lay(self, table: Tensor) -> Tensor:
        """A table (N, K) in the form that broadcasts with the view."""

    def lift(self, table: Tensor) -> Tensor:
        """The inverse of ``lay``: back to (N, K)."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum of each cell, from values shaped like the view to a laid table."""

    def mean(self, values: Tensor) -> Tensor:
        """Mean of each cell, likewise."""

    def near(self, cells: Tensor, values: int = 1) -> Tensor:
        """The mean of so many values of each cell, as a laid table: moments are taken about it.

        Of few, it is not near enough where the mean is 0; of many, it takes time.
        """

    def over(self, laid: Tensor) -> Tensor:
        """A laid table, made to broadcast with the view."""


_known: dict[Any, Any] = {}


class _Dense:
    """The shape and strides that every tensor of one call shares."""

    splits = True
    extent: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, *options: Any) -> Self:
        """The layout of x; one that was made before for a tensor like it, if there is."""
        if torch.compiler.is_compiling():
            return cls(x, *options)
        key = cls, x.shape, x.stride(), options
        found = _known.get(key)
        if found is None:
            if torch.jit.is_tracing():  # whose sizes are tensors of its graph
                return cls(x, *options)
            if len(_known) > 4096:  # shapes that never come again
                _known.clear()
            found = _known[key] = cls(x, *options)
        return found

    def __init__(self, x: Tensor) -> None:
        self.shape = x.shape
        self.stride = x.stride()
        self.rows = x.shape[0]
        self.positions = math.prod(x.shape[2:])
        self.channels_last = is_channels_last(x)

    def _dense(self, x: Tensor) -> Tensor:
        """x as (N, L, C) or (N, C, L), copied only when its memory is laid in another way."""
        n, c = self.shape[:2]
        if self.channels_last:
            return x.movedim(1, -1).contiguous().view(n, self.positions, c)
        return x.contiguous().view(n, c, self.positions)

    def aligned(self, x: Tensor) -> Tensor:
        return x if x.stride() == self.stride else self.unview(self._dense(x))

    def unview(self, cells: Tensor) -> Tensor:
        n, c, *spatial = self.shape
        if self.channels_last:
            return cells.reshape(n, *spatial, c).movedim(-1, 1)
        return cells.reshape(self.shape)

    def like(self, x: Tensor) -> Tensor:
        # not a view of something else: autograd lets nobody change a view in place that a custom
        # function returned, and an in-place ReLU after a norm is what most models have
        if x.stride() == self.stride:
            return torch.empty_like(x)
        if not self.channels_last:
            return x.new_empty(self.shape)
        c = self.shape[1]
        strides = [c]
        for size in reversed(self.shape[2:]):
            strides.insert(0, strides[0] * size)
        return x.new_empty_strided(self.shape, (strides[0], 1, *strides[1:]))

    def sum(self, values: Tensor) -> Tensor:
        return values.sum(1, keepdim=True)

    def mean(self, values: Tensor) -> Tensor:
        return values.mean(1, keepdim=True)

    def near(self, cells: Tensor, values: int = 1) -> Tensor:
        return cells[:, :1] if values == 1 else cells[:, :values].mean(1, keepdim=True)

    def over(self, laid: Tensor) -> Tensor:
        return laid


class Channels(_Dense):
    """Cells are channels, or ``strips`` equal runs of positions of each channel.

    Table entry k = c·strips + s belongs to strip s of channel c.
    """

    def __init__(self, x: Tensor, strips: int = 1) -> None:
        super().__init__(x)
        self.strips = strips
        self.columns = x.shape[1] * strips
        self.count: int | Tensor = self.positions // strips
        n, c = x.shape[:2]
        high = self.positions // strips
        self.extent = (n * strips, high, c) if self.channels_last else (n * c * strips, high)

    def view(self, x: Tensor) -> Tensor:
        n, c = self.shape[:2]
        dense = self._dense(x)
        if self.channels_last:
            return dense.view(n * self.strips, -1, c)
        return dense.view(n * c * self.strips, -1)

    def lay(self, table: Tensor) -> Tensor:
        n, c = self.shape[:2]
        if self.channels_last:
            return table.reshape(n, c, self.strips).mT.reshape(n * self.strips, 1, c)
        return table.reshape(-1, 1)

    def lift(self, table: Tensor) -> Tensor:
        n, c = self.shape[:2]
        if self.channels_last:
            table = table.reshape(n, self.strips, c).mT
        return table.reshape(n, c * self.strips)


class Batch(_Dense):
    """Cells are channels of the whole batch, for maps that all samples share.

    Only where channels run fastest in memory, as in (N, C) or channels_last tensors: see ``fits``.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.channels_last = True  # of (N, C) as well
        self.rows, self.columns = 1, x.shape[1]
        self.count: int | Tensor = x.shape[0] * self.positions
        self.extent = 1, x.shape[0] * self.positions, self.columns

    @staticmethod
    def fits(x: Tensor) -> bool:
        return x.dim() == 2 or is_channels_last(x)

    def view(self, x: Tensor) -> Tensor:
        return self._dense(x).view(1, -1, self.columns)

    def lay(self, table: Tensor) -> Tensor:
        return table.reshape(1, 1, -1)

    def lift(self, table: Tensor) -> Tensor:
        return table.reshape(1, -1)


class Pixels(_Dense):
    """Cells are pixels: one position of one sample, over all channels. Table entry k = position."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.columns = self.positions
        self.count: int | Tensor = x.shape[1]
        n, c = x.shape[:2]
        self.extent = (n * self.positions, c) if self.channels_last else (n, c, self.positions)

    def view(self, x: Tensor) -> Tensor:
        dense = self._dense(x)
        return dense.flatten(0, 1) if self.channels_last else dense

    def lay(self, table: Tensor) -> Tensor:
        return table.reshape(-1, 1) if self.channels_last else table.unsqueeze(1)

    def lift(self, table: Tensor) -> Tensor:
        return table.reshape(self.shape[0], -1)


class Pieces(_Dense):
    """Cells are pieces of channels of any length: ``piece`` (C, L) names the cell of each value.

    The general, slower layout, for groups that cut channels unevenly. ``count`` (K,) says how
    many values each piece has.
    """

    splits = False

    def __init__(self, x: Tensor, piece: Tensor, count: Tensor) -> None:
        super().__init__(x)
        # in the order of memory, so that channels_last needs no copy
        self.index = (piece.mT if self.channels_last else piece).reshape(-1)
        self.count: int | Tensor = count
        self.columns = count.shape[0]
        self.extent = x.shape[0], x.shape[1] * self.positions

    def view(self, x: Tensor) -> Tensor:
        return self._dense(x).view(self.shape[0], -1)

    def lay(self, table: Tensor) -> Tensor:
        return table

    def lift(self, table: Tensor) -> Tensor:
        return table

    def sum(self, values: Tensor) -> Tensor:
        zeros = values.new_zeros(values.shape[0], self.columns)
        return zeros.index_add(1, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.count

    def near(self, cells: Tensor, values: int = 1) -> Tensor:
        return self.mean(cells)

    def over(self, laid: Tensor) -> Tensor:
        return laid.index_select(1, self.index)


def shared_by_samples(x: Tensor) -> Batch | Channels:
    """Cells for a map that all samples share: as large as memory allows."""
    return Batch.of(x) if Batch.fits(x) else Channels.of(x)


def is_channels_last(x: Tensor) -> bool:
    """Whether the channel of x, of any rank, runs fastest in memory and nothing is skipped."""
    if x.is_contiguous():
        return False
    if x.dim() == 4 and not torch._C._are_functorch_transforms_active():  # without making a view
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.dim() > 2 and x.movedim(1, -1).is_contiguous()


def dense(x: Tensor) -> Tensor:
    """x itself if it is contiguous or channels_last, else a contiguous copy."""
    return x if x.is_contiguous() or is_channels_last(x) else x.contiguous()
