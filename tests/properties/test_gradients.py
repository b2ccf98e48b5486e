"""Every gradient of every layer against numerical differences, in float64.

fast_mode compares along random directions instead of entry by entry. Two methods stop gradients
on purpose (the corrections of batch_renorm, the estimates of micro-batch bcn): differences do not
see that, so those are compared with their straightforward versions in tests/bench instead.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases import FORMATS, build, every, inputs, label, same_buffers, within


def stops_gradients(case):
    name, options = case
    return (name == "batch_renorm" and "r_ramp" in options) or "micro" in options


DIFFERENTIABLE = [case for case in every() if not stops_gradients(case)]


def function_of(layer, training, activation="none"):
    """The layer as a function of its inputs alone. dn's gates are left out: their gradient is a
    straight-through one by design."""
    names = [key for key, p in layer.named_parameters() if "gates" not in key and p.requires_grad]
    layer.train(training)

    def call(x: Tensor, residual: Tensor, *parameters: Tensor) -> Tensor:
        with same_buffers(layer):
            given = dict(zip(names, parameters, strict=True))
            args = (x, residual, activation)
            return torch.func.functional_call(layer, given, args)

    return call, [layer.get_parameter(key) for key in names]


@within(memory=FORMATS, training=(True, False))
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=label)
def test_gradcheck(case, memory, training):
    layer = build(case)
    call, parameters = function_of(layer, training, "silu")
    x = inputs(4, (3, 2), memory).requires_grad_()
    residual = torch.randn_like(x).requires_grad_()
    assert gradcheck(call, (x, residual, *parameters), fast_mode=True)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=label)
def test_gradgradcheck(case):
    """The gradient of a gradient: what gradient penalties and meta-learning need."""
    layer = build(case)
    call, parameters = function_of(layer, True, "silu")
    x = inputs(4, (2, 2)).requires_grad_()
    residual = torch.randn_like(x).requires_grad_()
    everything = (x, residual, *parameters)
    assert gradgradcheck(call, everything, fast_mode=True)


@within(activation=("none", "relu"))
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=label)
def test_other_activations(case, activation):
    layer = build(case)
    call, parameters = function_of(layer, True, activation)
    x = inputs(4, (3, 2)).requires_grad_()
    residual = torch.randn_like(x).requires_grad_()
    assert gradcheck(call, (x, residual, *parameters), fast_mode=True)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=label)
def test_gradients_of_parameters_alone(case):
    """The first layer of a network: its input needs no gradient."""
    layer = build(case)
    call, parameters = function_of(layer, True)
    x = inputs(4, (3, 2))
    if not parameters:
        assert not call(x, torch.zeros_like(x)).requires_grad
        return
    assert gradcheck(lambda *p: call(x, torch.zeros_like(x), *p), parameters, fast_mode=True)


ACTIVATIONS = {"none": lambda y: y, "relu": F.relu, "silu": F.silu}


@within(memory=FORMATS, activation=tuple(ACTIVATIONS))
@pytest.mark.parametrize("case", every(), ids=label)
def test_gradient_of_the_residual(case, memory, activation):
    """What flows into the residual is the gradient before the activation, to 1e-9: gradcheck sees
    only sums along random directions, and to 1e-6."""
    layer = build(case)
    twin = copy.deepcopy(layer)
    x = inputs(4, (3, 2), memory)
    residual = torch.randn_like(x)
    a, b = residual.clone().requires_grad_(), residual.clone().requires_grad_()
    y = layer(x, a, activation)
    z = ACTIVATIONS[activation](twin(x) + b)
    torch.testing.assert_close(y, z, rtol=1e-9, atol=1e-9)
    dy = torch.randn_like(y)
    y.backward(dy)
    z.backward(dy)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)
