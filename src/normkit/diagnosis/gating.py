"""The gates of rbn, iebn and ubn, and whether a ubn is frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.layers.gated import Gated, centered
from normkit.layers.gated import gate as gate_of
from normkit.layers.ubn import UBN


def gates_of(norm: nn.Module, table: Moments) -> Tensor | None:
    """The gate of each sample and channel in (0, 1), from the moments (N, C) of an input.

    None for norms without gates. Nothing is learned or remembered on the way.
    """
    if not isinstance(norm, Gated | UBN) or norm.gate_bias is None:
        return None
    means = table.mean
    if getattr(norm, "looks_at", "normalized") == "normalized":
        center = getattr(norm, "center_weight", None)
        seen, _ = centered(table, None if center is None else center.detach())
        raw = isinstance(norm, UBN) and norm.reading["stats_from"] == "raw"
        means = _statistics(norm, table if raw else seen).standardizing(norm.eps).of(seen.mean)
    weight = norm.gate_weight
    return gate_of(means, None if weight is None else weight.detach(), norm.gate_bias.detach())


def _statistics(norm: Gated | UBN, table: Moments) -> Moments:
    """What normalizes the input; a choice on the device, as in the layer."""
    if not norm.uses_batch():
        return norm.running()
    batch, frozen = table.pooled(samples=None), is_frozen(norm)
    if frozen is None:
        return batch
    kept = norm.running()
    mean = torch.where(frozen, kept.mean, batch.mean)
    return Moments(mean, torch.where(frozen, kept.var, batch.var), 1)


def is_frozen(norm: nn.Module) -> Tensor | None:
    """Whether a ubn is a fixed map at present, a boolean (1,); None for other norms."""
    if not isinstance(norm, UBN) or not norm.fct:
        return None
    return ~norm.condensed
