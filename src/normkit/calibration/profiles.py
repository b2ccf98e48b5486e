"""Several sets of statistics for one model, switched at run time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit.calibration.apply import apply_statistics, chosen_norms
from normkit.calibration.result import BufferSnapshot
from normkit.calibration.statistics import Statistics
from normkit.errors import OptionError, UnknownName, nearest

START = "start"


class Profiles:
    """Named statistics of a model: day and night, site A and site B, clean and noisy.

    The statistics that the model has when this is made are the profile "start". Switching copies a
    few numbers per channel into the buffers the model has, so that compiled models and captured
    graphs see it too. What training changes belongs to the active profile, and is kept when
    another one is switched to.

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

    def __init__(self, model: nn.Module, where: Any = None) -> None:
        self.model, self.where = model, where
        self.norms = [one.norm for one in chosen_norms(model, where, frozen=True)[0]]
        self.active = START
        self._kept: dict[str, list[Tensor]] = {START: self._now()}

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
        if statistics is not None:
            now = BufferSnapshot(self.norms)
            try:
                apply_statistics(self.model, statistics, where=self.where, frozen=True)
                self._kept[name] = self._now()
            finally:
                now.restore()
        else:
            self._kept[name] = self._now()
        if name == self.active:
            self._write(name)

    def use(self, name: str) -> None:
        """Give the model the statistics of a profile."""
        if name not in self._kept:
            raise UnknownName(f"There is no profile {name!r}. {nearest(name, self._kept)}")
        if self.active in self._kept:
            self._kept[self.active] = self._now()
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
        with torch.no_grad():
            for buffer, value in zip(self._buffers(), self._kept[name], strict=True):
                buffer.copy_(value)

    def _buffers(self) -> list[Tensor]:
        return [b for norm in self.norms for b in norm._buffers.values() if b is not None]

    def _now(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self._buffers()]

    def __repr__(self) -> str:
        names = ", ".join(f"{n} (active)" if n == self.active else n for n in self.names)
        return f"<Profiles of {type(self.model).__name__}: {names}>"
