"""A method that a subclass overrides is asked in each forward: nothing goes past it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

import normkit as nk
from cases import CHANNELS, build, every, label
from normkit.core.moments import Coefficients
from normkit.layers.base import Normalizer

SHAPE = (6, CHANNELS, 6, 6)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
    return seen


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
    x = torch.randn(SHAPE, device=DEVICE)
    probe = build(case, torch.float32).to(DEVICE).train(training)
    assert isinstance(probe, Normalizer)
    names = methods_of_the_map(probe, x)
    assert names
    for name in sorted(names):
        calls: list[str] = []
        counting(build(case, torch.float32).to(DEVICE).train(training), name, calls)(x)
        assert calls, name


METHODS = ["coefficients", "compute", "normalize", "mapped", "run", "_heard"]


def doubled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose map, or output, is twice that of another one."""

    def twice(self: Any, *args: Any, **options: Any) -> Any:
        found = method(self, *args, **options)
        if isinstance(found, Tensor):
            return 2 * found
        if isinstance(found, Coefficients):
            return found.then(torch.full((CHANNELS,), 2.0, device=DEVICE), None)
        if hasattr(found, "map"):
            return found._replace(
                map=found.map.then(torch.full((CHANNELS,), 2.0, device=DEVICE), None)
            )
        return 2 * found[0], *found[1:]

    return twice


@pytest.mark.parametrize("of", ["class", "mixin", "subclass", "layer"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", [nk.BN, nk.GN, nk.RMS, nk.GBGN, nk.RBN, nk.BCN])
def test_every_forward_asks_it(kind: Any, name: str, of: str) -> None:
    """Not the first one alone, which writes down what the next ones repeat."""
    own, plain = {name: doubled(getattr(kind, name))}, kind(CHANNELS, device=DEVICE)
    if of == "class":
        kind = type("Own", (kind,), own)
    elif of == "mixin":
        kind = type("Own", (type("Mixin", (), own), kind), {})
    elif of == "subclass":
        kind = type("Last", (type("Own", (kind,), own),), {})
    layer, other = kind(CHANNELS, device=DEVICE), kind(CHANNELS, device=DEVICE)
    if of == "layer":
        for each in (layer, other):
            setattr(each, name, MethodType(own[name], each))
    for _ in range(3):
        x = torch.randn(SHAPE, device=DEVICE)
        with nk.use_backend("torch"):
            expected = other(x)
        torch.testing.assert_close(layer(x), expected)
    assert expected.std() > 1.8 * plain(x).std()
    for kept, mine in zip(layer.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(kept, mine)


def test_a_method_of_one_layer_beside_those_of_its_class() -> None:
    kind = type("Own", (nk.GN,), {"mapped": doubled(nk.GN.mapped)})
    layer, x = kind(CHANNELS, groups=2, device=DEVICE), torch.randn(SHAPE, device=DEVICE)
    layer.sample_groups = lambda: 2  # which diagnosis asks
    layer.compute = MethodType(doubled(nk.GN.compute), layer)
    for _ in range(2):
        torch.testing.assert_close(layer(x), 4 * nk.GN(CHANNELS, groups=2, device=DEVICE)(x))


def test_a_check_of_its_own_looks_at_every_input() -> None:
    class Careful(nk.BN):
        def check(self, x: Tensor) -> None:
            super().check(x)
            if not x.isfinite().all():
                raise ValueError("not finite")

    layer = Careful(CHANNELS, device=DEVICE)
    for _ in range(3):
        layer(torch.randn(SHAPE, device=DEVICE))
    with pytest.raises(ValueError, match="not finite"):
        layer(torch.full(SHAPE, torch.nan, device=DEVICE))


def test_a_property_of_its_own() -> None:
    class Unbiased(nk.BN):
        @property
        def running_correction(self) -> int:  # type: ignore[override]
            return 5

    layer, other = Unbiased(CHANNELS, device=DEVICE), Unbiased(CHANNELS, device=DEVICE)
    x = torch.randn(SHAPE, device=DEVICE)
    layer(x)
    with nk.use_backend("torch"):
        other(x)
    torch.testing.assert_close(layer.running_var, other.running_var)
    assert not torch.allclose(layer.running_var, nk.BN(CHANNELS, device=DEVICE).running_var)


def test_what_speaks_for_itself_does_not_speak_for_others() -> None:
    class Described(nk.BN):
        def fusion(self, x: Tensor, state: Any) -> Any:
            return super().fusion(x, state)

    class LastBatch(nk.BN):
        def blend_weight(self, *given: Any) -> float:
            return 1.0

    class Both(Described, LastBatch):
        pass

    x = torch.randn(16, CHANNELS, 4, 4, device=DEVICE) + 5
    for kind in (LastBatch, Both):
        layer = kind(CHANNELS, device=DEVICE)
        layer(x)
        torch.testing.assert_close(layer.running_mean, x.mean((0, 2, 3)))
    assert "blend_weight" in Both.own_methods
    assert not Described.own_methods


def test_a_subclass_without_methods_of_the_map_keeps_the_kernels() -> None:
    class Named(nk.BN):
        def extra_repr(self) -> str:
            return "mine"

        def forward(self, x: Tensor, *more: Any, **options: Any) -> Tensor:
            return super().forward(x, *more, **options)

        def helper(self) -> int:
            return 1

    x, layer = torch.randn(SHAPE, device=DEVICE), Named(CHANNELS, device=DEVICE)
    layer.forward = MethodType(Named.forward, layer)  # as libraries do that look into a module
    assert not Named.own_methods
    assert nk.why(layer, x) == nk.why(nk.BN(CHANNELS, device=DEVICE), x)


class Changing(Normalizer):
    card = nk.RMS.card
    factor = 1.0

    def coefficients(self, moments: Any) -> Coefficients:
        return Coefficients(self.times(moments), None, moments.mean)

    def times(self, moments: Any) -> Tensor:
        return self.factor * torch.rsqrt(moments.var + self.eps)


def _as_property(self: Any) -> Any:
    return lambda moments: 2 * torch.rsqrt(moments.var + self.eps)


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 2.0},
        {"times": lambda self, moments: 2 * torch.rsqrt(moments.var + self.eps)},
        {"times": staticmethod(lambda moments: 2 * torch.rsqrt(moments.var + 1e-5))},
        {"times": property(_as_property)},
    ],
    ids=["number", "function", "staticmethod", "property"],
)
def test_new_layers_follow_a_class_that_was_changed(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook does it; they had the plan of the class as it was."""
    x = torch.randn(2, 4, 3, 3, device=DEVICE)
    before = Changing(4, device=DEVICE)(x)
    for name, value in change.items():
        monkeypatch.setattr(Changing, name, value)
    torch.testing.assert_close(Changing(4, device=DEVICE)(x), 2 * before)
