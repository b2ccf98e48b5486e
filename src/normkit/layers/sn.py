"""sn: switchable normalization, a learned mixture of instance, layer and batch statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fusion, Mix
from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments
from normkit.core.precision import statistics_dtype
from normkit.core.statistics import LayerState, MapResult, StateUpdate
from normkit.core.trained import DECAYED, ParameterRole, TrainedBN
from normkit.errors import OptionError, ShapeError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.measured import MIXTURE, Refusal


class SN(BatchNormalizer):
    """Switchable normalization.

    Formula, k over instance, layer and batch statistics:
        mean = Σ_k softmax(mean_weight)_k · mean_k
        var = Σ_k softmax(var_weight)_k · var_k
        y = weight · (x − mean) / √(var + eps) + bias

    Statistics: instance ones per sample and channel, layer ones per sample, batch ones per
    channel; in eval mode the batch part is a running average (biased), the others stay the
    sample's own.

    Shapes: (N, C, *spatial) to the same.

    Use when: it is unknown which statistics suit a layer; the weights tell after training.
    Avoid when: one image a worker: set use_bn=False, as the authors do.

    Paper: Luo et al. 2019. Variances are biased and running_var starts at 1; the authors' code
    has unbiased ones (``unbiased=True``: 25 % larger on 2×2 maps) and starts at 0
    (``var_init=0``). momentum is the weight of the new value; they write 0.9 for our 0.1.

    from_batch_norm carries everything and gives the batch part 99 % of the mixture.

    >>> import torch, normkit as nk
    >>> layer = nk.SN(8)
    >>> layer(torch.randn(4, 8, 5, 5)).shape, layer.mixture(layer.mean_weight).tolist()[0] < 0.34
    (torch.Size([4, 8, 5, 5]), True)
    """

    card = Card(
        name="sn", title="Switchable Normalization", paper="Luo et al. 2019", pools_samples=True
    )
    withheld = frozenset({"running_var_correction", "on_single"})
    beyond_batch_norm = ("mixture",)
    plain_statistics = False  # may be of unbiased variances
    running_correction = 0
    mean_weight: Tensor
    var_weight: Tensor
    bn_start = 5.0  # softmax([0, 0, 5]) is 0.987 for the batch part and still trains

    def __init__(
        self,
        channels: int,
        *,
        use_bn: bool = True,
        unbiased: bool = False,
        var_init: float = 1.0,
        **options: Any,
    ) -> None:
        self.second_start = var_init
        if not use_bn:
            if extra := options.keys() & {"momentum", "virtual_batch", "track_running_stats"}:
                raise OptionError(
                    f"SN(use_bn=False) has no batch part, so no {', '.join(sorted(extra))}."
                )
            options = {**options, "track_running_stats": False}
        super().__init__(channels, **options)
        self.use_bn, self.unbiased, self.var_init = use_bn, unbiased, var_init
        parts = 3 if use_bn else 2
        self.mean_weight, self.var_weight = self._new(1.0, parts), self._new(1.0, parts)

    def set_worker_batch(self, samples: int) -> None:
        if self.use_bn:
            super().set_worker_batch(samples)

    def can_synchronise(self) -> bool:
        return self.use_bn

    def uses_moments(self) -> bool:
        return True

    def check_size(self, x: Tensor) -> None:
        if self.unbiased and x[0, 0].numel() == 1:
            raise ShapeError(
                f"{title(self)} expects more than one position per channel with unbiased=True, "
                f"got input {tuple(x.shape)}. Try unbiased=False."
            )

    def mixture(self, weight: Tensor) -> Tensor:
        """Weights that sum to one."""
        return torch.softmax(weight, 0, dtype=statistics_dtype(weight.dtype))

    def shares(self, state: LayerState) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """How much each part counts for the mean and for the variance, and what is to be kept."""
        return self.mixture(self.mean_weight), self.mixture(self.var_weight), {}

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        assert moments is not None
        statistics, update = self.mixed(moments, state)
        return MapResult(statistics.standardizing(self.eps).then(self.weight, self.bias), update)

    def mixed(self, moments: Moments, state: LayerState) -> tuple[Moments, StateUpdate | None]:
        """The mixture of statistics, tables (N, C), and new ones."""
        own = Moments(moments.mean, moments.unbiased(int(self.unbiased)), moments.count)
        parts, update = [own, own.pooled(channels=self.channels)], None
        if self.use_bn:
            batch, update = self.batch_part(own, state)
            parts.append(batch)
        mean_share, var_share, kept = self.shares(state)
        mean = mixture_of(mean_share, [part.mean for part in parts])
        var = mixture_of(var_share, [part.var for part in parts])
        if kept:
            update = (update or StateUpdate({}, domain=state.domain)).with_values(kept)
        return Moments(mean, var, 1), update

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        if type(self).mixture is not SN.mixture:
            return None  # a layer that mixes in another way
        given = memory = None
        if self.use_bn and self.uses_batch():
            if not self.pools_all(x):
                return None
            memory = self.memory(x.numel() // self.channels, state)
            if memory is not None:
                memory = memory._replace(correction=1.0)
        elif self.use_bn:
            mean, var = (self.kept()[name] for name in ("running_mean", "running_var"))
            assert mean is not None and var is not None
            given = mean, var
        positions = x.numel() // (x.shape[0] * self.channels)
        unbias = positions / (positions - 1) if self.unbiased else 1.0
        mixture = self.mean_weight, self.var_weight
        return Mix(self.eps, unbias, self.weight, self.bias, *mixture, given, memory)

    def batch_part(self, moments: Moments, state: LayerState) -> tuple[Moments, StateUpdate | None]:
        """Batch statistics; a single value is no error here, the other parts carry it."""
        if not self.uses_batch(state):
            return self.running(state), None
        pooled = self.pooled(moments, state)
        return self.each_sample(pooled, moments), self.tracked(pooled, state)

    @torch.no_grad()
    def tracked(self, pooled: Moments, state: LayerState) -> StateUpdate | None:
        if not self.tracks(state):
            return None
        mean, var, counted = self.over_runs(pooled, state, pooled.mean, pooled.var, least=1)
        return self.blended(state, counted=counted, running_mean=mean, running_var=var)

    def sample_statistics(self, moments: Moments, x: Tensor) -> Moments:
        return Moments(moments.mean, moments.unbiased(int(self.unbiased)), moments.count)

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        found = super().options_from(bn, asked)
        return found if asked.get("use_bn", True) else {k: found[k] for k in ("eps", "affine")}

    def start_from(self, bn: TrainedBN) -> dict[str, str]:
        taken = super().start_from(bn)
        if self.use_bn:
            start = self.mean_weight.new_tensor([0.0, 0.0, self.bn_start])
            self.mean_weight.copy_(start)
            self.var_weight.copy_(start)
        return taken

    def parameter_role(self, name: str) -> ParameterRole:
        if name in ("mean_weight", "var_weight"):
            return ParameterRole(DECAYED)  # as by the authors: towards an equal mixture
        return super().parameter_role(name)

    # ---------------------------------------------------------------- for diagnosis

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        return MIXTURE

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return MIXTURE

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        return self.mixed(table, self.state_for(batch))[0].standardizing(self.eps)


def mixture_of(shares: Tensor, tables: list[Tensor]) -> Tensor:
    """Σ shares · tables, about the second one: that shares sum to one is then true to the last
    digit, and what the tables have in common does not hide how they differ."""
    middle = tables[1]
    total = middle + shares[0] * (tables[0] - middle)
    return total if len(tables) == 2 else total + shares[2] * (tables[2] - middle)
