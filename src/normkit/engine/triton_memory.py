# mypy: disallow-untyped-defs=False
"""The update of running statistics as a launch of its own, for compiled graphs.

Outside of those, the kernel that makes the coefficients does it. In a graph the two are separate:
what has a gradient must change nothing, and what changes buffers has none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine import triton_stages as stages


@triton.jit
def remember_kernel(
    made, running_mean, running_second, batches, nonfinite, arrivals,
    begin, size, weight, correction, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program. The statistics stand at ``begin``."""
    statistics = made + begin
    stages.remember(
        arrivals, statistics, running_mean, running_second, batches, nonfinite, statistics, size,
        weight, correction, False, WIDTH,
    )  # fmt: skip
