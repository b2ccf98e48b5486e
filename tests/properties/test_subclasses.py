"""A method of the map that a subclass overrides is asked on every path: no kernel goes past it."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

import normkit as nk
from cases import CHANNELS, build, every, label
from normkit.layers.base import Normalizer

SHAPE = (6, CHANNELS, 6, 6)
# dyt has no moments, and gw more than moments: their ``normalize`` is all there is
CASES = [case for case in every() if case[0] not in ("dyt", "gw")]


@pytest.fixture(autouse=True)
def _loops() -> None:
    nk.build_extension()


def methods_of_the_map(layer: Normalizer, x: Tensor) -> set[str]:
    """The layer's own methods that its map and new statistics are made by."""
    own = {
        f.__code__: name
        for base in type(layer).__mro__
        if base.__module__.startswith("normkit.layers")
        for name, f in vars(base).items()
        if isinstance(f, FunctionType)
    }
    seen: set[str] = set()

    def look(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in own and frame.f_locals.get("self") is layer:
            seen.add(own[frame.f_code])

    with nk.use_backend("torch"):
        sys.setprofile(look)
        try:
            y, result = layer.mapped(x, layer.state())
            layer.write(result.update)
        finally:
            sys.setprofile(None)
    assert y.shape == x.shape
    return seen - {"mapped", "_heard"}


def counting(layer: Normalizer, name: str, calls: list[str]) -> Normalizer:
    """The same layer, of a class with its own method of this name, which does the same."""
    inherited = getattr(type(layer), name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(name)
        return inherited(self, *args, **options)

    layer.__class__ = type(f"Own{type(layer).__name__}", (type(layer),), {name: method})
    return layer


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_no_method_of_the_map_is_passed_over(case: Any, training: bool) -> None:
    """They were by loops and kernels, which know the map by a description: a blend_weight of one's
    own, for one, did not blend."""
    x = torch.randn(SHAPE)
    probe = build(case, torch.float32).train(training)
    assert isinstance(probe, Normalizer)
    names = methods_of_the_map(probe, x)
    assert names
    for name in sorted(names):
        calls: list[str] = []
        counting(build(case, torch.float32).train(training), name, calls)(x)
        assert calls, name


def test_statistics_follow_a_blend_weight_of_their_own() -> None:
    class LastBatch(nk.BN):
        def blend_weight(self, *given: Any) -> float:
            return 1.0

    x = torch.randn(16, 8, 4, 4) + 5
    layer = LastBatch(8)
    layer(x)
    torch.testing.assert_close(layer.running_mean, x.mean((0, 2, 3)))


def test_a_subclass_without_methods_of_the_map_keeps_the_kernels() -> None:
    class Named(nk.BN):
        def extra_repr(self) -> str:
            return "mine"

        def forward(self, x: Tensor, *more: Any, **options: Any) -> Tensor:
            return super().forward(x, *more, **options)

        def helper(self) -> int:
            return 1

    x = torch.randn(SHAPE)
    assert not Named.own_methods
    assert nk.why(Named(CHANNELS), x) == nk.why(nk.BN(CHANNELS), x)
