"""Measuring what norms get as input, while batches run through a model in eval mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any

from torch import Tensor, nn

from normkit.calibration.feeding import Feed
from normkit.calibration.fingerprint import Fingerprint
from normkit.calibration.measured import Measured
from normkit.errors import NonFiniteWarning
from normkit.inspection.keepers import Keeper


class Reached(BaseException):
    """All that was wanted of a forward has happened. No Exception: models catch those."""


def input_of(keeper: Keeper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that a norm is called with, if it fits."""
    x = next((v for v in chain(args, kwargs.values()) if isinstance(v, Tensor)), None)
    return x if x is not None and keeper.fits(x) else None


@contextmanager
def watching(measured: Sequence[Measured], images: list[int]) -> Iterator[None]:
    """Hooks that let the inputs of norms enter; ``images`` holds the size of the batch."""

    def hook_for(one: Measured) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = input_of(one.keeper, args, kwargs)
            if x is not None:
                one.add(x, images[0])

        return hook

    with ExitStack() as stack:
        for one in measured:
            hook = one.keeper.norm.register_forward_pre_hook(hook_for(one), with_kwargs=True)
            stack.callback(hook.remove)
        yield


def gather(
    feed: Feed,
    keepers: Sequence[Keeper],
    until: float | None = None,
    print_of: Fingerprint | None = None,
    stop_after: nn.Module | None = None,
) -> list[Measured]:
    """The statistics of the inputs of norms, over all batches or until they are sure enough.

    The model runs as it is; the caller sees to its mode. ``stop_after`` ends each forward when
    that module has got its input: what comes later is not needed.
    """
    measured = [Measured(keeper) for keeper in keepers]
    size = [0]
    with watching(measured, size), _ending(stop_after):
        for number, batch in enumerate(feed, 1):
            size[0] = feed.size(batch)
            with suppress(Reached):
                feed.run(batch, number)
            for one in measured:
                one.images += size[0]
                one.batches += 1
            if print_of is not None and number > print_of.batches:  # a later pass is no new data
                print_of.add(batch, feed.images_of(batch))
            reached = [one for one in measured if one.tally is not None]
            if until is not None and reached and all(one.is_sure(until) for one in reached):
                break
    for one in measured:
        _tell(one)
    return measured


@contextmanager
def _ending(module: nn.Module | None) -> Iterator[None]:
    """End each forward where a module begins; its other hooks have run by then."""
    if module is None:
        yield
        return

    def hook(*_: Any) -> None:
        raise Reached

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _tell(one: Measured) -> None:
    if one.left_out:
        warnings.warn(
            f"{one.keeper.path}: {one.left_out} batch(es) held values that are not finite and were "
            "left out of the statistics. Look for overflow, or for broken data.",
            NonFiniteWarning,
            stacklevel=2,
        )


def order_of(feed: Feed, keepers: Sequence[Keeper]) -> tuple[list[Keeper], set[Keeper]]:
    """The norms in the order in which a batch reaches them, and those that it reaches repeatedly.

    Norms that the first batch does not reach are not among them.
    """
    order: list[Keeper] = []
    repeated: set[Keeper] = set()

    def hook_for(keeper: Keeper) -> Any:
        def hook(*_: Any) -> None:
            if keeper in order:
                repeated.add(keeper)
            else:
                order.append(keeper)

        return hook

    with ExitStack() as stack:
        for keeper in keepers:
            stack.callback(keeper.norm.register_forward_pre_hook(hook_for(keeper)).remove)
        for batch in feed:
            feed.run(batch, 1)
            break
    return order, repeated
