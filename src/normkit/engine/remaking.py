"""Outputs of norms that are made again in backward instead of being kept until then.

A network keeps both what goes into a norm (for the norm) and what comes out of it (for the next
convolution). The second is cheap to make from the first, y = act(a·(x − c) + b + residual) with
tables that are kept anyway. Inside ``Remaking`` an operation that would save such a y saves a
``Slot`` in its place. In backward the first slot that is opened makes y, by the same code and so to
the last bit, and it stays as long as another slot waits for it; a residual that is the output of
another norm is made first, in the same way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
Make = Callable[[Tensor, Tensor | None], Tensor]


class _Active(threading.local):
    """Of each thread: how many ``Remaking`` blocks it is in, and the outputs that may be made
    again, by the address of their memory."""

    depth = 0

    def __init__(self) -> None:
        self.offers: dict[int, _Offer] = {}


_active = _Active()


class Remaking:
    """A block whose forward saves the inputs of norms alone; backward may come after it.

    Saved tensors of everything else are kept as ever, and, as ever, must not be changed in place.
    """

    def __init__(self) -> None:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)

    def __enter__(self) -> None:
        self.hooks.__enter__()
        _active.depth += 1

    def __exit__(self, *error: object) -> None:
        _active.depth -= 1
        if not _active.depth:
            _active.offers.clear()
        self.hooks.__exit__(*error)


def active() -> bool:
    """Whether outputs that are offered now may be made again: not where others have hooks for
    saved tensors inside the block, as in a part that is checkpointed."""
    return _active.depth > 0 and not others_watch()


def others_watch() -> bool:
    """Whether the hooks for saved tensors are another one's."""
    hooks = _hooks(True)
    return hooks is not None and not are_ours(hooks)


def are_ours(hooks: Any) -> bool:
    """Whether hooks for saved tensors are those of ``Remaking``."""
    return hooks[0] is _pack


def offer(y: Tensor, x: Tensor, residual: Tensor | None, make: Make) -> None:
    """Say how y was made of x and a residual, for whoever saves it: ``make`` does it again."""
    if not _active.depth or not y.numel() or others_watch():
        return
    address = y.untyped_storage().data_ptr()
    _active.offers[address] = _Offer(y, _Node(x, residual, make), address, _active.offers)


class _Offer:
    """An output that may be made again, for as long as anyone can save it."""

    def __init__(self, y: Tensor, node: _Node, address: int, offers: dict[int, _Offer]) -> None:
        self.node, self.version = node, y._version
        own = weakref.ref(self)

        def gone(_: Any) -> None:  # its memory may be another tensor's by now
            if offers.get(address) is own():
                offers.pop(address, None)

        self.y = weakref.ref(y, gone)

    def holds(self, saved: Tensor) -> bool:
        """Whether a tensor in its memory is what was made, or a view of it."""
        y = self.y()
        return y is not None and y._version == self.version and saved.dtype == y.dtype


class _Node:
    """How a y is made again. Nothing but tensors that are there refers to it."""

    def __init__(self, x: Tensor, residual: Tensor | None, make: Make) -> None:
        self.x, self.make = _Kept(x), make
        self.residual = None if residual is None else _pack(residual)
        self.waiting: weakref.WeakSet[_Slot] = weakref.WeakSet()

    def made(self) -> Tensor:
        """y, which all that wait for it get as well."""
        chain, below = [self], None
        while isinstance(slot := chain[-1].residual, _Slot):  # a loop: networks are deep
            if slot.made is not None:
                below = slot.tensor()
                break
            chain.append(slot.node)
        for node in reversed(chain):
            if isinstance(node.residual, _Kept):
                below = node.residual.tensor()
            elif isinstance(node.residual, _Slot):
                below = node.residual.view(below)
            with torch.no_grad():
                below = node.make(node.x.tensor(), below)
            for slot in node.waiting:
                if not slot.opened:
                    slot.made = below
        assert below is not None
        return below


class _Slot:
    """What an operation saves in place of a y, or of a view of it."""

    def __init__(self, node: _Node, saved: Tensor) -> None:
        self.node, self.place = node, (saved.shape, saved.stride(), saved.storage_offset())
        self.made: Tensor | None = None
        self.opened = False  # a graph that is kept opens it once more, and then it is made anew
        node.waiting.add(self)

    def tensor(self) -> Tensor:
        made = self.node.made() if self.made is None else self.made
        self.made, self.opened = None, True
        return self.view(made)

    def view(self, made: Tensor | None) -> Tensor:
        assert made is not None
        here = made.shape, made.stride(), made.storage_offset()
        return made if here == self.place else made.as_strided(*self.place)


class _Kept:
    """A tensor as it is; with hooks torch no longer looks whether it was changed in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.kept, self.version = tensor, tensor._version

    def tensor(self) -> Tensor:
        if self.kept._version != self.version:
            raise RuntimeError(
                "One of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self.kept.dtype} {tuple(self.kept.shape)} is at version "
                f"{self.kept._version}, expected version {self.version}. With save='inputs' norms "
                "need their inputs and residuals until backward: try the operation that changes "
                "it out of place, or normkit.fuse(model, save='all')."
            )
        return self.kept


def _pack(saved: Tensor) -> _Kept | _Slot:
    if type(saved) is Tensor and saved.layout is torch.strided:
        found = _active.offers.get(saved.untyped_storage().data_ptr())
        if found is not None and found.holds(saved):
            return _Slot(found.node, saved)
    return _Kept(saved)


def _unpack(packed: _Kept | _Slot) -> Tensor:
    return packed.tensor()
