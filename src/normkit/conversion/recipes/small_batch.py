"""recipes.small_batch: a pretrained batch-norm network, and batches too small for batch norm."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.conversion.convert import plan_conversion
from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.recipes.assembly import BATCH, look
from normkit.inspection import Site

# What was measured stands in docs/fitted-conversion.md.
FROZEN = (
    "The batch norms are frozen, which keeps the function and was not behind fitted group norms in "
    "ten of eleven comparisons at 1 to 8 images a batch; it needs a small learning rate. Where "
    "batch norm has to go, give some unlabelled images, fit=images: they become group norms that "
    "are fitted and train on."
)
FITTED = (
    "Frozen batch norms, small_batch(model) without images, were as good or better in what was "
    "measured at 1 to 8 images a batch, by 0 to 6 points at 2: take group norms where batch norm "
    "has to go."
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

    Without images, batch norms become frozen ones: exact, and, fine-tuned with a small learning
    rate, not behind fitted group norms in ten of eleven comparisons (EfficientNet-Lite0, four
    domains of PACS).

    With ``fit``, 64 to 256 images without labels, batch norms become group norms of one group,
    whose scales and shifts are fitted so that the network gives what it gave: see
    ``plan_conversion``. Few groups fit best; ``groups="fit"`` chooses for each layer. Choose it
    where batch norm has to go or its statistics should follow the data: it came within 0 to 6
    points of frozen batch norms at batch 2, within 3.4 at batch 8, where it was ahead of them at
    a learning rate of 1e-3; batch norms that train on were 16 to 23 and 2 to 5 points behind it
    (an older version of the fit, docs/fitted-conversion.md).
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
        plan.notes = (*plan.notes, FROZEN)
        return plan
    plan = plan_conversion(
        model,
        "gn",
        chosen,
        example=example,
        optimizer=optimizer,
        fit=fit,
        distill=distill,
        groups=groups,
    )
    plan.notes = (*plan.notes, FITTED)
    return plan
