"""Answers of the layers whose statistics never leave a sample: GN, LN, IN, PN, GW."""

from __future__ import annotations

import math

import numpy as np

from answers.pooling import Answer, Array, Options, State, affine, flat


def gn_groups(channels: int, options: Options) -> int:
    """The group count that the wish and the policy come to."""
    groups, policy = options.get("groups"), options.get("group_policy", "error")
    if groups is None:  # 32, or four channels a group where 32 would leave fewer than two
        return math.gcd(channels, 32 if channels >= 64 else max(1, channels // 4))
    if policy in ("clip_to_channels", "gcd"):
        groups = min(groups, channels)
    if policy == "gcd":
        return math.gcd(channels, groups)
    if policy == "largest_divisor":
        return max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
    return groups


def grouped(x: Array, groups: int, eps: float) -> Array:
    """(N, C, L) with each group of neighbouring channels of each sample standardized."""
    y = np.empty_like(x)
    width = x.shape[1] // groups
    for n in range(x.shape[0]):
        for g in range(groups):
            values = x[n, g * width : (g + 1) * width]
            y[n, g * width : (g + 1) * width] = (values - values.mean()) / np.sqrt(
                values.var() + eps
            )
    return y


def gn(x: Array, state: State, options: Options, training: bool) -> Answer:
    groups = gn_groups(x.shape[1], options)
    y = grouped(flat(x), groups, options.get("eps", 1e-5))
    return Answer(affine(y, state).reshape(x.shape))


def ln(x: Array, state: State, options: Options, training: bool) -> Answer:
    y = grouped(flat(x), 1, options.get("eps", 1e-5))
    return Answer(affine(y, state).reshape(x.shape))


def instance_norm(x: Array, state: State, options: Options, training: bool) -> Answer:
    y = grouped(flat(x), x.shape[1], options.get("eps", 1e-5))
    return Answer(affine(y, state).reshape(x.shape))


def pn(x: Array, state: State, options: Options, training: bool) -> Answer:
    values = flat(x)
    y = np.empty_like(values)
    correction = 1 if options.get("unbiased", False) else 0
    for n in range(values.shape[0]):
        for position in range(values.shape[2]):
            pixel = values[n, :, position]
            spread = np.sqrt(pixel.var(ddof=correction) + options.get("eps", 1e-5))
            y[n, :, position] = (pixel - pixel.mean()) / spread
    return Answer(affine(y, state).reshape(x.shape))


def rms(x: Array, state: State, options: Options, training: bool) -> Answer:
    values = flat(x)
    y = np.stack([v / np.sqrt((v**2).mean() + options.get("eps", 1e-5)) for v in values])
    return Answer(affine(y, state).reshape(x.shape))


def dyt(x: Array, state: State, options: Options, training: bool) -> Answer:
    y = np.tanh(state["alpha"] * flat(x))
    return Answer(affine(y, state).reshape(x.shape))


def gw(x: Array, state: State, options: Options, training: bool) -> Answer:
    """The groups of a sample are the variables, everything inside a group their observations.

    Newton's matrix P always has the eigenvectors of the covariance, so the iteration is done on
    its eigenvalues: the same formula, without rounding that feeds on itself.
    """
    usual = {"groups": 64, "group_policy": "gcd"} if options.get("groups") is None else {}
    groups = gn_groups(x.shape[1], {**options, **usual})
    eps = options.get("eps", 1e-5)
    y = np.empty((x.shape[0], groups, x[0].size // groups))
    for n in range(x.shape[0]):
        observed = x[n].reshape(groups, -1)
        centred = np.ma.filled(observed - observed.mean(axis=1, keepdims=True), 0)
        covariance = centred @ centred.T / np.ma.count(observed[0]) + eps * np.eye(groups)
        spectrum, vectors = np.linalg.eigh(covariance)
        if options.get("method", "newton") == "newton":
            trace = spectrum.sum()
            root = np.ones(groups)
            for _ in range(options.get("iterations", 5)):
                root = 1.5 * root - 0.5 * root**3 * spectrum / trace
            root = root / np.sqrt(trace)
        else:
            root = spectrum**-0.5
        y[n] = vectors @ np.diag(root) @ vectors.T @ centred
    return Answer(affine(flat(y.reshape(x.shape)), state).reshape(x.shape))
