"""recipes.xbn: one batch-free norm in each block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from normkit.conversion.carry import Wish
from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.recipes.assembly import Recipe, assemble, look, several
from normkit.errors import OptionError, UnknownName, nearest
from normkit.inspection import Site

NORMS = ("gn", "in", "gw", "ln")  # without statistics of the batch
STEMS = ("bfn", "bn")


def xbn(
    model: nn.Module,
    position: int = 2,
    *,
    norm: str = "gn",
    every: int = 1,
    stem: str = "bfn",
    groups: int = 64,
    in_affine: bool = False,
    where: Any = None,
    example: Any = None,
    optimizer: Optimizers = None,
    **options: Any,
) -> Plan:
    """The norm at a position of every k-th block becomes batch-free; all others stay batch norms.

    ``position`` 1, 2 or 3 is that in a bottleneck; of a block with two norms, 1 and 2 mean the
    first and 3 the second. ``every`` = 2, 4, 8 changes blocks 2, 4, 6, ...; 4, 8, ...; 8, 16, ...
    only. ``norm`` is "gn", "in", "gw" or "ln"; ``groups`` is for gn and gw, lowered to a number
    that divides where channels are fewer: 64 groups of 64 channels make gn an instance norm.

    Paper: Huang et al. 2022 (estimation-shift), XBNBlock-P1 to P3 and -D2 to -D8. It does not
    say that its code, and so its numbers, also have a batch-free stem: ``stem="bn"`` leaves the
    stem out, as the text reads. Its "in" has no affine map: ``in_affine=True`` gives it one.
    Shortcuts stay batch norms. In short trainings of narrow networks on CIFAR-10 its means were 1
    to 6 points lower on clean images, 14 to 15 with "in", and it won on damaged ones. Warm the
    learning rate up: from the first step at 0.1 a network of bottlenecks, which lost points with
    batch norms too, lost 7 to 20 more with it. With wrong statistics it lost fewer points than
    batch norm; that it had more accuracy left is not shown (docs/evidence.md, j, k and p).

    >>> import torchvision, normkit as nk
    >>> plan = nk.recipes.xbn(torchvision.models.resnet50(), stem="bn", every=2)
    >>> [step.path for step in plan.steps if step.action == "convert"][:3]
    ['layer1.1.bn2', 'layer2.0.bn2', 'layer2.2.bn2']
    """
    _check(position, norm, every, stem, groups)
    norms = look(model, example, "xbn")
    counts = several(norms)
    if not counts:
        raise OptionError(
            f"xbn changes one norm of each block, and {norms.title} has no blocks with several "
            f'norms. Try normkit.convert(model, "{norm}", where=...).'
        )
    if every > len(counts):
        raise OptionError(f"xbn got every={every}, and {norms.title} has {len(counts)} blocks.")
    if position > max(3, *counts.values()):
        most = max(counts.values())
        raise OptionError(f"xbn got position={position}, and no block has more than {most} norms.")
    odd: dict[int, int] = {}
    number = {block: i for i, block in enumerate(counts, start=1)}

    def wish(site: Site) -> Wish | str:
        if site.stem:
            return _batch_free(site) if stem == "bfn" else "the stem stays"
        if site.block not in number or site.shortcut:
            return "shortcuts stay" if site.shortcut else "not in a block"
        if number[site.block] % every:
            return f"block {number[site.block]} stays"
        here = _position(position, counts[site.block])
        return _batch_free(site) if site.position == here else f"not norm {here} of its block"

    def _batch_free(site: Site) -> Wish:
        if norm == "in":
            return "in", {"affine": in_affine, **options}
        if norm == "ln":
            return "ln", options
        assert site.channels is not None
        most = min(groups, site.channels)
        fit = math.gcd(site.channels, most)
        if fit < most:
            odd[site.channels] = fit
        return norm, {"groups": fit, **options}

    return assemble(
        model,
        norms,
        wish,
        title=f"xbn, {norm} at position {position}, every {every}, stem {stem}",
        where=where,
        example=example,
        optimizer=optimizer,
        notes=_uneven(groups, odd),
    )


def _uneven(groups: int, odd: dict[int, int]) -> Iterator[str]:
    """A note, if a wish could not be met where there are channels enough; read in the end."""
    if odd:
        channels, fits = (
            ", ".join(map(str, numbers)) for numbers in zip(*odd.items(), strict=True)
        )
        yield f"groups={groups} does not divide {channels} channels: it becomes {fits} there."


def _position(asked: int, norms: int) -> int:
    """The position in a block with so many norms; the names are those of a bottleneck."""
    return {1: 1, 2: 1, 3: 2}.get(asked, asked) if norms == 2 else asked


def _check(position: int, norm: str, every: int, stem: str, groups: int) -> None:
    if norm not in NORMS:
        raise UnknownName(f"xbn got norm={norm!r}. {nearest(str(norm), NORMS)}")
    if stem not in STEMS:
        raise OptionError(f"xbn got stem={stem!r}. {nearest(str(stem), STEMS)}")
    for option, value in (("position", position), ("every", every), ("groups", groups)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"xbn expects {option} to be a positive integer, got {value!r}.")


RECIPE = Recipe(xbn)
