"""Heads that several levels of a pyramid share: batch norms with one set of statistics for all.

A head such as RetinaNet's is called once for each level. A batch norm in it then normalizes every
level by itself in training, and its running average takes five steps a batch, of which the last
one, of the smallest map, weighs most; in eval mode one set of statistics serves all levels. Here
the levels go through the head side by side, and at a batch norm all positions of an image, of all
levels, stand in one row: its statistics are those of all levels, every value counts once, and the
running average takes one step a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conversion.edits import refuse_unchangeable
from normkit.conversion.forward_probe import check_example, probes
from normkit.errors import NothingToDo, OptionError, ShapeError
from normkit.inspection import kind_of, survey, undisturbed
from normkit.inspection.foreign import OF_BATCHES
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

SHOWN = 3


def pool_levels(model: nn.Module, example: Any = None) -> list[str]:
    """Let batch norms in heads that several levels share pool their statistics over the levels.

    ``example`` is an input of the model, as of ``convert``. With it the model is run once, to find
    every ``nn.Sequential`` with batch norms that is called for map after map of a list (or mapping)
    that the module around it was given, as in the heads of torchvision's RetinaNet and FCOS; these
    become ``PooledLevels``, in place. Parameters, buffers and their names stay, and so does what
    the model gives in eval mode. Norms without batch statistics, such as gn, go on to see one level
    at a time. Returns the paths; ``unpool_levels`` takes it back.

    >>> import torch, normkit as nk
    >>> from torch import nn
    >>> class Head(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nk.BN(4), nn.ReLU())
    ...     def forward(self, maps: list[torch.Tensor]):
    ...         return [self.conv(each) for each in maps]
    >>> head, maps = Head(), [torch.randn(2, 4, side, side) for side in (16, 8, 4)]
    >>> nk.pool_levels(head, (maps,))
    ['conv']
    >>> y = head(maps)
    >>> head.conv[1].num_batches_tracked.item()  # one batch, in three levels
    1
    """
    refuse_unchangeable(model)
    if example is not None:
        check_example(example)
    calls = _shared_calls(model, example)
    paths = {module: path for path, module in model.named_modules()}
    towers = {tower: parent for tower, parent in calls.items() if any(_pooling(tower))}
    if not towers:
        raise NothingToDo(_nothing(model, calls))
    for tower in towers:
        _check(tower, paths[tower])
    for tower, parent in towers.items():
        tower.__class__ = PooledLevels
        hook = _LevelsHook(tower)
        parent.register_forward_pre_hook(hook, with_kwargs=True)
        parent.register_forward_hook(hook.forget, always_call=True)
    return [paths[tower] for tower in towers]


def unpool_levels(model: nn.Module) -> list[str]:
    """Take ``pool_levels`` back; returns the paths of what had become ``PooledLevels`` by it."""
    paths = []
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _LevelsHook):
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
        for number, after in list(module._forward_hooks.items()):
            told = getattr(after, "__self__", None)
            if isinstance(told, _LevelsHook):
                del module._forward_hooks[number]
                module._forward_hooks_always_called.pop(number, None)
                told.tower.__class__ = nn.Sequential
                paths += [path for path, each in model.named_modules() if each is told.tower]
    if not paths:
        raise NothingToDo("unpool_levels found nothing that pool_levels has changed.")
    return paths


class PooledLevels(nn.Sequential):
    """An ``nn.Sequential`` whose batch norms pool over the levels of a pyramid.

    Given a list of maps (N, C, H, W) of several sizes it gives a list: every module is called for
    each map, but a batch norm once, with all maps of an image in one row (N, C, positions, 1). A
    map alone goes through as in nn.Sequential. ``pool_levels`` makes it of what a model has.

    >>> import torch, normkit as nk
    >>> head = nk.PooledLevels(torch.nn.Conv2d(3, 8, 3, padding=1), nk.BN(8), torch.nn.ReLU())
    >>> [tuple(y.shape) for y in head([torch.randn(2, 3, 8, 8), torch.randn(2, 3, 4, 4)])]
    [(2, 8, 8, 8), (2, 8, 4, 4)]
    """

    # what pool_levels has told of: the maps of the call that runs, and what becomes of them
    levels: Sequence[Tensor] = ()
    done: Mapping[int, Tensor] | None = None

    def forward(self, input: Tensor | Sequence[Tensor]) -> Any:
        if not isinstance(input, Tensor):
            return _through(self, list(input))
        if all(input is not level for level in self.levels):
            return super().forward(input)
        if self.done is None:
            maps = _through(self, list(self.levels))
            self.done = {id(level): y for level, y in zip(self.levels, maps, strict=True)}
        return self.done[id(input)]


class _LevelsHook:
    """Tells a tower which maps it will be given one by one, and that it is over."""

    def __init__(self, tower: nn.Module) -> None:
        self.tower: Any = tower

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tower.levels, self.tower.done = _maps_in((*args, *kwargs.values())), None

    def forget(self, module: nn.Module, args: Any, output: Any) -> None:
        self.tower.levels, self.tower.done = (), None


def _through(module: nn.Module, maps: list[Tensor]) -> list[Tensor]:
    """All maps through a module, side by side."""
    if _is_plain_sequence(module):
        for child in module.children():
            maps = _through(child, maps)
        return maps
    if not _pools(module):
        return [module(each) for each in maps]
    samples = {each.shape[0] for each in maps}
    if len(samples) > 1:
        raise ShapeError(
            f"The levels have {', '.join(map(str, sorted(samples)))} samples, expected the same "
            "images in each."
        )
    rows = [each.flatten(2) for each in maps]  # (N, C, H·W)
    y = module(torch.cat(rows, 2).unsqueeze(3)).squeeze(3)
    parts = y.split([row.shape[2] for row in rows], 2)
    # copies: an activation in place may follow, which one map of several in a tensor must not bear
    return [p.unflatten(2, x.shape[2:]).clone() for p, x in zip(parts, maps, strict=True)]


def _is_plain_sequence(module: nn.Module) -> bool:
    """Whether it does nothing but call its children, one after the other."""
    plain = (nn.Sequential.forward, PooledLevels.forward)
    return isinstance(module, nn.Sequential) and type(module).forward in plain


def _pools(module: nn.Module) -> bool:
    norm = module.norm if isinstance(module, NormAct) else module
    if isinstance(norm, Normalizer):
        return norm.pools_samples()
    return kind_of(norm) in OF_BATCHES


def _pooling(tower: nn.Module) -> Iterator[nn.Module]:
    """The batch norms in it that maps can meet at."""
    for child in tower.children():
        if _pools(child):
            yield child
        elif _is_plain_sequence(child):
            yield from _pooling(child)


def _check(tower: nn.Module, path: str) -> None:
    if isinstance(tower, PooledLevels):
        raise OptionError(f"{path} pools over its levels already.")
    for norm in _pooling(tower):
        kernel = next((m for m in norm.modules() if hasattr(m, "dims")), None)
        if kernel is not None:
            raise OptionError(
                f"{path}: {type(kernel).__name__} looks at neighbouring positions, which levels "
                "in one row do not have. Try bn or bcn in the head."
            )


# -------------------------------------------------------------------- who is called for each level


def _shared_calls(model: nn.Module, example: Any) -> dict[nn.Module, nn.Module]:
    """Sequences that are called for map after map of a list, and the module that got the list."""
    stack: list[tuple[nn.Module, Sequence[Tensor]]] = []
    counts: dict[tuple[nn.Module, nn.Module], int] = {}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if stack and _is_plain_sequence(module) and len(args) == 1:
            parent, maps = stack[-1]
            if any(args[0] is each for each in maps):
                counts[module, parent] = counts.get((module, parent), 0) + 1
        stack.append((module, _maps_in((*args, *kwargs.values()))))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    for probe in probes(model, example):
        if probe.example is None:
            raise OptionError(f"pool_levels has to run the model, but {probe.text}.")
        counts.clear()
        stack.clear()
        try:
            with ExitStack() as hooks, undisturbed(model):
                for module in model.modules():
                    before = module.register_forward_pre_hook(begin, with_kwargs=True)
                    hooks.callback(before.remove)
                    hooks.callback(module.register_forward_hook(end, always_call=True).remove)
                probe.run(model)
        except Exception as error:
            if probe.given:
                raise OptionError(
                    f"The model fails on {probe.text}: {type(error).__name__}: {error}. Nothing "
                    "was changed."
                ) from error
            continue
        return {module: parent for (module, parent), n in counts.items() if n > 1}
    raise OptionError(
        "pool_levels has to run the model, and found no input that it takes. Give one: example=."
    )


def _maps_in(arguments: Sequence[Any]) -> Sequence[Tensor]:
    """The maps of the first list, tuple or mapping of two and more that is an argument."""
    for argument in arguments:
        values = list(argument.values()) if isinstance(argument, Mapping) else argument
        several = isinstance(values, list | tuple) and len(values) > 1
        if several and all(isinstance(each, Tensor) and each.dim() == 4 for each in values):
            return list(values)
    return ()


def _nothing(model: nn.Module, calls: Mapping[nn.Module, nn.Module]) -> str:
    sites = {site.path: site for site in survey(model)}
    shared = ", ".join(path for path, m in model.named_modules() if m in calls)
    if shared:
        return f"{shared} is called for several maps, but has no batch norm that they could share."
    paths = ", ".join(list(sites)[-SHOWN:]) or "none"
    return (
        "pool_levels found no nn.Sequential with batch norms that is called for map after map of a "
        f"list that the module around it was given (the last norms are {paths}). In a head of "
        "your own, call nk.PooledLevels with the list of maps."
    )
