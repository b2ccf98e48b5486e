"""What the papers measure, as pure functions of tensors.

Estimation shift, of Huang et al. 2022, "Delving into the Estimation Shift of Batch Normalization":
    estimated μ̂, σ̂²   running averages over training, equation 3: what eval mode divides by
    expected μ̃, σ̃²    definition 1: mean and variance of the layer's input on the test set, with
                       the trained weights. They depend on the layers below, so that errors of the
                       estimates add up from layer to layer (section 4.2.1).
    ESM                definition 2: the L2 norms of μ̂ − μ̃ and of √σ̂² − √σ̃²
The output error is not in the paper: it is what the difference of equation 2 with μ̂, σ̂² and with
μ̃, σ̃² does to the normalized value, eps included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.core.moments import Moments, standardization_error
from normkit.core.precision import widest, without_autocast
from normkit.engine.torch.operations import condensation_score
from normkit.errors import OptionError, ShapeError

Statistics = Moments | tuple[Tensor, Tensor]  # or a plain pair (mean, var), one entry a channel
Pair = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


# -------------------------------------------------------------------- statistics


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
    used, true = (Moments(*statistics, 1) for statistics in pair)
    return standardization_error(used, true, eps)


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


def stat_diff(mean: Tensor, var: Tensor, groups: int = 1) -> Tensor:
    """Per group: std of the channels' means over the mean of their stds, (G,). 0 / 0 is 0.

    0 for channels that are alike; large if a few of them decide the statistics of all. ``mean``
    and ``var`` are per channel, of what the norm is given; a layer's value is the mean over its
    groups.

    Paper: Qiao et al. 2019 (ws-bcn), eq. 35; running variances there are read as their roots.
    """
    means, stds = _grouped(mean, var, groups)
    spread, scale = means.var(1, correction=0).sqrt(), stds.mean(1)
    return (spread / scale).masked_fill(spread == 0, 0.0)


def under_represented(
    mean: Tensor, var: Tensor, groups: int = 1, *, least: float = 0.1, reach: float = 3.0
) -> Tensor:
    """Which channels their group drowns, a boolean (C,); the mean of it is their share.

    Once the group is standardized as one, a channel is under-represented if its own std is below
    ``least``, where 1 is that of the group, or if its mean lies more than ``reach`` of its stds
    below 0, so that a ReLU hardly ever lets it pass. The paper (ws-bcn, section 6.1) describes
    both and gives no numbers.
    """
    means, stds = _grouped(mean, var, groups)
    each = Moments(means.reshape(1, -1), stds.square().reshape(1, -1), 1)
    group = each.pooled(channels=means.shape[1])
    center, scale = group.mean.reshape(-1, 1), group.var.sqrt().reshape(-1, 1)
    weak = stds < least * scale
    off = means - center + reach * stds < 0
    return (weak | off).flatten()


def _grouped(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Means and stds (G, C/G) in float64."""
    mean, var = mean_and_var((mean, var))
    if mean.shape != var.shape or groups < 1 or mean.numel() % groups:
        raise ShapeError(
            f"Means and variances (C,) expected with C divisible by groups={groups}, "
            f"got {tuple(mean.shape)} and {tuple(var.shape)}."
        )
    return mean.reshape(groups, -1), var.clamp(min=0).sqrt().reshape(groups, -1)


# -------------------------------------------------------------------- values


class ActivityBounds(NamedTuple):
    """Between which values an activation's output lies; None if it has no such bound."""

    low: float | None = None
    high: float | None = None


def share_beyond(normalized: Tensor, limit: float = 6.0) -> Tensor:
    """The share of |x̂| > limit: a scalar. Of a normal distribution 2·10⁻⁹ lie beyond 6.

    NaN counts as beyond. ``normalized`` is without weight and bias.
    """
    if normalized.numel() == 0:
        return torch.zeros((), device=normalized.device)
    return (~(normalized.detach().abs() <= limit)).float().mean()


def dead_channels(y: Tensor, axis: int = 1) -> Tensor:
    """Channels of an activation's output that are never above 0, a boolean (C,).

    No gradient passes a ReLU there: the channel is an elimination singularity (ws-bcn, section
    3.2). The output of the norm before a ReLU gives the same answer.
    """
    return _channels_last(y, axis).amax(0) <= 0


def saturated_channels(
    y: Tensor, bounds: ActivityBounds, axis: int = 1, *, margin: float = 0.01, share: float = 1.0
) -> Tensor:
    """Channels whose values are at the bounds of an activation, a boolean (C,).

    At a bound is what lies within ``margin`` of the way between the two bounds; at least ``share``
    of a channel's values must. An activation with one bound, as ReLU, cannot saturate in this
    sense: see ``dead_channels``.
    """
    values = _channels_last(y, axis)
    low, high = bounds
    if low is None or high is None:
        return torch.zeros(values.shape[1], dtype=torch.bool, device=y.device)
    near = margin * (high - low)
    return ((values <= low + near) | (values >= high - near)).float().mean(0) >= share


