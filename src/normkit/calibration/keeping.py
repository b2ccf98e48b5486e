"""Norms that keep statistics of another kind, or of another tensor, than batch normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.calibration.keepers import Keeper, moments_of
from normkit.calibration.tally import Tally
from normkit.core.layout import Channels, Pieces
from normkit.core.moments import Moments
from normkit.errors import ShapeError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.bgn import BGN
from normkit.layers.gated import centered


class OfInstances(Keeper):
    """nn.InstanceNorm with running statistics: averages over images of their means and variances.

    The tally is of both together, 2·C columns with one value an image.
    """

    def part(self, x: Tensor) -> Moments:
        found = super().part(x)
        positions = x[0, 0].numel()
        if positions < 2:
            raise ShapeError(f"{self.path} expects more than one position per channel.")
        both = torch.cat([found.mean, found.unbiased(self.correction)], 1)
        return Moments(both, torch.zeros_like(both), 1)

    def values(self, tally: Tally) -> dict[str, Tensor]:
        mean, var = tally.mean.chunk(2)
        return {"running_mean": mean, "running_var": var}

    def held(self) -> tuple[Tensor, Tensor]:
        mean, var = self._both()
        return torch.cat([mean, var]), torch.zeros(2 * mean.numel(), dtype=torch.float64).to(mean)


class Own(Keeper):
    """A layer of normkit."""

    norm: Any

    def __init__(self, path: str, norm: nn.Module, kind: str) -> None:
        super().__init__(path, norm, kind)
        self.second = getattr(norm, "second_buffer", "running_var")
        self.correction = getattr(norm, "running_var_correction", 1)
        if self.second != "running_var" or kind in ("sn", "ssn") or getattr(norm, "micro", False):
            self.correction = 0  # these store what they normalize with

    def part(self, x: Tensor) -> Moments:
        norm = self.norm
        if isinstance(norm, BGN):
            return self._groups(x)
        found = moments_of(x, Channels.of(x))
        center = getattr(norm, "center_weight", None)
        if center is not None and getattr(norm, "reading", {}).get("stats_from") != "raw":
            found, _ = centered(found, center.to(torch.float64))
        if getattr(norm, "unbiased", False) is True:  # sn assembles from unbiased variances
            found = Moments(found.mean, found.unbiased(), found.count)
        if self.kind == "ibn":
            found = Moments(found.mean[:, norm.split :], found.var[:, norm.split :], found.count)
        return found

    def _groups(self, x: Tensor) -> Moments:
        strips, pieces = self.norm.division(x)
        if pieces is not None:
            table = moments_of(x, Pieces(x, pieces.piece, pieces.size))
            return table.pooled_by(pieces.group, self.norm.groups)
        table = moments_of(x, Channels.of(x, strips))
        return table.pooled(channels=max(self.norm.channels // self.norm.groups, 1))

    def values(self, tally: Tally) -> dict[str, Tensor]:
        if self.second == "running_second_moment":
            return {"running_mean": tally.mean, self.second: tally.var + tally.mean.square()}
        if self.second == "running_std":
            return {"running_mean": tally.mean, self.second: torch.sqrt(tally.var + self.eps)}
        return super().values(tally)

    def held(self) -> tuple[Tensor, Tensor]:
        mean, second = self._both()
        if self.second == "running_second_moment":
            return mean, (second - mean.square()).clamp(min=0)
        if self.second == "running_std":
            return mean, (second.square() - self.eps).clamp(min=0)
        return mean, second


def keeper_of(path: str, norm: nn.Module, kind: str) -> Keeper | None:
    """The keeper for a norm that has running statistics; None if its kind is not known."""
    if isinstance(norm, BatchNormalizer) or kind == "frozen_bn":
        return Own(path, norm, kind) if hasattr(norm, "card") else Keeper(path, norm, kind)
    if kind == "in":
        return OfInstances(path, norm, kind)
    if kind in ("bn", "sync_bn", "split_bn", "iabn", "evo"):
        return Keeper(path, norm, kind)
    return None
