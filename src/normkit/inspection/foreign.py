"""Norms of other libraries, asked the same questions as those of normkit."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.core.moments import Coefficients, Moments
from normkit.inspection.keeping import reader_of
from normkit.inspection.site import Site
from normkit.layers.base import Normalizer
from normkit.layers.measured import Measured, Refusal

OF_BATCHES = ("bn", "sync_bn", "split_bn", "iabn", "lazy_bn")  # use batch statistics in training
OF_SAMPLES = {"gn": None, "ln": 1}  # and into how many groups, if always the same
UNKNOWN = Refusal("what it computes is not known")


def measured(site: Site) -> Measured:
    """What answers for a norm: a layer of normkit does so itself."""
    return site.norm if isinstance(site.norm, Normalizer) else Foreign(site)


class Foreign(Measured):
    """A norm of torch.nn, timm or another library, by its kind and what it keeps."""

    def __init__(self, site: Site) -> None:
        self.site, self.norm, self.kind = site, cast(Any, site.norm), site.kind
        self.eps = site.eps or 0.0
        self.is_fixed = site.kind == "frozen_bn"  # type: ignore[misc]
        weight, bias = getattr(self.norm, "weight", None), getattr(self.norm, "bias", None)
        self.weight = weight.detach() if isinstance(weight, Tensor) else None
        self.bias = bias.detach() if isinstance(bias, Tensor) else None

    def pools_samples(self) -> bool:
        return self.kind in OF_BATCHES

    def sample_groups(self) -> int | None:
        if self.kind == "in":
            return self.site.channels
        return OF_SAMPLES[self.kind] or self.site.groups if self.kind in OF_SAMPLES else None

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        if self.kind in ("pn", "rms"):
            return moments, 1
        if self.kind in (*OF_BATCHES, *OF_SAMPLES, "in", "frozen_bn"):
            return super().channel_groups(moments)
        return UNKNOWN

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        if self.kind in OF_BATCHES or (self.site.tracked and self.kind in ("frozen_bn", "other")):
            return moments.var[0]
        if self.kind == "in":
            return moments.var[0]
        return super().divided_by(moments) if self.kind in OF_SAMPLES else UNKNOWN

    def group_size(self, shape: torch.Size) -> int | None:
        if self.site.channel_axis == -1:
            return math.prod(getattr(self.norm, "normalized_shape", shape[-1:]))
        if self.kind == "in":
            return math.prod(shape[2:])
        return shape[1] if self.kind == "pn" else super().group_size(shape)

    def standardized(self, x: Tensor, table: Moments, *, batch: bool) -> Tensor | Refusal:
        if self.site.channel_axis == -1:
            size = tuple(getattr(self.norm, "normalized_shape", x.shape[-1:]))
            if self.kind == "ln":
                return F.layer_norm(x.float(), size, eps=self.eps)
            return F.rms_norm(x.float(), size, eps=self.eps) if self.kind == "rms" else UNKNOWN
        if self.kind == "pn":
            channels_last = x.movedim(1, -1).float()
            return F.layer_norm(channels_last, x.shape[1:2], eps=self.eps).movedim(-1, 1)
        return super().standardized(x, table, batch=batch)

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        if self.kind == "in":
            kept = self.site.tracked and not batch
            return (self._running() if kept else table).standardizing(self.eps)
        if self.kind in OF_SAMPLES:
            return super().standardizing(table, batch=batch)
        reader = reader_of(self.norm, self.kind)
        if self.kind in OF_BATCHES and (batch or reader is None):
            return table.pooled(samples=None).standardizing(self.eps)
        if reader is None or reader.size != table.mean.shape[1]:
            return UNKNOWN
        statistics = table.pooled(samples=None) if batch else reader.read()
        return statistics.standardizing(self.eps)

    def _running(self) -> Moments:
        """Averages over samples, as an instance norm keeps them."""
        return Moments(self.norm.running_mean[None], self.norm.running_var[None], 1)
