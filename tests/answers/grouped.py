"""Answers of the layers that pool over samples and groups: BGN, GBGN, BCN."""

from __future__ import annotations

import numpy as np

from answers.pooling import (
    Answer,
    Array,
    Options,
    State,
    affine,
    batch_statistics,
    blend,
    counted,
    each_position,
    flat,
    new_weight,
    runs,
    standardized,
)
from answers.sample import gn_groups, grouped


def bgn(x: Array, state: State, options: Options, training: bool) -> Answer:
    """Groups are runs of the flattened (C, H, W); entry d of D belongs to group floor(d·G/D)."""
    n, eps = x.shape[0], options.get("eps", 1e-5)
    tracked = options.get("track_running_stats", True)
    rows = x.reshape(n, -1)
    entries = rows.shape[1]
    groups = len(state["running_mean"]) if tracked else options["groups"]
    if options.get("remainder") == "largest_divisor":
        groups = max(g for g in range(1, groups + 1) if entries % g == 0)
    y = np.empty_like(rows)
    new_mean, new_var = np.zeros(groups), np.zeros(groups)
    for g in range(groups):
        members = [d for d in range(entries) if d * groups // entries == g]
        group = slice(members[0], members[-1] + 1)
        if tracked and not training:
            mean, var = state["running_mean"][g], state["running_var"][g]
            y[:, group] = (rows[:, group] - mean) / np.sqrt(var + eps)
            continue
        for run in runs(n, options.get("virtual_batch")):
            values = rows[run, group]
            y[run, group] = (values - values.mean()) / np.sqrt(values.var() + eps)
            correction = options.get("running_var_correction", 1)
            share = counted(values) / counted(rows[:, group])
            new_mean[g] += values.mean() * share
            new_var[g] += values.var(ddof=correction) * share
    y = affine(flat(y.reshape(x.shape)), state).reshape(x.shape)
    if not (tracked and training):
        return Answer(y)
    weight = new_weight(options, state)
    return Answer(
        y,
        {
            "running_mean": blend(state["running_mean"], new_mean, weight),
            "running_var": blend(state["running_var"], new_var, weight),
            "num_batches_tracked": state["num_batches_tracked"] + 1,
        },
    )


def gbgn(x: Array, state: State, options: Options, training: bool) -> Answer:
    """First and second raw moments of runs of examples and groups of channels."""
    values, eps = flat(x), options.get("eps", 1e-5)
    tracked = options.get("track_running_stats", True)
    n, c, _ = values.shape
    groups = gn_groups(c, options)
    width = c // groups
    first, second = values.mean(axis=2), (values**2).mean(axis=2)  # (N, C)
    size = np.ma.count(values[:, 0], axis=1)  # (N,)
    limits = (options.get("examples_per_group", "batch"), options.get("virtual_batch"), n)
    length = min(limit for limit in limits if isinstance(limit, int))
    y = np.empty_like(values)
    for g in range(groups):
        span = slice(g * width, (g + 1) * width)
        if training or not tracked:
            for run in runs(n, length):
                mean = np.ma.average(first[run, span], axis=0, weights=size[run]).mean()
                square = np.ma.average(second[run, span], axis=0, weights=size[run]).mean()
                var = square - mean**2
                y[run, span] = (values[run, span] - mean) / np.sqrt(var + eps)
            continue
        own = options.get("eval_weight", 0.0)
        for i in range(n):
            mean = (1 - own) * state["running_mean"][span].mean() + own * first[i, span].mean()
            square = (1 - own) * state["running_second_moment"][span].mean()
            square += own * second[i, span].mean()
            var = max(square - mean**2, 0.0)
            y[i, span] = (values[i, span] - mean) / np.sqrt(var + eps)
    y = affine(y, state).reshape(x.shape)
    if not (tracked and training):
        return Answer(y)
    weight = new_weight(options, state, default=0.01)
    average = np.ma.average(second, axis=0, weights=size)
    moved = blend(state["running_second_moment"], average, weight)
    return Answer(
        y,
        {
            "running_mean": blend(
                state["running_mean"], np.ma.average(first, axis=0, weights=size), weight
            ),
            "running_second_moment": moved,
            "num_batches_tracked": state["num_batches_tracked"] + 1,
        },
    )


def bcn(x: Array, state: State, options: Options, training: bool) -> Answer:
    values, eps = flat(x), options.get("eps", 1e-5)
    if options.get("micro", False):
        mean, var, buffers = micro_estimates(values, state, options, training)
    else:
        mean, var, buffers = batch_statistics(values, state, options, training)
    first = affine(standardized(values, mean, var, options), state)
    groups = gn_groups(x.shape[1], options)
    second = grouped(first, groups, eps)
    if "group_weight" in state:
        per = x.shape[1] // len(state["group_weight"])  # one entry a group, or one a channel
        scale, shift = np.repeat(state["group_weight"], per), np.repeat(state["group_bias"], per)
        second = each_position(scale) * second + each_position(shift)
    return Answer(second.reshape(x.shape), buffers)


def micro_estimates(
    x: Array, state: State, options: Options, training: bool
) -> tuple[Array, Array, dict[str, Array]]:
    """Algorithm 1 of the WS paper: move the estimates, then use them as constants.

    Where batches are collected for an optimizer step, a forward moves nothing.
    """
    n, c, _ = x.shape
    mean, var = state["running_mean"].copy(), state["running_var"].copy()
    buffers = {}
    if training and options.get("update_every", "forward") == "forward":
        rate = options["update_rate"]
        for k in range(c):
            around_old = ((x[:, k] - mean[k]) ** 2).mean()
            mean[k] += rate * (x[:, k].mean() - mean[k])
            var[k] += rate * (around_old - var[k])
        count = state["num_batches_tracked"] + 1
        buffers = {"running_mean": mean, "running_var": var, "num_batches_tracked": count}
    return np.tile(mean, (n, 1)), np.tile(var, (n, 1)), buffers
