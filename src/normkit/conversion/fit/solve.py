"""Scale and shift of each channel, by least squares, before or after an activation. Pure."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
RELATED = 0.05  # a correlation below which a channel says nothing about what is wanted
CONSTANT = 1e-10  # a variance, relative to the mean square, below which a channel says nothing


def solve(
    given: Tensor,
    wanted: Tensor,
    activation: Activation | None = None,
    *,
    sharing: int = 1,
    rounds: int = 3,
    shrink: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(scale, shift), each (C,), with which scale · given + shift is nearest to wanted.

    ``given`` and ``wanted`` are tables (values, C), wide; ``sharing`` neighbouring channels get
    one scale and shift. A channel that is constant gets a shift alone, and the scale 1.

    Least squares make a channel smaller by its correlation r with what is wanted, which adds up
    from layer to layer. So the scale is r^shrink · (deviation of wanted) / (deviation of given):
    1 are least squares, 0 lets each channel keep the variance it had.

    With an activation, what comes after it is to be near: Σ (f(y) − f(t))² is Σ w · (y − t)² with
    the slope of f between y and t, squared, as the weight. So values that are clipped on both
    sides do not count. The weights are those of the round before, and the best round is kept,
    channel by channel: never worse than without.
    """
    weights = torch.ones_like(wanted)
    scale, shift = _line(given, wanted, weights, sharing, shrink)
    if activation is None or rounds < 1:
        return scale, shift
    target = activation(wanted)
    if target.shape != wanted.shape:  # one that joins channels
        return scale, shift
    best, error = (scale, shift), torch.full_like(scale, torch.inf)
    for last in (*(False,) * rounds, True):
        y = torch.addcmul(shift, given, scale)
        output = activation(y)
        now = _shared((output - target).square().sum(0), sharing)
        better = now < error
        error = torch.where(better, now, error)
        best = (
            torch.where(better, scale, best[0]),
            torch.where(better, shift, best[1]),
        )
        if last:
            break
        gap = y - wanted
        slope = torch.where(gap == 0, 1, (output - target) / gap)
        scale, shift = _line(given, wanted, slope.square(), sharing, shrink, best)
    return best


def _line(
    u: Tensor,
    t: Tensor,
    w: Tensor,
    sharing: int,
    shrink: float,
    otherwise: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """About the means, since Σu² − (Σu)²/n cancels; ``otherwise`` where no weight is left."""
    n = _shared(w.sum(0), sharing)
    count = n.clamp(min=torch.finfo(n.dtype).tiny)
    mean_u = _shared((w * u).sum(0), sharing) / count
    mean_t = _shared((w * t).sum(0), sharing) / count
    du, dt = u - mean_u, t - mean_t
    uu = _shared((w * du * du).sum(0), sharing)
    ut = _shared((w * du * dt).sum(0), sharing)
    size = _shared((w * u * u).sum(0), sharing)
    varies = uu > CONSTANT * size
    scale = torch.where(varies, ut / torch.where(varies, uu, 1), 1)
    if shrink != 1:
        tt = _shared((w * dt * dt).sum(0), sharing)
        r = ut.abs() / (uu * tt).sqrt().clamp(min=torch.finfo(uu.dtype).tiny)
        related = varies & (r > RELATED)
        scale = torch.where(related, scale * torch.where(related, r, 1) ** (shrink - 1), scale)
    shift = mean_t - scale * mean_u
    if otherwise is not None:
        enough = (n > 1) & varies
        scale = torch.where(enough, scale, otherwise[0])
        shift = torch.where(enough, shift, otherwise[1])
    return scale, shift


def _shared(sums: Tensor, sharing: int) -> Tensor:
    """The sums of channels that share a scale, for each of them."""
    if sharing == 1:
        return sums
    return sums.reshape(-1, sharing).sum(1).repeat_interleave(sharing)


def unexplained(output: Tensor, target: Tensor) -> tuple[float, float]:
    """Σ (output − target)² and Σ (target − mean of its channel)², of tables (values, C)."""
    spread = (target - target.mean(0)).square().sum()
    return float((output - target).square().sum()), float(spread)
