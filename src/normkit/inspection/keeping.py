"""Norms that keep statistics of another kind, or of another tensor, than batch normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.errors import ShapeError
from normkit.inspection.keepers import Keeper, moments_of
from normkit.inspection.kinds import kind_of
from normkit.inspection.tally import Tally
from normkit.layers.batch import BatchNormalizer
from normkit.layers.bgn import BGN
from normkit.layers.gated import centered

AS_TORCH = ("bn", "sync_bn", "split_bn", "iabn", "evo")


class OfInstances(Keeper):
    """nn.InstanceNorm with running statistics: averages over images of their means and variances.

    The tally is of both together, 2·C columns with one value an image.
    """

    def columns(self, table: Moments, x: Tensor) -> Moments:
        if x[0, 0].numel() < 2:
            raise ShapeError(f"{self.path} expects more than one position per channel.")
        both = torch.cat([table.mean, table.unbiased(self.correction)], 1)
        return Moments(both, torch.zeros_like(both), 1)

    def values(self, tally: Tally) -> dict[str, Tensor]:
        mean, var = tally.mean.chunk(2)
        return {"running_mean": mean, "running_var": var}

    def held(self) -> tuple[Tensor, Tensor]:
        mean, var = super().held()
        both = torch.cat([mean, var])
        return both, torch.zeros_like(both)


class Own(Keeper):
    """A layer of normkit."""

    norm: Any

    def __init__(self, path: str, norm: nn.Module, kind: str) -> None:
        super().__init__(path, norm, kind)
        self.second = getattr(norm, "second_buffer", "running_var")
        self.correction = getattr(norm, "running_var_correction", 1)
        if self.second != "running_var" or kind in ("sn", "ssn") or getattr(norm, "micro", False):
            self.correction = 0  # these store what they normalize with

    def columns(self, table: Moments, x: Tensor) -> Moments:
        norm = self.norm
        if isinstance(norm, BGN):
            return self._groups(table, x)
        center = getattr(norm, "center_weight", None)
        if center is not None and getattr(norm, "reading", {}).get("stats_from") != "raw":
            table, _ = centered(table, center.detach().to(table.mean.dtype))
        if getattr(norm, "unbiased", False) is True:  # sn assembles from unbiased variances
            table = Moments(table.mean, table.unbiased(), table.count)
        if self.kind == "ibn":
            table = Moments(table.mean[:, norm.split :], table.var[:, norm.split :], table.count)
        return table

    def _groups(self, table: Moments, x: Tensor) -> Moments:
        """Groups of channels from the table; strips and pieces of channels from x."""
        wide, uneven = divmod(self.norm.channels, self.norm.groups)
        if not uneven:
            return table.pooled(channels=wide)
        _, pieces = self.norm.division(x)
        cells = moments_of(x.detach().to(table.mean.dtype), self.norm.cells)
        if pieces is None:
            return cells
        found = cells.pooled_by(pieces.group, self.norm.groups)
        assert isinstance(found.count, Tensor)
        return Moments(found.mean, found.var, found.count[:1])  # the same for every image

    def as_buffers(self, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
        if self.second == "running_second_moment":
            var = var + mean.square()
        elif self.second == "running_std":
            var = torch.sqrt(var + self.eps)
        return super().as_buffers(mean, var)

    def as_variance(self, mean: Tensor, second: Tensor) -> Tensor:
        if self.second == "running_second_moment":
            return second - mean.square()
        return second.square() - self.eps if self.second == "running_std" else second


def keeper_of(path: str, norm: nn.Module, kind: str) -> Keeper | None:
    """The keeper for a norm that has running statistics; None if its kind is not known."""
    if isinstance(norm, BatchNormalizer) or kind == "frozen_bn":
        return Own(path, norm, kind) if hasattr(norm, "card") else Keeper(path, norm, kind)
    if kind == "in":
        return OfInstances(path, norm, kind)
    return Keeper(path, norm, kind) if kind in AS_TORCH else None


def reader_of(norm: nn.Module, kind: str | None = None) -> Keeper | None:
    """The keeper of a mean and a variance over samples; None if a norm keeps no such thing.

    A norm of no known kind is taken at the word of its buffers' names. Instance norms average over
    samples what they never pool, so theirs are left out; and lazy norms have none yet.
    """
    kind = kind or kind_of(norm) or "other"
    if kind == "in":
        return None
    found = keeper_of("", norm, kind) or Keeper("", norm, kind)
    lazy = any(isinstance(b, nn.UninitializedBuffer) for b in found.buffers.values())
    return None if lazy or len(found.buffers) < 2 else found


def running_of(norm: nn.Module) -> Moments | None:
    """The running statistics of a norm as mean and variance, tables (1, K); None without any."""
    reader = reader_of(norm)
    return None if reader is None else reader.read()
