"""How many channel groups, when channels and the wish do not fit."""

from __future__ import annotations

import math
from typing import Literal

from normkit.core.options import positive
from normkit.errors import OptionError, nearest

GroupPolicy = Literal["error", "clip_to_channels", "gcd", "largest_divisor"]
POLICIES = ("error", "clip_to_channels", "gcd", "largest_divisor")
USUAL_GROUPS = 32  # the group count of ws-bcn, bgn and of estimation-shift's GN baselines


def largest_divisor(channels: int, groups: int) -> int:
    """The largest number of groups up to ``groups`` that divides the channels."""
    return next(g for g in range(min(channels, groups), 0, -1) if channels % g == 0)


def resolve_groups(
    channels: int, groups: int | None, policy: GroupPolicy = "error", *, owner: str = "GN"
) -> int:
    """The number of groups to use.

    ``None`` takes the usual 32, or four channels a group where that would leave fewer than two,
    and of that the greatest common divisor with the channels: a group of one channel would be
    instance norm, and erase an input (N, C). A number is a wish: it must divide the channels,
    unless ``policy`` says how to bend it. ``clip_to_channels`` lowers a number above the channels
    to the channels, as the code of estimation-shift does, and is an error otherwise.
    """
    if policy not in POLICIES:
        raise OptionError(f"Unknown group policy {policy!r}. {nearest(policy, POLICIES)}")
    if groups is None:
        wish = USUAL_GROUPS if channels >= 2 * USUAL_GROUPS else max(1, channels // 4)
        return math.gcd(channels, wish)
    groups = positive(groups, "groups", owner)
    if policy == "clip_to_channels":
        groups = min(groups, channels)
    if policy == "gcd":
        return math.gcd(channels, min(groups, channels))
    if policy == "largest_divisor":
        return largest_divisor(channels, groups)
    if channels % groups:
        raise OptionError(
            f"{owner} expects channels divisible by groups, got channels={channels}, "
            f"groups={groups}. Try groups={largest_divisor(channels, groups)}."
        )
    return groups
