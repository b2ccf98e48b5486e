"""Ways to go through the norms of a model: all at once, or one after the other as data flows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from normkit.calibration.feeding import Feed
from normkit.calibration.fingerprint import Fingerprint
from normkit.calibration.gathering import gather, input_of, order_of
from normkit.calibration.lockstep import current, together
from normkit.calibration.measured import Measured
from normkit.errors import OptionError
from normkit.inspection import undisturbed
from normkit.inspection.keepers import Keeper

# a norm that a batch reaches repeatedly: its input depends on its own statistics
REPEATS = 50  # passes at most
SETTLED = 1e-6  # a change of mean or variance, as the normalized output feels it
Write = Callable[[Measured], None]


def layerwise(
    feed: Feed, keepers: Sequence[Keeper], write: Write, until: float | None, print_of: Fingerprint
) -> list[Measured]:
    """One pass: each norm's input is measured as it is with the statistics of now."""
    with undisturbed(feed.model):
        measured = gather(feed, keepers, until, print_of)
    for one in measured:
        if one.tally is not None:
            write(one)
    return measured


def progressive(
    feed: Feed, keepers: Sequence[Keeper], write: Write, until: float | None, print_of: Fingerprint
) -> list[Measured]:
    """A pass a norm, from the input on: each sees what comes through the new statistics below it.

    A pass runs the model only up to the norm, so that all passes together cost about half as
    many forwards as there are norms. The memory is that of one batch. A norm that runs several
    times in one forward sees what comes from itself, so it is measured until that has settled.
    """
    feed.kept()
    with undisturbed(feed.model):
        order, repeated = order_of(feed, keepers)
    measured = {keeper: Measured(keeper) for keeper in keepers}
    for keeper in order:
        stop = None if keeper in repeated else keeper.norm
        for _ in range(REPEATS if keeper in repeated else 1):
            with undisturbed(feed.model):
                (one,) = gather(feed, [keeper], until, print_of, stop)
            if one.tally is None:
                break
            before = keeper.held()
            write(one)
            measured[keeper] = one
            one.settled = keeper not in repeated or _same(before, keeper.held(), keeper.eps)
            if one.settled:
                break
    return list(measured.values())


def side_by_side(
    feed: Feed, keepers: Sequence[Keeper], write: Write, until: float | None, print_of: Fingerprint
) -> list[Measured]:
    """The same in one sweep: all batches run side by side and wait for each other at each norm.

    One forward of each batch in all, but what they hold between norms is in memory together.
    """
    if until is not None:
        raise OptionError("until= looks at one batch after the other, together=True at all.")
    batches = list(feed)
    measured = {keeper: Measured(keeper) for keeper in keepers}
    sizes = [feed.size(batch) for batch in batches]

    def hook_for(keeper: Keeper) -> Any:
        one = measured[keeper]

        def combine(parts: list[Any]) -> list[None]:
            if one.tally is not None:
                raise OptionError(
                    f"{keeper.path} runs several times in one forward, so its input depends on "
                    "its own statistics. Try together=False."
                )
            for x, images in zip(parts, sizes, strict=True):
                one.add(x, images)
                one.images += images
                one.batches += 1
            if one.tally is not None:
                write(one)
            return [None] * len(parts)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            run = current()
            x = input_of(keeper, args, kwargs)
            if run is not None and x is not None:
                run.meet(keeper.path, x, combine)

        return hook

    def job(number: int, batch: Any) -> Callable[[], None]:
        def run() -> None:
            feed.run(batch, number)

        return run

    with ExitStack() as stack:
        for keeper in keepers:
            hook = keeper.norm.register_forward_pre_hook(hook_for(keeper), with_kwargs=True)
            stack.callback(hook.remove)
        with undisturbed(feed.model):
            together([job(number, batch) for number, batch in enumerate(batches, 1)])
    for batch in batches:
        print_of.add(batch, feed.images_of(batch))
    for one in measured.values():
        if one.tally is not None:
            write(one)  # again: leaving the block above has put the buffers back
    return list(measured.values())


def _same(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], eps: float) -> bool:
    """Whether statistics have not moved any more."""
    scale = after[1] + eps
    moved = torch.maximum(
        (after[0] - before[0]).abs() / scale.sqrt(), (after[1] - before[1]).abs() / scale
    )
    return bool((moved <= SETTLED).all())
