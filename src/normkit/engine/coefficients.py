"""A layer's coefficients and their gradient as functions of tables, for whoever writes them down.

``coefficients`` is pure, so the operations that it does on tables of one size can be listed once
and then done by other means: ``tracing`` has Inductor make kernels of them for a GPU, ``cpu/tape``
makes a program for a CPU. Both list these two functions. The first writes new statistics, too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.layout import Batch, Channels, Layout
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult

_OWN = {"_factory", "_warned", "_seen", "_traced", "_replays", "_norm_replays", "_heard_replays"}
_OWN |= {"_unrecorded", "_record_obstacle", "_options_set", "_not_remade", "_tapes"}
_OWN |= {"_own_here", "own_calls"}
_WATCHERS = {"listeners", "exchange", "_lookers"}
_NOT_OPTIONS = frozenset(nn.Module().__dict__) | _OWN | _WATCHERS
_FIXED = {"normkit", "torch", "builtins"}  # packages whose classes stay as they are
_PLAIN = (type(None), bool, int, float, str)


class Untraceable(Exception):
    """What keeps a layer's coefficients from being written down."""


def kind_of(layer: Any, state: LayerState) -> tuple[Any, ...]:
    """All that the function of a layer depends on, beside its tensors and their sizes."""
    if type(layer).observe is not _base_of(layer, "observe"):
        raise Untraceable("it looks at its input beside the moments")
    if layer._modules:
        raise Untraceable("it is made of several modules")
    if state.domain is not None or getattr(layer, "domains", None) is not None:
        raise Untraceable("it has domains")
    options = []
    for name, value in layer.__dict__.items():
        if name in _NOT_OPTIONS:
            continue
        if not _is_plain(value):
            raise Untraceable(f"its attribute {name} is no plain value")
        options.append((name, repr(value)))  # 1, 1.0 and True are equal, but not the same
    tensors = [
        (name, t.shape, t.dtype, t.requires_grad)
        for table in (layer._parameters, layer._buffers)
        for name, t in table.items()
        if t is not None
    ]
    return type(layer), _contents(type(layer)), tuple(options), tuple(tensors)


def _contents(cls: type) -> tuple[Any, ...]:
    """What classes of others hold now: a notebook may give them another method, or number."""
    found: list[Any] = []
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in _FIXED:
            for name, value in vars(base).items():
                if isinstance(value, staticmethod | classmethod):
                    value = value.__func__
                value = value.fget if isinstance(value, property) else value
                if isinstance(value, FunctionType):
                    defaults = repr(value.__defaults__), repr(value.__kwdefaults__)
                    found.append((name, value, value.__code__, defaults))
                elif _is_plain(value):
                    found.append((name, repr(value)))
    return tuple(found)


def as_it_was(layer: Any) -> Any:
    """The layer with its options of now, whatever they become, and with its own tensors. It does
    not keep the layer alive, nor those who watch it."""
    then = object.__new__(type(layer))
    not_kept = {"_traced", "_replays", "_norm_replays", "_heard_replays", *_WATCHERS}
    kept = {n: v for n, v in layer.__dict__.items() if n not in not_kept and "_hooks" not in n}
    then.__dict__.update(nn.Module().__dict__ | kept, listeners=(), exchange=None)
    return then


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _PLAIN)


def _base_of(layer: Any, name: str) -> Any:
    """The method of the class that is last in the order to have it."""
    return [vars(c)[name] for c in type(layer).__mro__ if name in vars(c)][-1]


