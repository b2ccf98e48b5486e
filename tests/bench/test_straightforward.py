"""The straightforward formulas and the layers are two ways to the same numbers."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

import normkit
from benchmarks import formulas
from benchmarks.straightforward import FORMULAS, plain
from normkit.errors import OptionError
from normkit.layers.base import Normalizer

LAYERS = normkit.names("activation")
every_layer = pytest.mark.parametrize("name", LAYERS)

# options under which more of a formula is at work than with the defaults
OPTIONS = {
    "ghost_bn": {"virtual_batch": 3},
    "shifted_bn": {"mean_spread": 1.0, "std_spread": 0.5},
    "dn": {"batch": 2, "start": "gn", "groups": 4},
}
# parts of a step that say nothing about the formula
INCIDENTAL = {"nonfinite_batches"}


def layer_of(name: str) -> Normalizer:
    """A layer in float64 with all parameters and statistics off their start."""
    torch.manual_seed(0)
    layer = normkit.make(name, 8, dtype=torch.float64, **OPTIONS.get(name, {}))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        if name == "batch_renorm":
            layer.num_batches_tracked.fill_(22_500)  # half way up one ramp, 7/8 up the other
        if name == "ssn":
            layer.set_radius(0.5)
    return layer


def batch(seed: int = 1) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(4, 8, 6, 6, generator=drawn, dtype=torch.float64) + 1


def gradients(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output, and the gradient of each trained parameter and of the input."""
    x = x.clone().requires_grad_()
    wanted = {n: p for n, p in module.named_parameters() if p.requires_grad} | {"x": x}
    y = module(x)
    found = torch.autograd.grad(y, list(wanted.values()), batch(2), allow_unused=True)
    return y.detach(), dict(zip(wanted, found, strict=True))


def test_every_layer_has_a_formula() -> None:
    assert sorted(FORMULAS) == LAYERS


def test_formulas_do_not_use_the_engine() -> None:
    source = inspect.getsource(formulas)
    assert "import torch" in source
    assert "normkit" not in source


@every_layer
def test_training_agrees(name: str) -> None:
    layer = layer_of(name)
    other = plain(layer)
    torch.testing.assert_close(gradients(layer, batch()), gradients(other, batch()))
    # a second batch meets the statistics that the first one left
    torch.testing.assert_close(layer(batch(3)), other(batch(3)))


@every_layer
def test_buffers_agree_after_training(name: str) -> None:
    layer = layer_of(name)
    other = plain(layer)
    for seed in (1, 3):
        layer(batch(seed))
        other(batch(seed))
    theirs = dict(other.named_buffers())
    assert set(theirs) == {n for n, _ in layer.named_buffers()}
    for buffer, value in layer.named_buffers():
        if buffer not in INCIDENTAL:
            torch.testing.assert_close(theirs[buffer], value, msg=lambda m, b=buffer: f"{b}: {m}")


@every_layer
def test_evaluation_agrees(name: str) -> None:
    layer = layer_of(name)
    layer(batch(3))
    layer.eval()
    torch.testing.assert_close(gradients(layer, batch()), gradients(plain(layer), batch()))


@every_layer
def test_parameters_are_shared_and_buffers_are_not(name: str) -> None:
    layer = layer_of(name)
    other = plain(layer)
    assert [id(p) for p in other.parameters()] == [id(p) for p in layer.parameters()]
    before = {n: b.clone() for n, b in layer.named_buffers()}
    other(batch())
    torch.testing.assert_close(dict(layer.named_buffers()), before, rtol=0, atol=0)


def test_half_precision_in_and_out() -> None:
    x = batch().bfloat16()
    y = plain(normkit.make("bn", 8))(x)
    assert y.dtype == torch.bfloat16
    exact = plain(normkit.make("bn", 8))(x.float())
    torch.testing.assert_close(y, exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bn", {"form": "a2"}),
        ("bn", {"virtual_batch": 2}),
        ("ubn", {"gate": "before"}),
        ("bcn", {"micro": True, "update_rate": 0.1}),
        ("input_norm", {"mode": "fixed"}),
    ],
)
def test_a_form_without_a_formula_is_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=f"no straightforward version of {name} with"):
        plain(normkit.make(name, 8, **options))
