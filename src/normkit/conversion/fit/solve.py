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
    lines = _Lines(given, wanted, sharing, shrink)
    scale, shift = lines.fitted(None)
    if activation is None or rounds < 1:
        return scale, shift
    target = activation(wanted)
    if target.shape != wanted.shape:  # one that joins channels
        return scale, shift
    target, wide_given, wide_wanted = (x.t().contiguous() for x in (target, given, wanted))
    y = torch.empty_like(wide_given)
    best, error = (scale, shift), torch.full_like(scale, torch.inf)
    for last in (*(False,) * rounds, True):
        torch.addcmul(shift[:, None], wide_given, scale[:, None], out=y)
        gap = activation(y.t()).t() - target
        now = _shared(_dot(gap, gap), sharing)
        better = now < error
        error = torch.where(better, now, error)
        best = (
            torch.where(better, scale, best[0]),
            torch.where(better, shift, best[1]),
        )
        if last:
            break
        slope = gap.div_(y.sub_(wide_wanted)).nan_to_num_(1.0)  # 0 / 0: right as it is
        scale, shift = lines.fitted(slope.square_(), best)
    return best


class _Lines:
    """Lines through the values of each channel, for several weights.

    Tables are (C, values) here, so that sums run along memory. About the means of all values, since
    Σu² − (Σu)²/n cancels: those with weights are not far from them.
    """

    def __init__(self, given: Tensor, wanted: Tensor, sharing: int, shrink: float) -> None:
        self.sharing, self.shrink = sharing, shrink
        self.centers = [self._total(x.sum(0)) / (len(x) * sharing) for x in (given, wanted)]
        pairs = zip((given, wanted), self.centers, strict=True)
        self.u, self.t = ((x - center).t().contiguous() for x, center in pairs)
        self._wu, self._wt = self.u, self.t

    def _total(self, sums: Tensor) -> Tensor:
        return _shared(sums, self.sharing)

    def fitted(
        self, weights: Tensor | None, otherwise: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scale and shift of each channel; ``otherwise`` where no weight is left."""
        u, t = self.u, self.t
        if weights is None:
            count = u.new_full((len(u),), u.shape[1])
        else:
            if self._wu is u:
                self._wu, self._wt = torch.empty_like(u), torch.empty_like(t)
            torch.mul(weights, u, out=self._wu)
            torch.mul(weights, t, out=self._wt)
            count = weights.sum(1)
        wu, wt = self._wu, self._wt
        n = self._total(count)
        size = n.clamp(min=torch.finfo(n.dtype).tiny)
        mean_u, mean_t = self._total(wu.sum(1)) / size, self._total(wt.sum(1)) / size
        uu = self._total(_dot(wu, u)) - n * mean_u.square()
        ut = self._total(_dot(wu, t)) - n * mean_u * mean_t
        power = uu + n * (mean_u + self.centers[0]).square()  # about zero
        varies = uu > CONSTANT * power
        scale = torch.where(varies, ut / torch.where(varies, uu, 1), 1)
        if self.shrink != 1:
            tt = (self._total(_dot(wt, t)) - n * mean_t.square()).clamp(min=0)
            r = ut.abs() / (uu * tt).sqrt().clamp(min=torch.finfo(uu.dtype).tiny)
            related = varies & (r > RELATED)
            factor = torch.where(related, r, 1) ** (self.shrink - 1)
            scale = torch.where(related, scale * factor, scale)
        shift = mean_t + self.centers[1] - scale * (mean_u + self.centers[0])
        if otherwise is not None:
            enough = (n > 1) & varies
            scale = torch.where(enough, scale, otherwise[0])
            shift = torch.where(enough, shift, otherwise[1])
        return scale, shift


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ a · b of each row, without a table of the products."""
    return torch.linalg.vecdot(a, b, dim=1)


def _shared(sums: Tensor, sharing: int) -> Tensor:
    """The sums of channels that share a scale, for each of them."""
    if sharing == 1:
        return sums
    return sums.reshape(-1, sharing).sum(1).repeat_interleave(sharing)


def unexplained(output: Tensor, target: Tensor) -> tuple[float, float]:
    """Σ (output − target)² and Σ (target − mean of its channel)², of tables (values, C)."""
    spread = (target - target.mean(0)).square().sum()
    return float((output - target).square().sum()), float(spread)
