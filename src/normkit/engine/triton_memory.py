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
    made, running_mean, running_second, batches, nonfinite, arrivals, rate,
    begin, last, size, weight, correction,
    MICRO: tl.constexpr, CONDITION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: the statistics stand at ``begin``, the condition, if there is one, at the end.
    With MICRO the weight of the new value is read."""
    statistics = made + begin
    new = weight
    if MICRO:
        new = tl.load(rate)
    stages.remember(
        arrivals, statistics, running_mean, running_second, batches, nonfinite, made + last, size,
        new, correction, CONDITION, WIDTH,
    )  # fmt: skip
