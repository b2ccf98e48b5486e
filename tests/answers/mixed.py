"""Answers of layers that mix normalizers: IBN by channels, SN and SSN by weights, DN by gates."""

from __future__ import annotations

import itertools
import math

import numpy as np

from answers.pooling import (
    Answer,
    Array,
    Options,
    State,
    affine,
    batch_statistics,
    blend,
    flat,
    new_weight,
    runs,
    standardized,
)
from answers.sample import grouped


def ibn(x: Array, state: State, options: Options, training: bool) -> Answer:
    """The first int(C · ratio) channels by sample, the others by batch."""
    values = flat(x)
    half = int(values.shape[1] * options.get("ratio", 0.5))
    y = np.empty_like(values)
    buffers: dict[str, Array] = {}
    if half:
        y[:, :half] = grouped(values[:, :half], half, options.get("eps", 1e-5))
    if half < values.shape[1]:
        rest = values[:, half:]
        mean, var, buffers = batch_statistics(rest, state, options, training)
        y[:, half:] = standardized(rest, mean, var, options)
    return Answer(affine(y, state).reshape(x.shape), buffers)


def softmax(z: Array) -> Array:
    return np.exp(z) / np.exp(z).sum()


def sparsestmax(z: Array, radius: float) -> Array:
    """The point of the simplex nearest to z that lies at least ``radius`` from its centre.

    If the nearest point of the whole simplex lies too close to the centre, the answer lies on
    the circle of that radius: a minimum outside the circle would be one of the convex problem
    too. On the circle the candidates are the point in the direction of z and the points where
    the circle leaves a side of the simplex. The nearest candidate inside the simplex wins.
    """
    k = len(z)
    radius = min(radius, math.sqrt(1 - 1 / k))  # a rounded radius may lie beyond the corners
    centre = np.full(k, 1 / k)
    nearest = sparsemax(z)
    if np.linalg.norm(nearest - centre) >= radius:
        return nearest
    along = z - z.mean()
    candidates = [centre + radius * along / np.linalg.norm(along)]
    if k == 3:
        for zero, i, j in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
            # p[zero] = 0 and p[i] = 1/2 + t, p[j] = 1/2 − t lie at radius² = 1/6 + 2t²
            for sign in (1, -1):
                edge = np.zeros(3)
                t = sign * math.sqrt(max(radius**2 - 1 / 6, 0.0) / 2)
                edge[i], edge[j] = 0.5 + t, 0.5 - t
                if radius**2 >= 1 / 6:
                    candidates.append(edge)
                assert edge[zero] == 0
    inside = [p for p in candidates if p.min() >= -1e-12]
    return min(inside, key=lambda p: float(np.linalg.norm(p - z)))


def sparsemax(z: Array) -> Array:
    """The nearest point of the simplex, by trying every set of entries that may stay positive."""
    best, least = z, math.inf
    for size in range(1, len(z) + 1):
        for kept in itertools.combinations(range(len(z)), size):
            p = np.zeros_like(z)
            index = list(kept)
            p[index] = z[index] - (z[index].sum() - 1) / size
            distance = float(np.linalg.norm(p - z))
            if p.min() >= 0 and distance < least:
                best, least = p, distance
    return best


