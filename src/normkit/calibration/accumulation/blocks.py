"""Which modules are computed again in the backward, and how their calls are caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from normkit.calibration.accumulation.meeting import Meeting
from normkit.calibration.accumulation.recomputing import join
from normkit.calibration.accumulation.records import Part, Record
from normkit.calibration.accumulation.sharing import party
from normkit.calibration.side_by_side import RandomState, ThreadState
from normkit.errors import NothingToDo, OptionError
from normkit.inspection import Survey


def blocks_of(
    model: nn.Module, found: Survey, recompute: bool | str | Sequence[str]
) -> dict[str, nn.Module]:
    """The modules to compute again, by path: the blocks of the survey, or those of given paths.

    Only modules that hold norms but are none; of modules inside each other the outermost.
    """
    if recompute is False:
        return {}
    if recompute is True:
        paths = list(found.blocks)
    else:
        wanted = [recompute] if isinstance(recompute, str) else list(recompute)
        paths = [p for p, _ in model.named_modules() if any(fnmatchcase(p, w) for w in wanted)]
        if not paths:
            raise NothingToDo(f"recompute={recompute!r} fits no module of the model.")
    norms = {id(m) for site in found for m in site.module.modules()}
    chosen: dict[str, nn.Module] = {}
    for path in sorted(paths, key=lambda p: p.count(".")):
        module = model.get_submodule(path)
        holds = any(id(m) in norms for m in module.modules() if m is not module)
        inside = any(path.startswith(f"{other}.") or other == "" for other in chosen)
        if holds and not inside and id(module) not in norms:
            chosen[path] = module
    return chosen


@contextmanager
def caught(path: str, module: nn.Module, records: dict[Any, Record]) -> Iterator[None]:
    """The forward of a block, for the time of the context: it keeps its inputs only."""
    had = "forward" in vars(module)
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        one = party()
        # without a gradient nothing is kept anyway; in a block that repeats itself all is known
        if not isinstance(one, Meeting) or one.log is not None or not torch.is_grad_enabled():
            return own(*args, **kwargs)
        return _passage(one, path, own, records, args, kwargs)

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if had:
            vars(module)["forward"] = own
        else:
            del vars(module)["forward"]


def _passage(
    one: Meeting,
    path: str,
    own: Callable[..., Any],
    records: dict[Any, Record],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One micro-batch through a block."""
    place = one.place("block", path)
    record = records.setdefault(place, Record(path, own))
    index = one.run.index
    leaves, spec = tree_flatten((args, kwargs))
    part = Part(leaves, spec, RandomState.here(), ThreadState.here())
    record.parts[index] = part
    versions = [t._version for t in part.inputs]
    one.log = record.log
    try:
        with part.around.again(gradients=False, cache=False):
            outputs = own(*args, **kwargs)
    finally:
        one.log = None
    if versions != [t._version for t in part.inputs]:
        raise OptionError(
            f"{path} changes its input in place, so it cannot be computed again. "
            "Try recompute=False, or the paths of other modules."
        )
    flat, shape = tree_flatten(outputs)
    record.outputs[index] = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    tied = iter(one.run.meet(place, None, lambda _: _finish(record, records, place)))
    return tree_unflatten([next(tied) if isinstance(x, Tensor) else x for x in flat], shape)


def _finish(record: Record, records: dict[Any, Record], place: Any) -> list[list[Tensor]]:
    del records[place]
    return join(record)
