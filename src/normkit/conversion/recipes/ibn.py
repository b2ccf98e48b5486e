"""recipes.ibn: IBN-a, instance norm for half of the channels in early blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from normkit.conversion.carry import Wish
from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.recipes.assembly import Recipe, assemble, look, several
from normkit.errors import OptionError
from normkit.inspection import Site


def ibn(
    model: nn.Module,
    *,
    ratio: float = 0.5,
    stages: Sequence[int] | None = None,
    where: Any = None,
    example: Any = None,
    optimizer: Optimizers = None,
    **options: Any,
) -> Plan:
    """The first norm of each block becomes IBN in all stages but the last: stages 1 to 3 of four.

    A stage is a list of blocks, such as layer1 of a ResNet; ``stages`` chooses others, from 1.
    Stem, other norms and shortcuts stay. Where a model keeps all blocks in one list, ``where``
    tells which of them to take, and the first norm of each is changed.

    Paper: Pan et al. 2018, IBN-a. The batch part is carried exactly, the instance part is not:
    train on.

    >>> import torchvision, normkit as nk
    >>> nk.recipes.ibn(torchvision.models.resnet50()).count()
    13
    """
    norms = look(model, example, "ibn", "ibn")
    blocks = list(several(norms))
    if not blocks:
        raise OptionError(
            f"ibn changes the first norm of blocks, and {norms.title} has no blocks with several "
            'norms. Try normkit.convert(model, "ibn", where=...).'
        )
    chosen = set(blocks if where is not None and stages is None else _in_stages(blocks, stages))

    def wish(site: Site) -> Wish | str:
        if site.block not in chosen or site.position != 1:
            early = site.block in chosen
            return "not the first norm of its block" if early else "not in an early stage"
        return "ibn", {"ratio": ratio, **options}

    return assemble(
        model, norms, wish, title="ibn", where=where, example=example, optimizer=optimizer
    )


def _in_stages(blocks: list[str], stages: Sequence[int] | None) -> list[str]:
    """The blocks of these stages, of all but the last by default."""
    homes = [block.rpartition(".")[0] for block in blocks]
    lists = list(dict.fromkeys(homes))
    if len(lists) < 2:
        raise OptionError(
            f"ibn cannot tell the stages of the model: its {len(blocks)} blocks are all in "
            f"{lists[0] or 'the model itself'!r}. Try where=[...] with the paths of early blocks."
        )
    if stages is None:
        stages = range(1, len(lists))
    if wrong := [stage for stage in stages if stage not in range(1, len(lists) + 1)]:
        raise OptionError(
            f"ibn expects stages between 1 and {len(lists)} ({', '.join(lists)}), got {wrong}."
        )
    wanted = {lists[stage - 1] for stage in stages}
    return [block for block, home in zip(blocks, homes, strict=True) if home in wanted]


RECIPE = Recipe(ibn, layer="ibn")
