"""recipes.micro_batch: weight standardization with batch-channel or group normalization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from normkit.conversion.carry import Wish
from normkit.conversion.edits import Edit, SetTensor
from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.recipes.assembly import Recipe, assemble, look, norm_path
from normkit.conversion.standardize import refuse_shared, standardizable, standardizing
from normkit.errors import OptionError, UnknownName, nearest
from normkit.inspection import Site, select
from normkit.inspection.flow import CONVOLUTIONS

NORMS = ("bcn", "gn")
FOLLOW = (
    "bcn moves its estimates at the learning rate: call normkit.follow_learning_rate(model, "
    "optimizer) before training."
)


def micro_batch(
    model: nn.Module,
    norm: str = "bcn",
    *,
    groups: int | None = None,
    update_rate: float | None = None,
    micro: bool = True,
    variant: str = "paper",
    zero_last: bool = False,
    where: Any = None,
    example: Any = None,
    optimizer: Optimizers = None,
    **options: Any,
) -> Plan:
    """Batch norms become BCN or GN, and the convolutions that feed a norm are standardized.

    For one or a few images a worker. Standardized are all convolutions before a norm, stem and
    shortcuts included; never the classifier, convolutions that predict, those with one weight per
    output channel, or what is standardized already. ``variant`` is the form of ws, see ``WS``.
    ``groups`` is 32 by default, or a quarter of the channels where they are few.

    BCN follows the learning rate: after ``apply`` call
    ``normkit.follow_learning_rate(model, optimizer)``, or give a fixed ``update_rate``.
    ``micro=False`` is BCN for large batches. ``zero_last`` lets the last norm of each block start
    at zero, as the authors' ResNets do from scratch: of BCN the scale of its groups.

    Paper: Qiao et al. 2019 (ws-bcn). Trained weights are carried, but standardizing them changes
    the function: train on.

    >>> import torchvision, normkit as nk
    >>> plan = nk.recipes.micro_batch(torchvision.models.resnet18())
    >>> plan.count(), sum(type(edit).__name__ == "Standardize" for edit in plan.edits)
    (20, 20)
    """
    if norm not in NORMS:
        raise UnknownName(f"micro_batch got norm={norm!r}. {nearest(str(norm), NORMS)}")
    if update_rate is not None and (norm != "bcn" or not micro):
        raise OptionError("micro_batch expects update_rate with norm='bcn' and micro=True only.")
    if update_rate is not None and not 0 < update_rate <= 1:
        raise OptionError(
            f"micro_batch expects update_rate above 0 and up to 1, got {update_rate}."
        )
    wanted: dict[str, Any] = {**options} if groups is None else {"groups": groups, **options}
    if norm == "bcn" and micro:
        wanted = {"micro": True, "update_rate": update_rate, **wanted}
    norms = look(model, example, "micro_batch", norm)

    def wish(site: Site) -> Wish:
        return norm, wanted

    def besides(new: dict[str, nn.Module]) -> Iterator[Edit]:
        yield from _standardized(model, select(norms, where), variant)
        for site in norms:
            if zero_last and site.last_in_block and site.path in new:
                name = "group_weight" if norm == "bcn" else "weight"
                at = f"{norm_path(site.path, new[site.path])}.{name}"
                yield SetTensor(at, 0.0, f"{at} starts at 0")

    return assemble(
        model,
        norms,
        wish,
        title=f"micro_batch, ws and {norm}",
        where=where,
        example=example,
        optimizer=optimizer,
        besides=besides,
        notes=[FOLLOW] if norm == "bcn" and micro and update_rate is None else [],
    )


def _standardized(model: nn.Module, sites: tuple[Site, ...], variant: str) -> list[Edit]:
    """The convolutions that feed these norms, but for those that cannot be standardized."""
    paths = dict.fromkeys(site.fed_by for site in sites if site.fed_by is not None)
    layers = {path: model.get_submodule(path) for path in paths}
    wide = {p: m for p, m in layers.items() if isinstance(m, CONVOLUTIONS) and standardizable(m)}
    refuse_shared(model, wide)
    return standardizing(wide, "ws", variant=variant)


RECIPE = Recipe(micro_batch)
