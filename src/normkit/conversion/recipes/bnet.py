"""recipes.bnet: batch norms whose affine map sees its neighbourhood; and how kernels start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from normkit.conversion.carry import Wish
from normkit.conversion.edits import SetTensor
from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.recipes.assembly import Recipe, assemble, look, norm_path, several
from normkit.conversion.sources import norm_of
from normkit.errors import OptionError, nearest
from normkit.inspection import Site
from normkit.layers.bnet import KERNEL_STARTS, start_kernel

PLACEMENTS = ("last", "all")
STARTS = ("exact", *KERNEL_STARTS)


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
    norms = look(model, example, "bnet", "bnet")
    blocks = several(norms)
    if placement == "last" and not blocks:
        raise OptionError(
            f"bnet changes the last norm of each block, and {norms.title} has no blocks with "
            'several norms. Try placement="all".'
        )

    def wish(site: Site) -> Wish | str:
        if placement == "last" and not (site.last_in_block and site.block in blocks):
            return "not the last norm of a block"
        return "bnet", {"kernel_size": kernel_size, **options}

    return assemble(
        model,
        norms,
        wish,
        title=f"bnet, {placement}",
        where=where,
        example=example,
        optimizer=optimizer,
        besides=lambda new: starting_kernels(new, start),
    )


def _untrained(options: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """The kernels start as in the authors' code: blocks as their shortcut.

    With all norms at zero nothing would ever be learned.
    """
    start = "torch" if options.get("placement") == "all" else "zero"
    return {} if "start" in options else {"start": start}


RECIPE = Recipe(bnet, layer="bnet", untrained=_untrained)


def check_start(recipe: str, start: str) -> None:
    if start not in STARTS:
        raise OptionError(f"{recipe} got start={start!r}. {nearest(str(start), STARTS)}")


def starting_kernels(new: dict[str, nn.Module], start: str) -> Iterator[SetTensor]:
    """Edits that fill the kernels of new layers; none for an exact start, which they have."""
    if start == "exact":
        return
    for path, module in new.items():
        norm: Any = norm_of(module)
        if norm.weight is None or norm.weight.dim() < 3:
            continue
        kernel, bias = torch.empty_like(norm.weight), torch.empty_like(norm.bias)
        start_kernel(kernel, bias, start, norm.scale_init)
        at = norm_path(path, module)
        yield SetTensor(f"{at}.weight", kernel.detach(), f"{at}: its kernel starts as {start!r}")
        yield SetTensor(f"{at}.bias", bias.detach(), f"{at}: its bias starts as {start!r}")
