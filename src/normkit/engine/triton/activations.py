"""The activations of ``engine/activations.py`` in kernels, by their numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _hyperbolic_tangent(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _below(x):
    """The part of a normal distribution below x."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _bend(x):
    """What the tanh form of GELU takes the hyperbolic tangent of."""
    return 0.7978845608028654 * (x + 0.044715 * x * x * x)


@triton.jit
def _tanh_softplus(x):
    """tanh(log(1 + eˣ)) = n/(n + 2) with n = eˣ(eˣ + 2); 1 long before that overflows."""
    e = tl.exp(tl.minimum(x, 20.0))
    n = e * (e + 2.0)
    return n / (n + 2.0)


@triton.jit
def _slope(ACT: tl.constexpr):
    """Of a leaky ReLU below zero."""
    if ACT == 10:
        return 0.01
    elif ACT == 11:
        return 0.1
    else:
        return 0.2


@triton.jit
def activate(x, ACT: tl.constexpr):
    """activation(x); what is not a number stays so."""
    if ACT == 1:
        x = tl.where(x > 0, x, tl.where(x != x, x, 0.0))
    elif ACT == 2:
        x = x * tl.sigmoid(x)
    elif ACT == 3:
        x = tl.where(x < 6, tl.where(x > 0, x, tl.where(x != x, x, 0.0)), tl.where(x != x, x, 6.0))
    elif ACT == 4:
        inner = tl.where(x < 3, x * (x + 3.0) / 6.0, x)
        x = tl.where(x > -3, inner, tl.where(x != x, x, 0.0))
    elif ACT == 5:
        x = x * _below(x)
    elif ACT == 6:
        x = 0.5 * x * (1.0 + _hyperbolic_tangent(_bend(x)))
    elif ACT == 7:
        x = tl.sigmoid(x)
    elif ACT == 8:
        low = tl.minimum(x, 0.0)
        # eˣ − 1 loses its digits near zero
        near = low * (1.0 + low * (0.5 + low * (1.0 / 6.0 + low / 24.0)))
        x = tl.where(x > 0, x, tl.where(low > -0.05, near, tl.exp(low) - 1.0) + (x - low))
    elif ACT == 9:
        x = x * _tanh_softplus(x)
    elif ACT >= 10:
        x = tl.where(x > 0, x, x * _slope(ACT))
    return x


@triton.jit
def before(g, x, ACT: tl.constexpr):
    """The gradient before the activation, from the one after it and what went in."""
    if ACT == 1:
        g = tl.where(x <= 0, 0.0, g)  # what is not a number lets it through, as in torch
    elif ACT == 2:
        s = tl.sigmoid(x)
        g = g * s * (1.0 + x * (1.0 - s))
    elif ACT == 3:
        g = tl.where((x <= 0) | (x >= 6), 0.0, g)
    elif ACT == 4:
        g = tl.where(x > -3, tl.where(x < 3, g * (x / 3.0 + 0.5), g), 0.0)
    elif ACT == 5:
        g = g * (_below(x) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327)
    elif ACT == 6:
        t = _hyperbolic_tangent(_bend(x))
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        g = g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
    elif ACT == 7:
        s = tl.sigmoid(x)
        g = g * s * (1.0 - s)
    elif ACT == 8:
        g = tl.where(x > 0, g, g * tl.exp(tl.minimum(x, 0.0)))
    elif ACT == 9:
        t = _tanh_softplus(x)
        g = g * (t + x * (1.0 - t * t) * tl.sigmoid(x))
    elif ACT >= 10:
        g = tl.where(x > 0, g, g * _slope(ACT))
    return g
