"""Gates and thresholds that have stopped moving."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.errors import OptionError


def gate_saturation(gates: Tensor, margin: float = 0.05) -> Tensor:
    """The share of gates below ``margin`` or above 1 − margin: a scalar.

    ``gates`` are the values of a sigmoid, as in rbn, iebn and ubn. At 0.05 its slope, s·(1 − s), is
    a fifth of the largest: the gate hardly learns any more.
    """
    if not 0 <= margin < 0.5:
        raise OptionError(f"gate_saturation expects a margin from 0 to 0.5, got {margin!r}.")
    if gates.numel() == 0:
        return torch.zeros((), device=gates.device)
    gates = gates.detach()
    return ((gates < margin) | (gates > 1 - margin)).float().mean()


def frozen_share(scores: Tensor | Sequence[Tensor | float], tau: float | Sequence[float]) -> float:
    """The share of ubn layers whose running score is not above their threshold.

    Such a layer is a fixed map: it neither uses nor learns the statistics of a batch (ubn, eq. 3).
    A score that is NaN counts as frozen, as in the layer. Without layers the share is 0.
    """
    values = [float(score) for score in scores]
    taus = [float(tau)] * len(values) if isinstance(tau, int | float) else [float(t) for t in tau]
    if len(taus) != len(values):
        raise OptionError(
            f"frozen_share expects one tau, or one a score, got {len(taus)} for {len(values)}."
        )
    frozen = [not score > limit for score, limit in zip(values, taus, strict=True)]
    return sum(frozen) / len(frozen) if frozen else 0.0
