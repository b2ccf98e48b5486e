"""batch_renorm: batch normalization corrected towards the running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fusion, Pool, Ramps
from normkit.core.moments import Coefficients, Moments
from normkit.core.moments import spread as repeated
from normkit.core.statistics import LayerState, MapResult
from normkit.errors import OptionError
from normkit.layers.batch import BatchNormalizer
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

    def map_reads_state(self) -> bool:
        return True

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        if moments is None or not self.uses_batch(state):
            scale = 1 / state["running_std"][None]
            map = Coefficients(scale, None, state["running_mean"][None])
            return MapResult(map.then(self.weight, self.bias))
        pooled = self.pooled(moments, state)
        std = torch.sqrt(pooled.var + self.eps)
        r, d = state.observed.get("correction") or self.correction(pooled.mean, std, state)
        update = None
        if self.tracks(state):
            with torch.no_grad():
                mean, spread, counted = self.over_runs(pooled, state, pooled.mean, std)
            update = self.blended(state, counted=counted, running_mean=mean, running_std=spread)
        corrected = pooled.standardizing(self.eps).then(r, d)
        samples = moments.mean.shape[0]
        run = self.virtual_batch or samples
        each = corrected.each(lambda table: repeated(table, samples=samples, runs_of=run))
        return MapResult(each.then(self.weight, self.bias), update)

    @torch.no_grad()
    def correction(self, mean: Tensor, std: Tensor, state: LayerState) -> tuple[Tensor, Tensor]:
        """r and d, from the running statistics before this batch."""
        old_mean, old_std = state["running_mean"], state["running_std"]
        r_max = 1 + (self.r_max - 1) * self._progress(self.r_ramp, state)
        d_max = self.d_max * self._progress(self.d_ramp, state)
        r = torch.clamp(std / old_std, 1 / r_max, r_max)
        return r, torch.clamp((mean - old_mean) / old_std, -d_max, d_max)

    def _progress(self, ramp: Ramp, state: LayerState) -> Tensor:
        """How far a ramp has come, 0 to 1, before this batch."""
        seen = state["num_batches_tracked"].to(state["running_std"].dtype)
        if ramp is None:
            return torch.ones_like(seen)
        return ((seen - ramp[0]) / (ramp[1] - ramp[0])).clamp(0, 1)

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        memory = self.memory(1, state)
        if not self.pools_all(x) or not (memory or state.again):
            return None
        old = state.statistics
        mean, std, seen = old["running_mean"], old["running_std"], old["num_batches_tracked"]
        assert mean is not None and std is not None and seen is not None
        (r_start, r_end), (d_start, d_end) = (r or (-1, 0) for r in (self.r_ramp, self.d_ramp))
        ramps = Ramps(
            self.r_max,
            float(r_start),
            float(r_end),
            self.d_max,
            float(d_start),
            float(d_end),
            mean,
            std,
            seen,
        )
        return Pool("batch", self.eps, self.channels, self.weight, self.bias, memory, ramps)

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        if batch:
            return super().standardizing(table, batch=True)
        mean, std = self.running_buffers().values()
        scale = 1 / std[None]
        return Coefficients(scale, -mean * scale)

    def decode_statistics(self, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return buffers["running_mean"], buffers["running_std"].square() - self.eps

    def encode_statistics(self, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
        return {"running_mean": mean, "running_std": torch.sqrt(var + self.eps)}
