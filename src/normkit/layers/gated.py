"""What rbn, iebn and ubn share: a gate for each sample and channel, and centering."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Fusion, Gate
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState
from normkit.core.trained import ParameterRole, TrainedBN
from normkit.layers.batch import BatchNormalizer
from normkit.layers.measured import Refusal


class Gated(BatchNormalizer):
    """A batch normalizer whose scale is weight · sigmoid(gate_weight · means + gate_bias)."""

    reads_each_sample = True
    compensates = ("weight", "bias")  # for the gate
    gate_weight: Tensor | None
    gate_bias: Tensor

    gate_start: float  # of gate_bias
    looks_at: str  # whose means the gate sees: those of the "normalized" or of the "input"

    def __init__(self, channels: int, *, minus: bool = False, **options: Any) -> None:
        super().__init__(channels, **options)
        self.minus = minus
        self.register_parameter("gate_weight", None if minus else self._new(0.0))
        self.gate_bias = self._new(self.gate_start)

    def uses_moments(self) -> bool:
        return True  # eval mode has a gate too

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        batch = self.uses_batch()
        if batch and not self.pools_all(x):
            return None
        given = None
        if not batch:
            mean, var = (self.kept()[name] for name in ("running_mean", "running_var"))
            assert mean is not None and var is not None
            given = mean, var
        return Gate(
            self.eps,
            self.looks_at,
            self.weight,
            self.bias,
            self.gate_weight,
            self.gate_bias,
            getattr(self, "center_weight", None),
            given,
            memory=self.memory(x.numel() // self.channels, state),
        )

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        return {**super().options_from(bn, asked), "affine": True}  # the weight undoes the gate

    def affine_from(self, bn: TrainedBN) -> tuple[Tensor, Tensor]:
        return bn.weight / torch.sigmoid(self.gate_bias), bn.bias

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        bn = super().as_batch_norm(like)
        bn = bn.losing("gate", *["centering"] * (getattr(self, "center_weight", None) is not None))
        if not bn.affine:
            return bn
        return bn.having(weight=bn.weight * torch.sigmoid(self.gate_bias.detach()))

    def parameter_role(self, name: str) -> ParameterRole:
        role = super().parameter_role(name)
        return role._replace(of_batch_norm=False) if name == "weight" else role

    # ---------------------------------------------------------------- for diagnosis

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        calibrated, added = centered(table, getattr(self, "center_weight", None))
        found = super().standardizing(calibrated, batch=batch)
        return found if isinstance(found, Refusal) else found.after_adding(added)

    def gates(self, table: Moments) -> Tensor | Refusal:
        gate = self.compute(table, self.state().alone()).gate
        assert gate is not None
        return gate.expand_as(table.mean)


def centered(moments: Moments, center_weight: Tensor | None) -> tuple[Moments, Tensor | None]:
    """The moments of x + center_weight · m, and what is added to x."""
    if center_weight is None:
        return moments, None
    added = center_weight * moments.mean
    return Moments(moments.mean + added, moments.var, moments.count), added


def centered_by(moments: Moments, center_weight: Tensor | None) -> Moments:
    """The moments of the centered input alone, in their own type and without a gradient."""
    weight = None if center_weight is None else center_weight.detach().to(moments.mean.dtype)
    return centered(moments, weight)[0]


def gate(means: Tensor, weight: Tensor | None, bias: Tensor) -> Tensor:
    """A factor between 0 and 1 for each sample and channel."""
    return torch.sigmoid(bias.to(means.dtype) if weight is None else weight * means + bias)
