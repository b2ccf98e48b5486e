"""recipes.ubn: unified batch normalization everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.recipes.assembly import Recipe, assemble, look
from normkit.conversion.recipes.bnet import check_start, starting_kernels


def ubn(
    model: nn.Module,
    *,
    tau: float = 0.15,
    start: str = "exact",
    where: Any = None,
    example: Any = None,
    optimizer: Optimizers = None,
    **options: Any,
) -> Plan:
    """Every batch norm becomes UBN: in the stem, in all blocks and on their shortcuts.

    Paper: Wang et al. 2024, and the authors' ResNet. ``tau`` is 0.15 for ImageNet and most of
    CIFAR; 0.25 for ResNet-101, VGG and Inception-v4; 0.1 for ResNet-101 on CIFAR-100; 0.025 for
    ResNet-18 on CIFAR-10. ``start="exact"`` begins as the batch norms that were there: for
    trained models. From scratch the authors let the kernels start as "fan_out"; "torch", "dirac"
    and "zero" are the other readings. ``options`` are those of the layer, such as ``preset``.

    >>> import torchvision, normkit as nk
    >>> plan = nk.recipes.ubn(torchvision.models.resnet18())
    >>> plan.count(), plan.exact
    (20, True)
    """
    check_start("ubn", start)
    norms = look(model, example, "ubn", "ubn")
    return assemble(
        model,
        norms,
        lambda site: ("ubn", {"tau": tau, **options}),
        title=f"ubn, tau {tau}",
        where=where,
        example=example,
        optimizer=optimizer,
        besides=lambda new: starting_kernels(new, start),
    )


def _untrained(options: Mapping[str, Any], samples: int) -> dict[str, Any]:
    return {} if "start" in options else {"start": "fan_out"}  # as in the authors' code


RECIPE = Recipe(ubn, layer="ubn", untrained=_untrained)
