"""Statistics into the buffers of norms, mixed with those from before if that is wanted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from normkit.calibration.measured import Measured
from normkit.inspection.keepers import Keeper
from normkit.inspection.tally import Tally


class Writer:
    """Writes what was measured, as if ``prior`` images had given the statistics of the start.

    Prior and measured values are merged like any two sets of data. So the variance of the mixture
    contains how far the two means are apart, which a mixture of variances would leave out.
    """

    def __init__(self, keepers: Sequence[Keeper], prior: float = 0.0) -> None:
        self.prior = prior
        self.start: dict[Keeper, tuple[Tensor, Tensor]] = {
            keeper: tuple(t.clone() for t in keeper.held())  # type: ignore[misc]
            for keeper in keepers
        }

    def __call__(self, one: Measured) -> None:
        assert one.tally is not None
        one.keeper.write(self.mixed(one.keeper, one.tally, one.images), one.calls)

    def mixed(self, keeper: Keeper, tally: Tally, images: float) -> Tally:
        """The tally with the prior in it."""
        if not self.prior:
            return tally
        before = tally.count * (self.prior / images)  # as many values an image as were measured
        return Tally.from_variance(before, *self.start[keeper]).merged(tally)