def _channels_last(y: Tensor, axis: int) -> Tensor:
    """The values of each channel as a column: (values, C)."""
    if not -y.dim() <= axis < y.dim() or y.dim() < 2 or y.numel() == 0:
        raise ShapeError(
            f"A tensor with channels on axis {axis} expected, and not empty, got {tuple(y.shape)}."
        )
    return y.detach().movedim(axis, -1).flatten(0, -2)


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


def condensation(x: Tensor, samples: int | None = None) -> Tensor:
    """Mean cosine between the flattened samples of x over all pairs: a scalar, 1 for one sample.

    Of the first ``samples`` if given. A sample of zeros has cosine 0 with every other and, as in
    the layer ubn, lowers the score by 1 / (n(n − 1)) besides.

    Paper: Wang et al. 2024 (ubn); above 0.3 its figures call features condensed.
    """
    flat = _flat(x, samples)
    with without_autocast(x.device):
        return condensation_score(flat, Moments(flat, torch.zeros_like(flat), 1))


def condensation_matrix(x: Tensor, samples: int | None = None) -> Tensor:
    """The cosines between all samples, (n, n): what the score is the mean of, off the diagonal."""
    flat = _flat(x, samples)
    norm = flat.norm(dim=1, keepdim=True)
    unit = torch.where(norm > 0, flat / norm, 0)
    with without_autocast(x.device):
        return unit @ unit.mT


def _flat(x: Tensor, samples: int | None) -> Tensor:
    if x.dim() < 2 or x.shape[0] == 0:
        raise ShapeError(f"Condensation is of a batch (N, …) with N ≥ 1, got {tuple(x.shape)}.")
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach()[:samples].flatten(1).to(wide)


# -------------------------------------------------------------------- parameters


class Drift(NamedTuple):
    """How far a parameter is from its start: root mean square, and the largest. Scalars."""

    rms: Tensor
    largest: Tensor


def gradient_factor(weight: Tensor | None, var: Tensor, eps: float = 1e-5) -> Tensor:
    """γ / √(σ² + ε) per channel: what a norm multiplies the gradient with on its way down.

    Signed, as γ is. ``var`` is the variance of the batch; no weight counts as 1.

    Paper: Davis and Frank 2022 (revisiting-bn), eq. 20.
    """
    factor = (var.detach() + eps).rsqrt()
    return factor if weight is None else weight.detach().reshape(factor.shape) * factor


def drift(now: Tensor, start: Tensor) -> Drift:
    """The distance of a parameter from its start, per entry: widths can be compared."""
    if now.shape != start.shape:
        raise ShapeError(
            f"A parameter and its start expected, got {tuple(now.shape)} and {tuple(start.shape)}."
        )
    if now.numel() == 0:
        return Drift(torch.zeros(()), torch.zeros(()))
    distance = (wide(now) - wide(start.to(now.device))).abs()
    return Drift(drift_rms(now, start), distance.max())


def drift_rms(now: Tensor, start: Tensor) -> Tensor:
    """The root mean square alone, in few operations: it is taken while a model trains."""
    distance = wide(now) - start.detach().to(now.device)
    return distance.square().mean().sqrt()


class GradientParts(NamedTuple):
    """Per output channel (O,): a + b + c = ‖g‖². Only c reaches the weight."""

    a: Tensor  # removed by the division by the standard deviation
    b: Tensor  # removed by the subtraction of the mean
    c: Tensor  # var(W) · ‖gradient of W‖²


def ws_gradient_decomposition(weight: Tensor, grad: Tensor) -> GradientParts:
    """What weight standardization takes from a gradient, and what it leaves.

    ``weight`` is W before standardization, ``grad`` = g the gradient at Ŵ = (W − mean) / std, both
    (O, …) with I = W[0].numel() values each, and eps = 0:

        A = ⟨Ŵ, g⟩² / I    B = ⟨1, g⟩² / I    C = var(W) · ‖∂L/∂W‖²

    An output channel whose weights are all equal has no Ŵ; there A = 0, B as above, and C the rest.

    Paper: Qiao et al. 2019 (ws-bcn), figure 4.
    """
    if weight.shape != grad.shape or weight.dim() < 2:
        raise ShapeError(
            "A weight (O, I, …) and a gradient of the same shape expected, "
            f"got {tuple(weight.shape)} and {tuple(grad.shape)}."
        )
    w, g = (wide(t).flatten(1) for t in (weight, grad))
    inputs = w.shape[1]
    std = w.std(1, correction=0, keepdim=True)
    unit = torch.where(std > 0, (w - w.mean(1, keepdim=True)) / std, 0)
    along = (unit * g).sum(1, keepdim=True)
    left = g - g.mean(1, keepdim=True) - unit * along / inputs  # std · ∂L/∂W
    return GradientParts(
        along[:, 0].square() / inputs, g.sum(1).square() / inputs, left.square().sum(1)
    )
