"""The activations that ride on a norm: each against torch's own, in both backends."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from normkit.conversion import plan_fuse
from normkit.engine.activations import KNOWN, NAMES, module_of, name_of_call, name_of_module
from normkit.errors import OptionError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VALUES = torch.tensor([-40.0, -4, -3.01, -2, -0.7, -1e-3, 1e-3, 0.4, 2.5, 3.01, 5.9, 6.1, 40])


@pytest.mark.parametrize("name", KNOWN)
def test_the_gradient_is_that_of_the_function(name):
    known = KNOWN[name]
    x = VALUES.double().requires_grad_()
    g = torch.linspace(-1, 1, len(x), dtype=torch.double)
    (expected,) = torch.autograd.grad(known.function(x), x, g)
    torch.testing.assert_close(known.gradient(g, x.detach()), expected, rtol=1e-9, atol=1e-12)
    assert name_of_module(known.module()) == name
    torch.testing.assert_close(known.module()(x), known.function(x))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("layer", ["bn", "gn", "pn"])
def test_a_norm_does_it_in_its_own_pass(name, layer):
    pytest.importorskip("triton", reason="Triton is not installed")
    made = nk.make(layer, 8).to(DEVICE)
    with torch.no_grad():
        made.weight.fill_(2.5)  # wide enough for what bends at 3 and 6
    x, residual, g = (torch.randn(2, 8, 3, 3, device=DEVICE) for _ in range(3))
    results = []
    for backend in ("triton", "torch", "apart"):
        own = copy.deepcopy(made)
        a, r = x.clone().requires_grad_(), residual.clone().requires_grad_()
        with nk.use_backend("torch" if backend == "apart" else backend):
            y = module_of(name)(own(a) + r) if backend == "apart" else own(a, r, name)
        y.backward(g)
        results.append([y, a.grad, r.grad, own.weight.grad, own.bias.grad])
    for got in results[:2]:
        for one, expected in zip(got, results[2], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_not_a_number_is_not_hidden(name):
    pytest.importorskip("triton", reason="Triton is not installed")
    x = torch.randn(1, 4, 2, 2, device=DEVICE)
    residual = torch.full_like(x, torch.nan)
    for backend in ("triton", "torch"):
        with nk.use_backend(backend):
            assert nk.GN(4, groups=2, device=DEVICE)(x, residual, name).isnan().all()


def test_other_options_are_other_functions():
    assert name_of_module(nn.LeakyReLU(0.3)) is None
    assert name_of_module(nn.ELU(0.5)) is None
    assert name_of_module(nn.PReLU()) is None
    assert name_of_call(F.leaky_relu, (0, 0.2), {"inplace": True}) == "leaky_relu_0.2"
    assert name_of_call(F.leaky_relu, (0, 0.3), {}) is None
    assert name_of_call(F.gelu, (0,), {"approximate": "tanh"}) == "gelu_tanh"
    assert name_of_call(F.elu, (0,), {"alpha": 2.0}) is None
    assert name_of_call("relu_", (0,), {}) == "relu"
    with pytest.raises(OptionError, match="Unknown activation 'gleu'"):
        nk.NormAct(nk.BN(4), "gleu")


class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 1), nk.BN(4), act

    def forward(self, x):
        return self.act(self.norm(self.conv(x)) + x)


@pytest.mark.parametrize("name", KNOWN)
def test_fuse_finds_it(name):
    models = {"sum": Block(module_of(name)), "row": nn.Sequential(nk.BN(4), module_of(name))}
    for kind, model in models.items():
        x = torch.randn(2, 4, 5, 5)
        expected = copy.deepcopy(model).eval()(x)
        (what,) = plan_fuse(model).fused.values()
        assert what == (f"sum and {name}" if kind == "sum" else name)
        torch.testing.assert_close(nk.fuse(model).eval()(x), expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_fused_is_said():
    plan = plan_fuse(nn.Sequential(nk.BN(4), nn.PReLU()))
    assert not plan.fused
    assert "PReLU(num_parameters=1) follows it, which is not fused" in plan.left["0"]

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nk.BN(4), nn.LeakyReLU(0.3)

        def forward(self, x):
            return self.act(self.norm(x))

    assert "LeakyReLU(negative_slope=0.3) follows it" in plan_fuse(Own()).left["norm"]


@pytest.mark.parametrize(
    ("model", "activation"), [("mobilenet_v2", "relu6"), ("mobilenet_v3_small", "hardswish")]
)
def test_mobile_networks_are_fused(model, activation):
    models = pytest.importorskip("torchvision.models")
    net = nk.convert(getattr(models, model)(num_classes=2), "bn", example=False)
    fused = list(plan_fuse(net).fused.values())
    acts = sum(type(m) is type(module_of(activation)) for m in net.modules())
    if model == "mobilenet_v2":
        assert fused.count(activation) == acts
    else:
        assert fused.count(activation) == acts - 1  # one stands in the classifier


def test_every_name_is_a_number_of_its_own():
    assert sorted(known.number for known in KNOWN.values()) == list(range(1, len(NAMES)))
