"""Estimation shift: how far running statistics are from what a layer is given.

Paper: Huang et al. 2022, "Delving into the Estimation Shift of Batch Normalization in a Network".
    estimated μ̂, σ̂²   running averages over training, equation 3: what eval mode divides by
    expected μ̃, σ̃²    definition 1: mean and variance of the layer's input on the test set, with
                       the trained weights. They depend on the layers below, so that errors of the
                       estimates add up from layer to layer (section 4.2.1).
    ESM                definition 2: the L2 norms of μ̂ − μ̃ and of √σ̂² − √σ̃²
The output error is not in the paper: it is what the difference of equation 2 with μ̂, σ̂² and with
μ̃, σ̃² does to the normalized value, eps included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.core.precision import widest
from normkit.errors import ShapeError

Statistics = Moments | tuple[Tensor, Tensor]  # or a plain pair (mean, var), one entry a channel
Pair = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class ESM(NamedTuple):
    """Estimation shift magnitude: of the means, and of the standard deviations. Scalars."""

    mean: Tensor
    std: Tensor


def esm(running: Statistics, expected: Statistics) -> ESM:
    """‖μ̂ − μ̃‖₂ and ‖σ̂ − σ̃‖₂ over the channels of a layer; not divided by the width.

    ``running`` are the estimates a layer uses in eval mode, ``expected`` mean and variance of what
    it is given then. Both 0 if the estimates come from an exact pass over the same data.

    Paper: Huang et al. 2022 (estimation shift), definition 2; without eps, as there.
    """
    return _esm(_pair(running, expected))


def output_error(running: Statistics, expected: Statistics, eps: float = 1e-5) -> Tensor:
    """Per channel: mean square of what wrong statistics add to the standardized output.

    E[(x̂ − x̃)²] with x̂ = (x − μ̂)/√(σ̂² + eps) and x̃ = (x − μ̃)/√(σ̃² + eps), x having mean μ̃ and
    variance σ̃². Unlike the ESM it has no unit, so layers can be compared: 1 means that the error
    is as large as the signal.
    """
    return _error(_pair(running, expected), eps)


def esm_and_error(running: Statistics, expected: Statistics, eps: float) -> tuple[ESM, Tensor]:
    """Both, where they are computed while a model trains."""
    pair = _pair(running, expected)
    return _esm(pair), _error(pair, eps)


def _esm(pair: Pair) -> ESM:
    (mean, var), (true_mean, true_var) = pair
    shift = var.clamp(min=0).sqrt() - true_var.clamp(min=0).sqrt()
    norm = torch.linalg.vector_norm  # Tensor.norm does the same after much Python
    return ESM(norm(mean - true_mean), norm(shift))


def _error(pair: Pair, eps: float) -> Tensor:
    (mean, var), (true_mean, true_var) = pair
    scale, true_scale = (var + eps).rsqrt(), (true_var + eps).rsqrt()
    return true_var * (scale - true_scale).square() + ((true_mean - mean) * scale).square()


def _pair(a: Statistics, b: Statistics) -> Pair:
    first, second = mean_and_var(a), mean_and_var(b)
    if len({t.shape for t in (*first, *second)}) > 1:
        shapes = [tuple(t.shape) for t in (*first, *second)]
        raise ShapeError(
            f"Statistics of one layer expected, one entry a channel each, got shapes {shapes}."
        )
    return first, (second[0].to(first[0].device), second[1].to(first[1].device))


def mean_and_var(statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Mean and variance (K,) in float64; moments of several samples are pooled."""
    if isinstance(statistics, Moments):
        mean, var = wide(statistics.mean), wide(statistics.var)
        if mean.shape[0] > 1:
            pooled = Moments(mean, var, statistics.count).pooled(samples=None)
            mean, var = pooled.mean, pooled.var
        return mean[0], var[0]
    mean, var = statistics
    return wide(mean).flatten(), wide(var).flatten()


def wide(tensor: Tensor) -> Tensor:
    """The same in float64, or in float32 on devices that have nothing wider."""
    return tensor.detach().to(widest(tensor.device))
