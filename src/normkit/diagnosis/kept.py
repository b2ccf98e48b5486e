"""What the running statistics of a norm are statistics of.

Most norms keep a mean and a variance a channel. Some keep another form, or see their input
changed first; here both sides, what is kept and what came, are brought to the same form.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.engine.normalize import moments as moments_of
from normkit.layers.batch_renorm import BatchRenorm
from normkit.layers.bgn import BGN
from normkit.layers.gated import centered
from normkit.layers.gbgn import GBGN
from normkit.layers.ibn import IBN
from normkit.layers.norm_act import NormAct
from normkit.layers.sn import SN
from normkit.layers.ubn import UBN

CHUNK = 1 << 22  # values that are widened to float64 at a time


def norm_in(module: nn.Module) -> nn.Module:
    """The norm itself, of a norm with an activation."""
    return module.norm if isinstance(module, NormAct) else module


def running_of(norm: nn.Module) -> Moments | None:
    """The running statistics as mean and variance, tables (1, K); None if there are none.

    Instance norms average over samples what they never pool, so theirs are left out.
    """
    mean = getattr(norm, "running_mean", None)
    second = getattr(norm, getattr(norm, "second_buffer", "running_var"), None)
    if not isinstance(mean, Tensor) or not isinstance(second, Tensor):
        return None
    lazy = nn.UninitializedBuffer
    if isinstance(norm, nn.modules.instancenorm._InstanceNorm) or isinstance(mean, lazy):
        return None
    mean, second = mean.detach(), second.detach()
    if isinstance(norm, BatchRenorm):
        second = second.square() - norm.eps
    elif isinstance(norm, GBGN):
        second = second - mean.square()
    return Moments(mean[None].clone(), second[None].clone(), 1)


def as_stored(norm: nn.Module, expected: Moments) -> Moments:
    """Statistics with the variance as a norm stores it: unbiased, as torch.nn does, or biased."""
    biased = isinstance(norm, BatchRenorm | GBGN | SN) or getattr(norm, "micro", False)
    correction = 0 if biased else getattr(norm, "running_var_correction", 1)
    if not correction:
        return expected
    count = torch.as_tensor(expected.count, device=expected.mean.device)
    factor = count / (count - correction).clamp(min=1)
    return Moments(expected.mean, expected.var * factor, expected.count)


def keep(norm: nn.Module, expected: Moments) -> None:
    """Write a mean and a variance, tables (1, K), into the running statistics as they are."""
    mean, second = expected.mean[0], expected.var[0]
    if isinstance(norm, BatchRenorm):
        second = (second + norm.eps).sqrt()
    elif isinstance(norm, GBGN):
        second = second + mean.square()
    with torch.no_grad():
        for name, value in (
            ("running_mean", mean),
            (getattr(norm, "second_buffer", "running_var"), second),
        ):
            getattr(norm, name).copy_(value)


def table_of(x: Tensor, axis: int = 1) -> Moments:
    """Mean and variance of each sample and channel of x, tables (N, C) in float64."""
    x = x.detach().movedim(axis, 1)
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    rows = max(1, CHUNK // max(1, x[0].numel()))
    with torch.no_grad():
        parts = [moments_of(part.to(wide)) for part in x.split(rows)]
    mean, var = torch.cat([p.mean for p in parts]), torch.cat([p.var for p in parts])
    return Moments(mean, var, parts[0].count)


def as_kept(norm: nn.Module, x: Tensor, table: Moments) -> Moments:
    """Statistics of an input in the form in which a norm keeps them, tables (1, K).

    ``table`` are the moments of each sample and channel of x.
    """
    if isinstance(norm, BGN):
        return _of_groups(norm, x, table)
    if isinstance(norm, IBN):
        k = norm.split
        table = Moments(table.mean[:, k:], table.var[:, k:], table.count)
    elif not (isinstance(norm, UBN) and norm.reading["stats_from"] == "raw"):
        center = getattr(norm, "center_weight", None)
        table = centered(table, None if center is None else center.detach())[0]
    return table.pooled(samples=None)


def _of_groups(norm: BGN, x: Tensor, table: Moments) -> Moments:
    if norm.channels % norm.groups == 0:
        return table.pooled(samples=None, channels=norm.channels // norm.groups)
    _, pieces = norm.division(x)
    rows = moments_of(x.detach().to(table.mean.dtype), norm.cells).pooled(samples=None)
    return rows if pieces is None else rows.pooled_by(pieces.group, norm.groups)


class Pooling:
    """Statistics of all batches so far, each weighted by how many values it had."""

    def __init__(self) -> None:
        self.total: Moments | None = None

    def add(self, batch: Moments) -> None:
        """Take in the statistics of a batch, tables (1, K)."""
        if self.total is None:
            self.total = batch
            return
        old, new = self.total, batch
        # one row a channel, one column a batch: the pool of a row is what both have together
        both = Moments(
            torch.cat([old.mean, new.mean]).mT,
            torch.cat([old.var, new.var]).mT,
            torch.stack([_counts(old), _counts(new)], 1),
        )
        group = torch.zeros(2, dtype=torch.long, device=both.mean.device)
        found = both.pooled_by(group, 1)
        assert isinstance(found.count, Tensor)
        self.total = Moments(found.mean.mT, found.var.mT, found.count.mT)


def _counts(moments: Moments) -> Tensor:
    """How many values stand behind each channel, (K,)."""
    count = torch.as_tensor(moments.count, device=moments.mean.device, dtype=moments.mean.dtype)
    return count.expand_as(moments.mean)[0]
