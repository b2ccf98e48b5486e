"""recipes.bgn: batch group normalization, with groups that suit the batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from normkit.conversion.carry import Wish
from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.recipes.assembly import Recipe, assemble, look
from normkit.errors import OptionError
from normkit.inspection import Site, Survey, call_model, undisturbed
from normkit.inspection.run import Listener, watch_inputs

TABLE = {2: 1, 4: 2, 8: 16, 16: 64, 32: 128, 64: 256, 128: 512}  # images a worker: groups


def groups_for(batch_size: int) -> int:
    """The number of groups for so many images a worker: the paper's table, interpolated.

    Between the table's batch sizes the logarithm is interpolated and rounded down to a power of
    two, which gives the 256 groups that the paper takes for 96 images; beyond them the ends hold.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"bgn expects batch_size to be a positive integer, got {batch_size!r}.")
    if batch_size in TABLE:
        return TABLE[batch_size]
    for (low, few), (high, many) in pairwise(TABLE.items()):
        if low < batch_size < high:
            share = math.log2(batch_size / low) / math.log2(high / low)
            power: int = math.floor(math.log2(few) + share * math.log2(many / few))
            return 1 << power
    return TABLE[2] if batch_size < 2 else TABLE[128]


def bgn(
    model: nn.Module,
    batch_size: int | None = None,
    *,
    groups: int | None = None,
    where: Any = None,
    example: Any = None,
    optimizer: Optimizers = None,
    **options: Any,
) -> Plan:
    """Every batch norm becomes BGN with the number of groups that suits the images a worker sees.

    The groups are the paper's for ResNet-50 on ImageNet: 1 for 2 images, 2 for 4, 16 for 8, 64
    for 16, 128 for 32, 256 for 64, 512 for 128; between those see ``recipes.groups_for``. Or
    give ``groups``. A layer that has fewer values a sample gets as many groups as it has
    values: known of linear layers, and of all if an ``example`` of the size of the training
    images is given.

    Paper: Zhou et al. 2020. The batch size is that of one worker: statistics are not
    synchronised. Statistics of trained batch norms are pooled, so the function changes.

    >>> import torchvision, normkit as nk
    >>> plan = nk.recipes.bgn(torchvision.models.resnet18(), batch_size=8)
    >>> plan.steps[0].becomes
    'BGN(64, groups=16)'
    """
    if (batch_size is None) == (groups is None):
        raise OptionError("bgn expects either batch_size, the images a worker sees, or groups.")
    if groups is None:
        assert batch_size is not None
        groups = groups_for(batch_size)
    norms = look(model, example, "bgn", "bgn")
    sizes = _sizes(model, norms, example)

    def wish(site: Site) -> Wish:
        return "bgn", {"groups": min(groups, sizes.get(site.path, groups)), **options}

    return assemble(
        model,
        norms,
        wish,
        title=f"bgn, {groups} groups",
        where=where,
        example=example,
        optimizer=optimizer,
    )


def _sizes(model: nn.Module, norms: Survey, example: Any) -> dict[str, int]:
    """How many values a sample has at each norm, where that is known."""
    if example is None or example is False:
        return {site.path: site.channels for site in norms if site.channels and _flat(model, site)}
    sizes: dict[str, int] = {}

    def listener(path: str) -> Listener:
        def note(x: Tensor) -> None:
            sizes[path] = min(x[0].numel(), sizes.get(path, x[0].numel()))

        return note

    listeners = {site.module: listener(site.path) for site in norms}
    with undisturbed(model), watch_inputs(listeners):
        call_model(model, example)
    return sizes


def _flat(model: nn.Module, site: Site) -> bool:
    return site.fed_by is not None and isinstance(model.get_submodule(site.fed_by), nn.Linear)


def _untrained(options: Mapping[str, Any], samples: int) -> dict[str, Any]:
    return {} if options.keys() & {"groups", "batch_size"} else {"batch_size": samples}


RECIPE = Recipe(bgn, layer="bgn", untrained=_untrained)
