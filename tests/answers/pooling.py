"""Statistics by plain loops, and what running buffers become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
State = Mapping[str, Array]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The output, and the buffers that the forward changes; all others stay as they were."""

    y: Array
    buffers: dict[str, Array] = field(default_factory=dict)


def flat(x: Array) -> Array:
    """(N, C, *spatial) as (N, C, L), in the logical order of the positions; (N, C) has L = 1."""
    return x.reshape(x.shape[0], x.shape[1], -1)


def runs(samples: int, length: int | None) -> list[slice]:
    """Consecutive runs of samples; the last may be shorter."""
    length = length or samples
    return [slice(start, min(start + length, samples)) for start in range(0, samples, length)]


def counted(x: Array) -> int:
    """How many values there are; those that a masked array hides do not count."""
    return int(np.ma.count(x))


def each_position(table: Array) -> Array:
    """A table (N, C) or (C,) that broadcasts against (N, C, L)."""
    return table[..., None]


def new_weight(options: Options, state: State, default: float | None = 0.1) -> float:
    """How much the new value counts in a running average."""
    momentum = options.get("momentum", default)
    return 1.0 / (state["num_batches_tracked"] + 1) if momentum is None else momentum


def blend(old: Array, new: Array, weight: float) -> Array:
    return (1 - weight) * old + weight * new


def batch_statistics(
    x: Array, state: State, options: Options, training: bool
) -> tuple[Array, Array, dict[str, Array]]:
    """Mean and biased variance of plain BN for each sample and channel, and the new buffers.

    x is (N, C, L). Each virtual batch has its own statistics; the running ones move once, towards
    the average of what the virtual batches would have stored, weighted by their samples.
    """
    n, c, _ = x.shape
    tracked = options.get("track_running_stats", True)
    if tracked and not training:
        return np.tile(state["running_mean"], (n, 1)), np.tile(state["running_var"], (n, 1)), {}
    mean, var = np.empty((n, c)), np.empty((n, c))
    new_mean, new_var = np.zeros(c), np.zeros(c)
    for run in runs(n, options.get("virtual_batch")):
        for channel in range(c):
            values = x[run, channel]
            mean[run, channel] = values.mean()
            var[run, channel] = values.var()
            share = counted(values) / counted(x[:, channel])
            correction = options.get("running_var_correction", 1)
            new_mean[channel] += share * values.mean()
            new_var[channel] += share * values.var(ddof=correction)
    if not (tracked and training):
        return mean, var, {}
    weight = new_weight(options, state)
    return (
        mean,
        var,
        {
            "running_mean": blend(state["running_mean"], new_mean, weight),
            "running_var": blend(state["running_var"], new_var, weight),
            "num_batches_tracked": state["num_batches_tracked"] + 1,
        },
    )


def standardized(x: Array, mean: Array, var: Array, options: Options, eps: float = 1e-5) -> Array:
    """(x − mean) / √(var + eps) with tables (N, C)."""
    return (x - each_position(mean)) / np.sqrt(each_position(var) + options.get("eps", eps))


def affine(xhat: Array, state: State, gate: Array | float = 1.0) -> Array:
    """weight · gate · x̂ + bias, for x̂ of (N, C, L); without parameters the gate alone."""
    y = gate * xhat
    if "weight" in state:
        y = each_position(state["weight"]) * y + each_position(state["bias"])
    return y


def sigmoid(z: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-z))
