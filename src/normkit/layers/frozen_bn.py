"""frozen_bn: batch normalization whose statistics and affine map never change."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fixed, Fusion
from normkit.core.layout import Layout, shared_by_samples
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState
from normkit.core.trained import STATISTICS, TrainedBN
from normkit.errors import OptionError
from normkit.layers.base import Normalizer
from normkit.layers.measured import Refusal


class FrozenBN(Normalizer):
    """A fixed affine map with the names of a batch norm: nothing is learned, nothing is tracked.

    Formula:
        y = weight · (x − running_mean) / √(running_var + eps) + bias

    Statistics: the stored ones, in train() and in eval(). All four tables are buffers.

    Shapes: (N, C, *spatial) to the same.

    Use when: fine-tuning a detector whose batches are too small to estimate statistics.
    Avoid when: training from scratch: frozen at its start this layer does nothing.

    Paper: the detection tables of Unified BN and of estimation-shift freeze BN like this. Other
    code bases drop eps or start running_var at 1 − eps; we keep the eps the layer was trained
    with, so that the frozen layer equals the trained one.

    >>> import torch, normkit as nk
    >>> layer = nk.FrozenBN.from_batch_norm(torch.nn.BatchNorm2d(8)).train()
    >>> len(list(layer.parameters()))
    0
    """

    card = Card(
        name="frozen_bn",
        title="Frozen Batch Normalization",
        paper="detection baselines of ubn and estimation-shift",
        statistics="stored",
        same_in_eval=True,
        exact_from_bn=True,
    )
    is_fixed = True
    running_mean: Tensor
    running_var: Tensor

    withheld = frozenset({"affine"})
    plain_statistics = True
    running_correction = 1

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self._withhold(affine=(self.affine, True))
        del self.weight, self.bias
        self.register_buffer("weight", self._statistic(self.scale_init))
        self.register_buffer("bias", self._statistic(0.0))
        self.register_buffer("running_mean", self._statistic(0.0))
        self.register_buffer("running_var", self._statistic(1.0))

    def running_buffers(self) -> dict[str, Tensor]:
        return {"running_mean": self.running_mean, "running_var": self.running_var}

    def cells(self, x: Tensor) -> Layout:
        return shared_by_samples(x)

    def uses_moments(self) -> bool:
        return False

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        own = self.running_mean, self.running_var, self.weight, self.bias
        return Fixed(self.eps, self.channels, *own)

    def coefficients(self, moments: Moments | None) -> Coefficients:
        # copies, so that no graph meets a later change
        stored = Moments(self.running_mean.clone()[None], self.running_var[None], count=1)
        bias = None if self.bias is None else self.bias.clone()
        return stored.standardizing(self.eps).then(self.weight, bias)

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        if not bn.tracked:
            raise OptionError("it keeps no running statistics that could be frozen")
        return {"eps": bn.eps}

    def start_from(self, bn: TrainedBN) -> dict[str, str]:
        taken = super().start_from(bn)
        self.running_mean.copy_(bn.mean)
        self.running_var.copy_(bn.var)
        return {**taken, "running_mean": STATISTICS, "running_var": STATISTICS}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # a batch norm's counter has no meaning here
        state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        stored = Moments(self.running_mean[None], self.running_var[None], count=1)
        return stored.standardizing(self.eps)

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return moments.var[0]
