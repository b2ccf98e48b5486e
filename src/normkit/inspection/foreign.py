"""Norms of other libraries, asked the same questions as those of normkit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.core.moments import Coefficients, Moments
from normkit.core.precision import widest
from normkit.errors import ShapeError
from normkit.inspection.kinds import layer_of
from normkit.inspection.site import Site, facts_of
from normkit.layers.base import Normalizer
from normkit.layers.measured import Measured, Refusal

OF_BATCHES = ("bn", "sync_bn", "split_bn", "iabn", "lazy_bn")  # use batch statistics in training
OF_SAMPLES = {"gn": None, "ln": 1}  # and into how many groups, if always the same
UNKNOWN = Refusal("what it computes is not known")


def measured(site: Site) -> Measured:
    """What answers for the norm of a site."""
    answering: Measured = answering_for(site.norm, site.kind)
    return answering


def answering_for(norm: nn.Module, kind: str) -> Any:
    """What answers for a norm: a layer of normkit does so itself."""
    if isinstance(norm, Normalizer):
        return norm
    return (ForeignInstanceNorm if kind == "in" else ForeignNorm)(norm, kind)


class ForeignNorm(Measured):
    """A norm of torch.nn, timm or another library, by its kind and what it keeps.

    Where its kind says nothing else it keeps statistics as a batch norm of torch.nn does.
    """

    pooled_statistics = True  # whether running statistics are those of pooled samples
    running_correction = 1  # what torch.nn stores is unbiased

    def __init__(self, norm: nn.Module, kind: str) -> None:
        self.norm: Any = norm
        self.kind = kind
        facts = facts_of(norm)
        self.channels, self.groups = facts.get("channels"), facts.get("groups")
        self.last_axis = facts.get("channel_axis") == -1
        self.eps = facts.get("eps") or 0.0
        layer = layer_of(kind)
        self.is_fixed = layer is not None and layer.is_fixed  # type: ignore[misc]
        self.weight, self.bias = (_value(getattr(norm, name, None)) for name in ("weight", "bias"))

    # ---------------------------------------------------------------- the statistics it keeps

    def running_buffers(self) -> dict[str, Tensor]:
        """Either may be missing, as in EvoNorm."""
        buffers = {name: getattr(self.norm, name, None) for name in ("running_mean", "running_var")}
        return {name: b for name, b in buffers.items() if isinstance(b, Tensor)}

    def batch_counter(self) -> Tensor | None:
        counter = getattr(self.norm, "num_batches_tracked", None)
        return counter if isinstance(counter, Tensor) else None

    def decode_statistics(self, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        some = next(iter(buffers.values()))
        mean = buffers.get("running_mean", torch.zeros_like(some))
        return mean, buffers.get("running_var", torch.ones_like(some))

    # ---------------------------------------------------------------- what is measured at it

    def pools_samples(self) -> bool:
        return self.kind in OF_BATCHES

    def sample_groups(self) -> int | None:
        return OF_SAMPLES[self.kind] or self.groups if self.kind in OF_SAMPLES else None

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        if self.kind in ("pn", "rms"):
            return moments, 1
        known = self.pools_samples() or self.is_fixed or self.sample_groups() is not None
        return super().channel_groups(moments) if known else UNKNOWN

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        tracked = bool(self.running_buffers())
        if self.pools_samples() or (tracked and (self.is_fixed or self.kind == "other")):
            return moments.var[0]
        return super().divided_by(moments) if self.kind in OF_SAMPLES else UNKNOWN

    def group_size(self, shape: torch.Size) -> int | None:
        if self.last_axis:
            return math.prod(getattr(self.norm, "normalized_shape", shape[-1:]))
        return shape[1] if self.kind == "pn" else super().group_size(shape)

    def standardized(self, x: Tensor, table: Moments, *, batch: bool) -> Tensor | Refusal:
        if self.last_axis:
            size = tuple(getattr(self.norm, "normalized_shape", x.shape[-1:]))
            if self.kind == "ln":
                return F.layer_norm(x.float(), size, eps=self.eps)
            return F.rms_norm(x.float(), size, eps=self.eps) if self.kind == "rms" else UNKNOWN
        if self.kind == "pn":
            channels_last = x.movedim(1, -1).float()
            return F.layer_norm(channels_last, x.shape[1:2], eps=self.eps).movedim(-1, 1)
        return super().standardized(x, table, batch=batch)

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        if self.kind in OF_SAMPLES:
            return super().standardizing(table, batch=batch)
        running = self.running()
        if self.pools_samples() and (batch or running is None):
            return table.pooled(samples=None).standardizing(self.eps)
        if running is None or running.mean.shape != table.mean[:1].shape:
            return UNKNOWN
        return (table.pooled(samples=None) if batch else running).standardizing(self.eps)

    def running(self) -> Moments | None:
        """The running statistics, tables (1, C); None if it has not both, or not yet."""
        buffers = self.running_buffers()
        if len(buffers) < 2 or any(isinstance(b, nn.UninitializedBuffer) for b in buffers.values()):
            return None
        mean, var = (b.detach().to(widest(b.device))[None] for b in buffers.values())
        return Moments(mean, var, 1)


class ForeignInstanceNorm(ForeignNorm):
    """nn.InstanceNorm. Running statistics are averages over images of their means and variances.

    Those of both together, 2·C columns with one value an image and no variance of their own.
    """

    pooled_statistics = False
    running_correction = 0

    def sample_statistics(self, moments: Moments, x: Tensor) -> Moments:
        if x[0, 0].numel() < 2:
            raise ShapeError("an instance norm expects more than one position per channel.")
        both = torch.cat([moments.mean, moments.unbiased()], 1)
        return Moments(both, torch.zeros_like(both), 1)

    def decode_statistics(self, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        both = torch.cat(super().decode_statistics(buffers))
        return both, torch.zeros_like(both)

    def encode_statistics(self, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
        return super().encode_statistics(*mean.chunk(2))

    def sample_groups(self) -> int | None:
        return self.channels

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return moments.var[0]

    def group_size(self, shape: torch.Size) -> int | None:
        return math.prod(shape[2:])

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        running = None if batch else self.running()
        return (running or table).standardizing(self.eps)


def _value(parameter: Any) -> Tensor | None:
    """The values of a parameter; None without one, and for one that is lazy."""
    lazy = isinstance(parameter, nn.UninitializedParameter)
    return parameter.detach() if isinstance(parameter, Tensor) and not lazy else None
