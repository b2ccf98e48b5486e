"""Several sets of statistics for one model, switched at run time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit.calibration.apply import apply_statistics, chosen_norms
from normkit.calibration.statistics import Statistics
from normkit.errors import OptionError, UnknownName, nearest

START = "start"


class Profiles:
    """Named statistics of a model: day and night, site A and site B, clean and noisy.

    The statistics that the model has when this is made are the profile "start". What training
    changes belongs to the active profile, and is kept when another one is switched to. Each profile
    has tensors of its own, and switching puts those of another one into the norms: a backward pass
    still finds what its forward saw, so that one step can run several domains, each under its
    profile. Who holds the buffers themselves, as a captured CUDA graph or a traced model does,
    needs ``in_place=True``: then switching copies the numbers into the tensors that the model has,
    and a backward pass has to be over before.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    >>> profiles = nk.Profiles(model)
    >>> profiles.add("night", nk.calibrate(model, torch.randn(64, 2) - 3).statistics)
    >>> profiles.use("start")
    >>> with profiles.using("night"):
    ...     model[0].running_mean.mean().round().item()
    -3.0
    >>> profiles.active, profiles.names
    ('start', ('start', 'night'))
    """

    def __init__(self, model: nn.Module, where: Any = None, *, in_place: bool = False) -> None:
        self.model, self.where, self.in_place = model, where, in_place
        self.norms = [one.norm for one in chosen_norms(model, where, frozen=True)[0]]
        self.active = START
        self._kept: dict[str, list[Tensor]] = {START: self._buffers()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._kept)

    def add(self, name: str, statistics: Statistics | None = None) -> None:
        """Add a profile, or replace one: statistics, or without them what the model has now.

        Norms for which there are no statistics keep what they have. The active profile does not
        change; if it is the one replaced, the model gets the new values.
        """
        if not name or not isinstance(name, str):
            raise OptionError(f"A profile needs a name, got {name!r}.")
        here = self._buffers()
        self._put(_copies(here))  # so that nobody who holds these sees them change
        try:
            if statistics is not None:
                apply_statistics(self.model, statistics, where=self.where, frozen=True)
            new = self._buffers()
        finally:
            self._put(here)
        self._kept[name] = new
        if name == self.active:
            self._write(name)

    def use(self, name: str) -> None:
        """Give the model the statistics of a profile."""
        if name not in self._kept:
            raise UnknownName(f"There is no profile {name!r}. {nearest(name, self._kept)}")
        if name == self.active:
            return
        now = self._buffers()  # moved, converted or replaced since, perhaps
        self._kept[self.active] = _copies(now) if self.in_place else now
        self._write(name)
        self.active = name

    @contextmanager
    def using(self, name: str) -> Iterator[nn.Module]:
        """A profile for the block; afterwards the one from before."""
        before = self.active
        self.use(name)
        try:
            yield self.model
        finally:
            self.use(before)

    def remove(self, name: str) -> None:
        """Forget a profile; not the active one."""
        if name == self.active:
            raise OptionError(f"{name!r} is the active profile. Use another one first.")
        if self._kept.pop(name, None) is None:
            raise UnknownName(f"There is no profile {name!r}. {nearest(name, self._kept)}")

    def _write(self, name: str) -> None:
        now = self._buffers()
        if self.in_place:
            with torch.no_grad():
                for buffer, value in zip(now, self._kept[name], strict=True):
                    buffer.copy_(value)
            return
        # the model may have gone to another device or number type since
        pairs = zip(self._kept[name], now, strict=True)
        self._kept[name] = [value.to(buffer.device, buffer.dtype) for value, buffer in pairs]
        self._put(self._kept[name])

    def _buffers(self) -> list[Tensor]:
        return [norm._buffers[name] for norm, name in self._names()]  # type: ignore[misc]

    def _put(self, tensors: list[Tensor]) -> None:
        for (norm, name), tensor in zip(self._names(), tensors, strict=True):
            norm._buffers[name] = tensor

    def _names(self) -> list[tuple[nn.Module, str]]:
        return [(norm, n) for norm in self.norms for n, b in norm._buffers.items() if b is not None]

    def __repr__(self) -> str:
        names = ", ".join(f"{n} (active)" if n == self.active else n for n in self.names)
        return f"<Profiles of {type(self.model).__name__}: {names}>"


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """A copy of each; what norms share, their copies share."""
    copies = {id(tensor): tensor.detach().clone() for tensor in tensors}
    return [copies[id(tensor)] for tensor in tensors]
