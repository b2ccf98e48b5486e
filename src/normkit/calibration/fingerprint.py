"""A number that says which data statistics come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.inspection.batches import tensors_in
from normkit.inspection.survey import survey

WIDE = 1 << 64
AT_ONCE = 1 << 22  # values that are hashed together, in 64 bits each
# odd constants of SplitMix64: they spread every bit of a number over all of it
MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """A hash of samples, the same in whatever order and batches they come.

    Each sample is hashed by its bits, on its own device, and the hashes are added: two sets give
    the sum of their prints. Good against mistakes, such as the same data twice; no protection
    against someone who wants two sets to have one print.
    """

    def __init__(self) -> None:
        self.value = 0
        self.images = 0
        self.batches = 0

    def add(self, batch: Any, images: Sequence[Tensor] | None = None) -> None:
        """The samples of a batch: the rows of its first tensor, or images of several sizes."""
        self.batches += 1
        if images is not None:
            for image in images:
                self.value = (self.value + int(_hashes(image[None]).item())) % WIDE
            self.images += len(images)
            return
        first = next(tensors_in(batch), None)
        if first is None or first.dim() == 0:
            return
        first = first.to_dense() if first.layout is not torch.strided else first
        each = max(1, AT_ONCE // max(first[:1].numel(), 1))
        for rows in first.split(each):
            self.value = (self.value + int(_hashes(rows).sum().item())) % WIDE
        self.images += first.shape[0]

    def __str__(self) -> str:
        return f"{self.value:016x}"


def _hashes(x: Tensor) -> Tensor:
    """One 64-bit number a sample: (N,)."""
    x = x.detach().contiguous()
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.dtype == torch.bool:
        x = x.to(torch.uint8)
    rows = x.reshape(x.shape[0], -1) if x.numel() else x.new_zeros(x.shape[0], 1)
    bits = rows.view(AS_INTEGERS[rows.element_size()]).to(torch.int64)
    place = torch.arange(1, bits.shape[1] + 1, device=x.device)
    mixed = _mix((bits + place * MIX[0]) ^ (place << 32))
    return _mix(mixed.sum(1))


def _mix(number: Tensor) -> Tensor:
    """SplitMix64's last steps; products wrap around at 64 bits, shifts keep the sign out."""
    for shift, factor in ((30, MIX[1]), (27, MIX[2])):
        number = (number ^ _right(number, shift)) * factor
    return number ^ _right(number, 31)


def _right(number: Tensor, by: int) -> Tensor:
    return (number >> by) & ((1 << (64 - by)) - 1)


def of_state(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A print of named tensors, such as those of a model."""
    value = 0
    for name, tensor in tensors:
        parts = tensor.detach().flatten().split(AT_ONCE)
        hashes = [int(_hashes(part[None]).item()) for part in parts]
        own = hashlib.blake2b(repr((name, hashes)).encode(), digest_size=8).digest()
        value = (value + int.from_bytes(own)) % WIDE
    return f"{value:016x}"


def of_weights(model: nn.Module) -> str:
    """A print of what a model has learned outside of its norms; converting those leaves it."""
    norms = {id(p) for site in survey(model) for p in site.module.parameters()}
    return of_state((n, p) for n, p in model.named_parameters() if id(p) not in norms)
