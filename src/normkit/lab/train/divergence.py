"""When a run has diverged: its loss is not finite any more."""

from __future__ import annotations

import math
from collections.abc import Sequence

# fp16 overflows now and then, and its scaler leaves such steps out: only a row of them counts
PATIENCE = {"fp16": 20}


def diverged_at(losses: Sequence[float], precision: str = "float32") -> int | None:
    """The batch from which on the loss was not finite; None if it is not over.

    >>> diverged_at([2.3, math.nan, math.nan]), diverged_at([2.3, math.inf, 2.2], "fp16")
    (1, None)
    """
    patience, row = PATIENCE.get(precision, 1), 0
    for number, loss in enumerate(losses):
        row = 0 if math.isfinite(loss) else row + 1
        if row >= patience:
            return number - row + 1
    return None
