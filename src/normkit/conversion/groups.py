"""Numbers of groups, and norms whose channels they do not divide.

A network has norms of many sizes, and one number of groups seldom divides all of them. Which norms
these are is told at once, with what to ask for instead, before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from normkit.core.groups import GroupPolicy, resolve_groups
from normkit.core.options import positive
from normkit.errors import OptionError
from normkit.layers.base import Normalizer

PER_GROUP = "channels_per_group"
TOLD = 5  # norms that are named


def with_groups(channels: int, asked: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Options of a layer with so many channels: ``channels_per_group`` becomes ``groups``."""
    options = dict(asked)
    if PER_GROUP not in options:
        return options
    if options.get("groups") is not None:
        raise OptionError(
            f"{owner} expects groups or {PER_GROUP}, got both: {options['groups']!r} and "
            f"{options[PER_GROUP]!r}."
        )
    size = positive(options.pop(PER_GROUP), PER_GROUP, owner)
    policy: GroupPolicy = options.get("group_policy", "error")
    try:
        fitting = resolve_groups(channels, size, policy, owner=owner)
    except OptionError as error:
        if channels % size == 0:  # the policy itself
            raise
        raise OptionError(
            f"{owner} expects channels divisible by {PER_GROUP}, got channels={channels}, "
            f"{PER_GROUP}={size}. Try {PER_GROUP}={math.gcd(channels, size)}."
        ) from error
    return {**options, "groups": channels // fitting}


def is_misfit(channels: int | None, asked: Mapping[str, Any]) -> bool:
    """Whether a number of groups, or of channels in one, does not divide the channels."""
    number = asked.get(PER_GROUP, asked.get("groups"))
    if not channels or not isinstance(number, int) or number < 1:
        return False
    return channels % number != 0


def refuse_misfits(
    misfits: Mapping[str, int],
    asked: Mapping[str, Any],
    channels: Sequence[int],
    *,
    bendable: bool,
    several: Sequence[int] = (),
) -> None:
    """An error that names these norms, given with their channels, and what would fit all.

    ``channels`` are those of every norm that is asked for; ``bendable`` tells whether the layer
    has a policy for such numbers, ``several`` are the numbers among which a fit was to choose.
    """
    name = PER_GROUP if PER_GROUP in asked else "groups"
    number: int = asked.get(name) or 0
    named = [f"{path} ({count})" for path, count in list(misfits.items())[:TOLD]]
    more = f" and {len(misfits) - TOLD} more" if len(misfits) > TOLD else ""
    wish = f"groups={list(several)}" if several else f"{name}={number}"
    common = math.gcd(*channels)
    tries = []
    if bendable:
        bent = {
            resolve_groups(count, n, "gcd")
            for count in misfits.values()
            for n in several or [number]
        }
        what = "channels a group" if name == PER_GROUP else "groups"
        tries.append(f'group_policy="gcd", which gives these {_span(bent)} {what}')
    if several:
        tries.append(f"a number among them that divides all: {_divisors(common)}")
    else:
        tries.append(f"{name}={math.gcd(common, number)}, which divides all")
        if name == "groups" and common > 1:
            tries.append(f"{PER_GROUP}={common}")
        tries.append('convert with groups="fit", fit=images, which chooses for each norm')
    if bendable:
        tries.append("neither: without a number the layer takes one that suits its channels")
    raise OptionError(
        f"{wish} does not divide the channels of {len(misfits)} of {len(channels)} norms: "
        f"{', '.join(named)}{more}. Try {'; or '.join(tries)}. Nothing was changed."
    )


def bent_note(asked: Mapping[str, Any], norms: Sequence[nn.Module]) -> str:
    """What a policy has made of the number of groups of these new norms, in one line, or empty."""
    wish = asked.get("groups")
    if not isinstance(wish, int) or "group_policy" not in asked:
        return ""
    held = [getattr(norm, "groups", None) or getattr(norm, "num_groups", None) for norm in norms]
    counts = [count for count in held if isinstance(count, int)]
    other = {count for count in counts if count != wish}
    if not other:
        return ""
    return (
        f"groups={wish} does not divide the channels of {sum(c != wish for c in counts)} of "
        f"{len(counts)} norms: with group_policy={asked['group_policy']!r} these have "
        f"{_span(other)} groups."
    )


def single_channel_note(sites: Sequence[tuple[str, nn.Module]]) -> str:
    """Which of these new norms have groups of one channel, in one line, or empty.

    Such a norm takes each channel's mean over an image away, which no scale and shift brings back.
    """
    alone = []
    for path, norm in sites:
        if isinstance(norm, Normalizer):
            pair: list[int | None] = [norm.channels, norm.sample_groups()]
        else:
            pair = [getattr(norm, name, None) for name in ("num_channels", "num_groups")]
        if pair[0] == pair[1] and (pair[0] or 0) > 1:
            alone.append(path)
    if not alone or len(alone) == len(sites):  # all: then it was asked for
        return ""
    others = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
    return (
        f"{alone[0]}{others} have one channel a group, which is instance norm: it takes away how "
        "strongly a channel answers to an image. Fewer groups keep more of the network."
    )


def _span(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