class _Ending(torch.autograd.Function):
    """A number whose gradient is that of a table: torch, given gradients, imports sympy first."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return table.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *one: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


class _Reading(dict[str, Any]):
    """Statistics that remember which of them were asked for."""

    def __init__(self, tables: dict[str, Any]) -> None:
        super().__init__(tables)
        self.asked: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.asked[name] = None
        return super().__getitem__(name)


class TableFunctions:
    """Forward and backward of one layer's coefficients, for tables (rows, columns).

    What the forward makes is one flat table for the passes and the backward: scale, shift and
    center, the moments, then what the map read of the layer's statistics, which may have changed
    before the backward comes. Once both are written down the layer is ``let_go``.
    """

    # what is in force while the layer's own function runs
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(self, layer: Any, layout: Layout, state: LayerState, dtype: torch.dtype) -> None:
        if not isinstance(layout, Batch | Channels) or getattr(layout, "strips", 1) > 1:
            raise Untraceable("its cells are not whole channels")
        self.layer: Any = layer
        self.state: Any = state
        self.dtype = dtype
        self.size = layout.rows, layout.columns
        self.period = layout.rows * layout.columns
        self.begin = 5 * self.period  # of what was read, in the table of the forward
        self.parameters = [n for n, p in layer._parameters.items() if p is not None]
        self.buffers = [n for n, b in state.statistics.items() if b is not None]
        self.seen: dict[str, tuple[torch.Size, torch.dtype]] = {}  # once it is known
        self.unused: set[str] = set()  # parameters that get no gradient, not one of zero

    def let_go(self) -> None:
        """Keep neither the layer nor its statistics alive any longer: the functions are no more."""
        self.layer = self.state = None

    def tensors(self, layer: Any, state: LayerState) -> list[Tensor]:
        """Parameters and statistics of a layer of this kind, in the order of the functions."""
        kept = state.statistics
        return [
            *(layer._parameters[name] for name in self.parameters),
            *(kept[name] for name in self.buffers),
        ]

    def read_statistics(self, moments: Sequence[Tensor], own: Sequence[Tensor], count: Any) -> None:
        """Which statistics the map is made of: the layer asks for them in a repeated forward."""
        known = len(self.parameters)
        statistics = _Reading(self._named(own[known:]))
        with torch.no_grad():
            self._computed(moments, own[:known], statistics, True, count)
        for name in statistics.asked:
            table = dict.__getitem__(statistics, name)
            if torch.promote_types(table.dtype, self.dtype) != self.dtype:
                raise Untraceable(f"its buffer {name} is of {table.dtype}")
            self.seen[name] = table.shape, table.dtype

    def forward(
        self, join: Callable[[list[Tensor]], Any], count: Any, moments: Tensor, *tensors: Tensor
    ) -> tuple[Any, Tensor | None]:
        """What ``join`` makes of the parts of the table, from moments (2, rows · columns); then
        new statistics are written. Second, whether the batch has entered them, if there are any."""
        own = len(self.parameters)
        given = moments.view(2, *self.size).unbind()
        statistics = self._named(tensors[own:])
        layer, result = self._computed(given, tensors[:own], statistics, self.state.again, count)
        zero = torch.zeros_like(result.map.scale)
        parts = [zero if t is None else t for t in result.map]
        parts += [*given, *(statistics[name].to(self.dtype) for name in self.seen)]
        made = join(parts)
        if result.update is None or self.state.again:
            return made, None
        layer._write(result.update)
        return made, result.update.finite

    def backward(
        self, absent: Sequence[Tensor], count: Any, sums: Tensor, tables: Tensor, *given: Tensor
    ) -> list[Tensor]:
        """Constant and slope of dx and the gradients of the parameters but ``unused`` ones, from
        Σ g·(x − center) and Σ g. ``absent`` stands for statistics of which nothing was read."""
        size, period = self.size, self.period
        cut = [tables[i * period : (i + 1) * period].view(size) for i in range(5)]
        wanted = [t.detach().requires_grad_() for t in (*cut[3:], *given)]
        da, db = sums.view(2, *size).unbind()
        with torch.enable_grad():
            seen = {**self._named([None] * len(self.buffers)), **self.statistics(tables)}
            there = dict(zip(self.buffers, absent, strict=True))
            known = {n: there[n] if t is None and n in there else t for n, t in seen.items()}
            _, result = self._computed(wanted[:2], wanted[2:], known, True, count)
            outer = da, db, -cut[0] * db
            ends = [
                _Ending.apply(table, grad)
                for table, grad in zip(result.map, outer, strict=True)
                if table is not None and table.requires_grad
            ]
            found = torch.autograd.grad(ends, wanted, allow_unused=True)
        named = dict(zip(self.parameters, found[2:], strict=True))
        self.unused = {name for name, grad in named.items() if grad is None}
        dm, dv = (torch.zeros_like(cut[0]) if g is None else g for g in found[:2])
        slope = 2 * dv / count
        constant = dm / count - (cut[3] - cut[2]) * slope
        return [t.detach() for t in (constant, slope, *named.values()) if t is not None]

    def kept(self) -> int:
        """Entries of what was read, in the table of the forward."""
        return sum(shape.numel() for shape, _ in self.seen.values())

    def statistics(self, tables: Tensor) -> dict[str, Tensor]:
        """What the map read of the layer's statistics, as it was."""
        result, at = {}, self.begin
        for name, (shape, dtype) in self.seen.items():
            size = shape.numel()
            result[name] = tables[at : at + size].view(shape).to(dtype)
            at += size
        return result

    def _named(self, buffers: Sequence[Any]) -> dict[str, Any]:
        nothing = dict.fromkeys(self.state.statistics)
        return {**nothing, **dict(zip(self.buffers, buffers, strict=True))}

    def _computed(
        self,
        moments: Sequence[Tensor],
        parameters: Sequence[Tensor],
        statistics: dict[str, Any],
        again: bool,
        count: Any,
    ) -> tuple[Any, MapResult]:
        """The layer's own function, of a layer that has these tensors in place of its own."""
        layer = object.__new__(type(self.layer))
        layer.__dict__.update(self.layer.__dict__)
        own = dict(self.layer._parameters)
        own.update(zip(self.parameters, parameters, strict=True))
        layer.__dict__.update(_parameters=own, _buffers=dict(statistics), _replays=None)
        state = LayerState(self.state.training, statistics, again)
        mean, var = moments
        before, drawn = dict(layer.__dict__), _random_states()
        with self.watch():
            result = layer.compute(Moments(mean, var, count), state)
        for name, value in layer.__dict__.items():
            if name not in _OWN and (name not in before or before[name] is not value):
                raise Untraceable(f"it sets its attribute {name}")
        if drawn != _random_states():
            raise Untraceable("it draws random numbers")
        if result.gate is not None:
            raise Untraceable("its gates are kept")
        map = result.map.each(lambda table: table.expand(self.size))
        return layer, result._replace(map=map)


def _random_states() -> tuple[Any, ...]:
    """Of generators whose numbers a list of torch's operations would repeat for ever."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, key, place, *_ = numpy.random.get_state()
    return random.getstate(), key.tobytes(), place
