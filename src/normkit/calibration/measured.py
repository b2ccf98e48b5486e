"""What one norm got, over the batches of a pass."""

from __future__ import annotations

from torch import Tensor

from normkit.calibration.certainty import LEAST, Certainty
from normkit.core.moments import Moments
from normkit.inspection.keepers import Keeper
from normkit.inspection.tally import Tally


class Measured:
    """What one norm got, over all batches so far."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.tally: Tally | None = None
        self.certainty = Certainty()
        self.images = 0  # samples of the model that have been through
        self.batches = 0
        self.calls = 0
        self.settled = True  # statistics that the input itself depends on have come to rest
        self.left_out = 0  # calls whose values were not all finite

    def add(self, x: Tensor, images: int) -> None:
        """The input of one call, in a batch with so many images."""
        table = self.keeper.table(x)
        new = Tally.of(table)
        if not new.is_finite():
            self.left_out += 1
            return
        self.calls += 1
        self.tally = new if self.tally is None else self.tally.merged(new)
        self.certainty.add(_by_image(table, images))

    def is_sure(self, bound: float) -> bool:
        if self.tally is None or self.certainty.images < LEAST:
            return False
        return bool((self.certainty.relative(self.tally, self.keeper.eps) <= bound).all())

    def uncertainty(self) -> Tensor:
        """The standard errors, relative as the normalized output feels them, per channel."""
        assert self.tally is not None
        return self.certainty.relative(self.tally, self.keeper.eps)


def _by_image(table: Moments, images: int) -> Moments:
    """Rows that belong to one image are one observation, as when frames or patches are rows."""
    rows = table.mean.shape[0]
    if isinstance(table.count, Tensor) or rows <= images or rows % images:
        return table
    return table.pooled(samples=rows // images)
