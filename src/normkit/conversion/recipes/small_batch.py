"""recipes.small_batch: a pretrained batch-norm network, and batches too small for batch norm."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.conversion.convert import plan_conversion
from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.recipes.assembly import BATCH, look
from normkit.inspection import Site

WITHOUT_IMAGES = (
    "Without images the batch norms are frozen, which keeps the function and needs a small "
    "learning rate. With some unlabelled images, fit=images, they become group norms that train on."
)


def small_batch(
    model: nn.Module,
    fit: Any = None,
    *,
    groups: int | str = 1,
    distill: int = 0,
    where: Any = None,
    example: Any = None,
    optimizer: Optimizers = None,
) -> Plan:
    """For fine-tuning a pretrained network with one to eight images a batch.

    With ``fit``, 64 to 256 images without labels, batch norms become group norms of one group,
    whose scales and shifts are fitted so that the network gives what it gave: see
    ``plan_conversion``. Few groups fit best; ``groups="fit"`` chooses for each layer. There are no
    batch statistics then, so any batch size trains, and the learning rate may be large.

    Without images, batch norms become frozen ones: exact, and safe at small learning rates only.
    To train with statistics from one or two images, and weight standardization, see
    ``micro_batch``.

    >>> import torch, torchvision, normkit as nk
    >>> model = torchvision.models.resnet18().eval()
    >>> plan = nk.recipes.small_batch(model, torch.randn(8, 3, 32, 32))
    >>> plan.count(), plan.fit.images
    (20, 8)
    """
    look(model, example, "small_batch")

    def of_batch(site: Site) -> bool:
        return site.kind in BATCH

    chosen: Any = of_batch if where is None else (where, of_batch)
    if fit is None:
        plan = plan_conversion(model, "frozen_bn", chosen, example=example, optimizer=optimizer)
        plan.notes = (*plan.notes, WITHOUT_IMAGES)
        return plan
    return plan_conversion(
        model,
        "gn",
        chosen,
        example=example,
        optimizer=optimizer,
        fit=fit,
        distill=distill,
        groups=groups,
    )
