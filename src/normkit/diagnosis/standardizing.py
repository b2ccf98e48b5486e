"""The standardized input of a norm, before weight and bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.core.moments import Moments
from normkit.inspection import Site
from normkit.inspection.keeping import reader_of
from normkit.layers.gated import centered

OF_GROUPS = ("gn", "ln", "in")
MIXED = ("gbgn", "sn", "ssn", "dn")  # keep statistics that are not the ones they divide by


def standardized(site: Site, x: Tensor, table: Moments, *, batch: bool = False) -> Tensor | None:
    """x̂ as the norm sees it in eval mode, or from the batch; None where that is not known.

    ``table`` are the moments of each sample and channel of x.
    """
    norm, eps = site.norm, site.eps or 0.0
    if site.channel_axis == -1:
        size = getattr(norm, "normalized_shape", x.shape[-1:])
        if site.kind == "ln":
            return F.layer_norm(x.float(), tuple(size), eps=eps)
        return F.rms_norm(x.float(), tuple(size), eps=eps) if site.kind == "rms" else None
    if site.kind == "pn":
        return F.layer_norm(x.movedim(1, -1).float(), x.shape[1:2], eps=eps).movedim(-1, 1)
    reader, added = None if site.kind in MIXED else reader_of(norm), None
    if reader is not None and reader.size == x.shape[1]:
        statistics = reader.pooled(table, x) if batch else reader.read()
        added = centered(table, getattr(norm, "center_weight", None))[1]
    elif site.kind in OF_GROUPS:
        wide = x.shape[1] // group_count(site, x.shape[1])
        pooled = table.pooled(channels=wide)
        statistics = Moments(
            pooled.mean.repeat_interleave(wide, 1), pooled.var.repeat_interleave(wide, 1), 1
        )
    else:
        return None
    scale, shift = (
        t.detach().to(torch.float32).reshape(*t.shape, *(1,) * (x.dim() - 2))
        for t in statistics.standardizing(eps).after_adding(added)
    )
    return torch.addcmul(shift, x.float(), scale)


def group_count(site: Site, channels: int) -> int:
    """Into how many groups the channels are divided that share statistics; 1 for all together."""
    if site.kind == "in":
        return channels
    return site.groups if site.groups and channels % site.groups == 0 else 1
