"""batch_renorm: batch normalization corrected towards the running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fusion, Pool, Ramps
from normkit.core.moments import Coefficients, Moments
from normkit.core.running import is_recomputation
from normkit.errors import OptionError
from normkit.layers.batch import BatchNormalizer, over_runs
from normkit.layers.measured import Refusal

Ramp = tuple[int, int] | None


class BatchRenorm(BatchNormalizer):
    """Batch renormalization: batch statistics, corrected within limits to the running ones.

    Formula:
        std = √(var + eps)
        r = clip(std / running_std, 1/r_max, r_max)            no gradient
        d = clip((mean − running_mean) / running_std, ±d_max)  no gradient
        y = weight · ((x − mean) / std · r + d) + bias

    Statistics: as bn in training, then running_mean and running_std move towards mean and std
    (biased, eps inside). r and d use the old running values. Eval mode: y = weight ·
    (x − running_mean) / running_std + bias. The limits grow linearly over the batches of
    ``r_ramp`` and ``d_ramp`` from 1 and 0, where the layer equals bn; None means no ramp.

    Shapes: (N, C, *spatial) to the same.

    Use when: small batches, or batches that are not drawn independently.
    Avoid when: training is shorter than the ramps; then shorten the ramps.

    Paper: Ioffe 2017. Defaults are the paper's: momentum 0.01, eps 1e-3, r_max 3 between batches
    5,000 and 40,000, d_max 5 between 5,000 and 25,000.

    >>> import torch, normkit as nk
    >>> x, bn = torch.randn(8, 4, 5, 5), nk.BN(4, eps=1e-3)
    >>> torch.allclose(nk.BatchRenorm(4)(x), bn(x), atol=1e-6)  # before the ramps: bn
    True
    """

    card = Card(
        name="batch_renorm",
        title="Batch Renormalization",
        paper="Ioffe 2017",
        pools_samples=True,
        exact_from_bn=True,
    )
    shares_map = True
    for_small_batches = True
    withheld = frozenset({"running_var_correction", "on_single"})
    second_buffer = "running_std"
    running_correction = 0
    running_std: Tensor | None
    old_mean: Tensor
    old_std: Tensor

    def __init__(
        self,
        channels: int,
        *,
        eps: float = 1e-3,
        momentum: float | None = 0.01,
        r_max: float = 3.0,
        d_max: float = 5.0,
        r_ramp: Ramp = (5_000, 40_000),
        d_ramp: Ramp = (5_000, 25_000),
        **options: Any,
    ) -> None:
        super().__init__(channels, eps=eps, momentum=momentum, **options)
        if not self.track_running_stats:
            raise OptionError("BatchRenorm needs running statistics to correct towards.")
        if r_max < 1 or d_max < 0:
            raise OptionError(f"BatchRenorm expects r_max ≥ 1, d_max ≥ 0, got {r_max}, {d_max}.")
        for ramp in (r_ramp, d_ramp):
            if ramp is not None and not 0 <= ramp[0] < ramp[1]:
                raise OptionError(f"BatchRenorm expects a ramp (start < end), got {ramp!r}.")
        self.r_max, self.d_max = r_max, d_max
        self.r_ramp, self.d_ramp = r_ramp, d_ramp
        # what the last forward corrected towards, for when checkpointing computes it again
        self.register_buffer("old_mean", self._statistic(0.0), persistent=False)
        self.register_buffer("old_std", self._statistic(1.0), persistent=False)

    def coefficients(self, moments: Moments | None) -> Coefficients:
        if moments is None or not self.uses_batch():
            assert self.running_mean is not None and self.running_std is not None
            scale = 1 / self.running_std[None]
            return Coefficients(scale, -self.running_mean * scale).then(self.weight, self.bias)
        pooled = moments.pooled(samples=self.virtual_batch)
        std = torch.sqrt(pooled.var + self.eps)
        r, d = self.correction(pooled.mean.detach(), std.detach())
        self.remember(
            running_mean=over_runs(pooled.mean, pooled), running_std=over_runs(std, pooled)
        )
        corrected = pooled.standardizing(self.eps).then(r, d)
        each = self.each_sample(Moments(*corrected, pooled.count), moments)
        return Coefficients(each.mean, each.var).then(self.weight, self.bias)

    def fusion(self, x: Tensor) -> Fusion | None:
        memory, again = self.memory(1), is_recomputation()
        if not self.pools_all(x) or not (memory or again):
            return None
        mean, std = (
            (self.old_mean, self.old_std) if again else (self.running_mean, self.running_std)
        )
        assert mean is not None and std is not None and self.num_batches_tracked is not None
        (r_start, r_end), (d_start, d_end) = (r or (-1, 0) for r in (self.r_ramp, self.d_ramp))
        ramps = Ramps(
            self.r_max,
            float(r_start),
            float(r_end),
            self.d_max,
            float(d_start),
            float(d_end),
            -1.0 if again else 0.0,
            mean,
            std,
            self.num_batches_tracked,
            self.old_mean,
            self.old_std,
        )
        memory = memory and memory._replace(correction=1.0)
        return Pool("batch", self.eps, self.channels, self.weight, self.bias, memory, ramps)

    def after_fusion(self, fusion: Fusion, tables: Tensor, begin: int, x: Tensor) -> None:
        if fusion.memory is not None:  # otherwise it was computed again
            super().after_fusion(fusion, tables, begin, x)

    def correction(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """r and d, from the running statistics before this batch."""
        again = is_recomputation()
        if not again and self.running_mean is not None and self.running_std is not None:
            self.old_mean.copy_(self.running_mean)
            self.old_std.copy_(self.running_std)
        old_mean, old_std = self.old_mean.clone(), self.old_std.clone()
        r_max = 1 + (self.r_max - 1) * self._progress(self.r_ramp, again)
        d_max = self.d_max * self._progress(self.d_ramp, again)
        r = torch.clamp(std / old_std, 1 / r_max, r_max)
        return r, torch.clamp((mean - old_mean) / old_std, -d_max, d_max)

    def _progress(self, ramp: Ramp, again: bool) -> Tensor:
        """How far a ramp has come, 0 to 1, before this batch."""
        assert self.num_batches_tracked is not None
        if ramp is None:
            return torch.ones_like(self.old_mean[0])
        seen = (self.num_batches_tracked - int(again)).to(self.old_mean.dtype)
        return ((seen - ramp[0]) / (ramp[1] - ramp[0])).clamp(0, 1)

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        if batch:
            return super().standardizing(table, batch=True)
        assert self.running_mean is not None and self.running_std is not None
        scale = 1 / self.running_std[None]
        return Coefficients(scale, -self.running_mean * scale)

    def decode_statistics(self, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return buffers["running_mean"], buffers["running_std"].square() - self.eps

    def encode_statistics(self, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
        return {"running_mean": mean, "running_std": torch.sqrt(var + self.eps)}