def switchable(
    x: Array, state: State, options: Options, training: bool, shares: tuple[Array, Array]
) -> Answer:
    """Means and variances of IN, LN and BN, each mixed with its own shares."""
    values = flat(x)
    n, c, _ = values.shape
    mean_share, var_share = shares
    mean_in = values.mean(axis=2)  # (N, C)
    var_in = values.var(axis=2, ddof=1 if options.get("unbiased", False) else 0)
    second = var_in + mean_in**2
    size = np.ma.count(values[:, 0], axis=1)  # (N,)
    means = [mean_in, np.tile(mean_in.mean(axis=1)[:, None], (1, c))]
    variances = [var_in, np.tile(second.mean(axis=1)[:, None], (1, c)) - means[1] ** 2]
    buffers = {}
    if options.get("use_bn", True):
        mean_bn, var_bn = np.empty((n, c)), np.empty((n, c))
        tracked = options.get("track_running_stats", True)
        if training or not tracked:
            new_mean, new_var = np.zeros(c), np.zeros(c)
            for run in runs(n, options.get("virtual_batch")):
                share = size[run].sum() / size.sum()
                mean_bn[run] = np.ma.average(mean_in[run], axis=0, weights=size[run])
                square = np.ma.average(second[run], axis=0, weights=size[run])
                var_bn[run] = square - mean_bn[run][0] ** 2
                new_mean += share * mean_bn[run][0]
                new_var += share * var_bn[run][0]
            if tracked:
                weight = new_weight(options, state)
                buffers = {
                    "running_mean": blend(state["running_mean"], new_mean, weight),
                    "running_var": blend(state["running_var"], new_var, weight),
                    "num_batches_tracked": state["num_batches_tracked"] + 1,
                }
        else:
            mean_bn[:], var_bn[:] = state["running_mean"], state["running_var"]
        means.append(mean_bn)
        variances.append(var_bn)
    mean = sum(w * m for w, m in zip(mean_share, means, strict=True))
    var = sum(w * v for w, v in zip(var_share, variances, strict=True))
    return Answer(affine(standardized(values, mean, var, options), state).reshape(x.shape), buffers)


def branches(state: State, options: Options) -> tuple[Array, Array]:
    """The weights of the branches that take part; without BN the first two."""
    used = slice(0, 3 if options.get("use_bn", True) else 2)
    return state["mean_weight"][used], state["var_weight"][used]


def sn(x: Array, state: State, options: Options, training: bool) -> Answer:
    mean, var = branches(state, options)
    return switchable(x, state, options, training, (softmax(mean), softmax(var)))


def ssn(x: Array, state: State, options: Options, training: bool) -> Answer:
    """In training the radius follows the batches, and a mixture of one part is final."""
    radius, buffers = float(state["radius"].item()), {}
    if training and options.get("anneal_steps") is not None:
        progress = min(1.0, state["num_batches_tracked"] / options["anneal_steps"])
        radius = math.sqrt(1 - 1 / len(state["mean_weight"])) * progress
        buffers["radius"] = np.array([radius])
    shares = []
    for weight, choice in (("mean_weight", "mean_choice"), ("var_weight", "var_choice")):
        share = state[choice] if state[choice].any() else sparsestmax(state[weight], radius)
        if training and np.isclose(share.max(), 1.0, rtol=0, atol=1e-12):
            buffers[choice] = share
        shares.append(share)
    found = switchable(x, state, options, training, (shares[0], shares[1]))
    return Answer(found.y, {**found.buffers, **buffers})


def linked(i: int, j: int, gates: Array) -> bool:
    """Whether two indices share statistics: each bit in which they differ has an open gate.

    That is what the product of the 2 × 2 factors comes to; gate b belongs to bit b.
    """
    return all(gates[b] > 0 for b in range(len(gates)) if (i >> b) % 2 != (j >> b) % 2)


def dn(x: Array, state: State, options: Options, training: bool) -> Answer:
    """Statistics over the samples and channels that the open gates link.

    In eval mode an open batch gate means that the channels' running statistics replace the
    sample's own; closed gates mean there is nothing to replace.
    """
    values = flat(x)
    n, c, _ = values.shape
    batch = options.get("batch", 1)
    batch_gates = state.get("batch_gates", np.empty(0))  # one sample needs none
    mean, var = np.empty((n, c)), np.empty((n, c))
    tracked = options.get("track_running_stats", True)
    running = tracked and not training and bool((batch_gates > 0).any())
    for i in range(n):
        for k in range(c):
            channels = [j for j in range(c) if linked(k, j, state["channel_gates"])]
            if running:
                first = state["running_mean"][channels]
                second = state["running_var"][channels] + first**2
                mean[i, k], var[i, k] = first.mean(), second.mean() - first.mean() ** 2
                continue
            samples = [i]
            if training or not tracked:
                block = range(i - i % batch, i - i % batch + batch)
                samples = [j for j in block if linked(i, j, batch_gates)]
            group = values[np.ix_(samples, channels)]
            mean[i, k], var[i, k] = group.mean(), group.var()
    buffers = batch_statistics(values, state, options, training)[2]
    y = affine(standardized(values, mean, var, options), state)
    return Answer(y.reshape(x.shape), buffers)
