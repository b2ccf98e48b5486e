"""recipes.bnet: batch norms whose affine map sees its neighbourhood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.recipes.assembly import Recipe, Wish, assemble, look, several
from normkit.conversion.recipes.kernels import check_start, started
from normkit.errors import OptionError, nearest
from normkit.inspection import Site

PLACEMENTS = ("last", "all")


def bnet(
    model: nn.Module,
    placement: str = "last",
    *,
    kernel_size: int = 3,
    start: str = "exact",
    where: Any = None,
    example: Any = None,
    optimizer: Optimizers = None,
    **options: Any,
) -> Plan:
    """The last norm of every block becomes BNET, or with placement="all" every batch norm.

    Paper: Xu et al. 2020. Their code changes the last norm of each bottleneck; stem, other norms
    and shortcuts stay. UBN's comparison changes all. ``start="exact"`` begins as the batch norms
    that were there; "zero" is what their code means to do (a block starts as its shortcut),
    "torch" what the layer alone does; "fan_out" and "dirac" are further readings.

    >>> import torchvision, normkit as nk
    >>> nk.recipes.bnet(torchvision.models.resnet18()).count()
    8
    """
    if placement not in PLACEMENTS:
        raise OptionError(f"bnet got placement={placement!r}. {nearest(placement, PLACEMENTS)}")
    check_start("bnet", start)
    found = look(model, example, "bnet", "bnet")
    blocks = several(found.blocks, found)
    if placement == "last" and not blocks:
        raise OptionError(
            f"bnet changes the last norm of each block, and {found.title} has no blocks with "
            'several norms. Try placement="all".'
        )

    def wish(site: Site) -> Wish | str:
        if placement == "last" and not (site.last_in_block and site.block in blocks):
            return "not the last norm of a block"
        return "bnet", {"kernel_size": kernel_size, **options}

    return assemble(
        model,
        found,
        wish,
        title=f"bnet, {placement}",
        where=where,
        example=example,
        optimizer=optimizer,
        besides=lambda new: started(new, start),
    )


def _untrained(options: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """The kernels start as in the authors' code: blocks as their shortcut.

    With all norms at zero nothing would ever be learned.
    """
    start = "torch" if options.get("placement") == "all" else "zero"
    return {} if "start" in options else {"start": start}


RECIPE = Recipe(bnet, layer="bnet", untrained=_untrained)
