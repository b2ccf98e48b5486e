"""How sure statistics are: standard errors of means and variances, with images as the unit."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.inspection.tally import Tally, weights

LEAST = 30  # images: a standard error from fewer says little


class Certainty:
    """Sums over images from which the standard errors of a layer's statistics follow.

    The pixels of one image are alike, so a million values from ten images are ten observations.
    Mean and variance of all values are averages over images of m and of v + (m − mean)², each
    weighted by its number of values; their standard errors are those of weighted averages. A
    layer that runs several times in one forward counts each run as images of its own.
    """

    def __init__(self) -> None:
        self.images = 0
        self.near: Tensor | None = (
            None  # a mean to start from, so that sums of squares do not cancel
        )
        self.sums: list[Tensor] = []

    def add(self, table: Moments) -> None:
        """The images of a batch: a row each."""
        mean, var = table.mean.to(torch.float64), table.var.to(torch.float64)
        if self.near is None:
            self.near = mean.mean(0)
        w = weights(table)
        d = mean - self.near
        e = var + d.square()
        w2 = w.square()
        new = [t.sum(0) for t in (w, w2, w2 * d, w2 * d * d, w2 * e, w2 * e * e, w2 * d * e)]
        self.sums = [a + b for a, b in zip(self.sums, new, strict=True)] if self.sums else new
        self.images += mean.shape[0]

    def errors(self, tally: Tally) -> tuple[Tensor, Tensor]:
        """The standard errors of the tally's mean and of its variance; infinite from one image."""
        if self.near is None or self.images < 2:
            unknown = torch.full_like(tally.mean, torch.inf)
            return unknown, unknown
        w, w2, w2d, w2dd, w2e, w2ee, w2de = self.sums
        step = tally.mean - self.near
        of_mean = w2dd - 2 * step * w2d + step.square() * w2
        rest = step.square() - tally.var  # v + (m − mean)² − var = e − 2·step·d + rest
        of_var = (
            w2ee
            + 4 * step.square() * w2dd
            + rest.square() * w2
            - 4 * step * w2de
            + 2 * rest * w2e
            - 4 * step * rest * w2d
        )
        small_sample = self.images / (self.images - 1)
        mean, var = ((small_sample * s.clamp(min=0)).sqrt() / w for s in (of_mean, of_var))
        return mean, var

    def relative(self, tally: Tally, eps: float) -> Tensor:
        """Per channel, the larger of the two errors as the normalized output feels it.

        The mean's in units of √(var + eps), the variance's in units of var + eps: a channel that
        is nearly dead cannot keep the others waiting.
        """
        mean, var = self.errors(tally)
        scale = tally.var + eps
        tiny = torch.finfo(torch.float64).tiny
        return torch.maximum(mean / scale.clamp(min=tiny).sqrt(), var / scale.clamp(min=tiny))
