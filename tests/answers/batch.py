"""Answers of the layers that differ from batch normalization in their statistics or affine map."""

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


def bn(x: Array, state: State, options: Options, training: bool) -> Answer:
    mean, var, buffers = batch_statistics(flat(x), state, options, training)
    xhat = standardized(flat(x), mean, var, options)
    if "weight" not in state:
        return Answer(xhat.reshape(x.shape), buffers)
    weight, bias = each_position(state["weight"]), each_position(state["bias"])
    form = options.get("form", "standard")
    if form == "standard":
        y = weight * xhat + bias
    elif form == "a1":
        y = weight * (xhat + bias)
    else:
        y = weight * (each_position(state["inner_weight"]) * xhat + bias)
    return Answer(y.reshape(x.shape), buffers)


def input_norm(x: Array, state: State, options: Options, training: bool) -> Answer:
    """The three modes without batch statistics subtract and divide by constants."""
    mode = options.get("mode", "bn")
    if mode == "bn":
        return bn(x, state, options, training)
    channels = x.shape[1]
    if mode == "fixed":
        # (x − 128) / 128 for bytes; a tensor of images holds bytes / 255
        mean = std = np.full(channels, 128 / 255)
    elif mode == "dataset":
        mean, std = np.array(options["mean"]), np.array(options["std"])
    else:
        mean, std = np.zeros(channels), np.ones(channels)
    # what the paper compares with is fixed: nothing learned follows
    y = (flat(x) - each_position(mean)) / each_position(std)
    return Answer(y.reshape(x.shape))


def frozen_bn(x: Array, state: State, options: Options, training: bool) -> Answer:
    n = x.shape[0]
    mean, var = np.tile(state["running_mean"], (n, 1)), np.tile(state["running_var"], (n, 1))
    return Answer(affine(standardized(flat(x), mean, var, options), state).reshape(x.shape))


def ghost_bn(x: Array, state: State, options: Options, training: bool) -> Answer:
    return bn(x, state, {"virtual_batch": 32, **options}, training)


def ramp(step: float, start: float, stop: float, span: tuple[float, float] | None) -> float:
    """From start to stop, linearly between the two steps of span."""
    if span is None or step >= span[1]:
        return stop
    if step <= span[0]:
        return start
    return start + (stop - start) * (step - span[0]) / (span[1] - span[0])


def batch_renorm(x: Array, state: State, options: Options, training: bool) -> Answer:
    eps = options.get("eps", 1e-3)
    n, c = x.shape[:2]
    values, old_mean, old_std = flat(x), state["running_mean"], state["running_std"]
    if not training:
        xhat = (values - each_position(old_mean)) / each_position(old_std)
        return Answer(affine(xhat, state).reshape(x.shape))
    step = float(state["num_batches_tracked"])
    r_max = ramp(step, 1.0, options.get("r_max", 3.0), options.get("r_ramp", (5000, 40000)))
    d_max = ramp(step, 0.0, options.get("d_max", 5.0), options.get("d_ramp", (5000, 25000)))
    xhat = np.empty_like(values)
    new_mean, new_std = np.zeros(c), np.zeros(c)
    for run in runs(n, options.get("virtual_batch")):
        for k in range(c):
            part = values[run, k]
            mean, std = part.mean(), np.sqrt(part.var() + eps)
            r = np.clip(std / old_std[k], 1 / r_max, r_max)
            d = np.clip((mean - old_mean[k]) / old_std[k], -d_max, d_max)
            xhat[run, k] = (part - mean) / std * r + d
            new_mean[k] += mean * counted(part) / counted(values[:, k])
            new_std[k] += std * counted(part) / counted(values[:, k])
    weight = new_weight(options, state, default=0.01)
    return Answer(
        affine(xhat, state).reshape(x.shape),
        {
            "running_mean": blend(old_mean, new_mean, weight),
            "running_std": blend(old_std, new_std, weight),
            "num_batches_tracked": state["num_batches_tracked"] + 1,
        },
    )


def shifted_bn(x: Array, state: State, options: Options, training: bool) -> Answer:
    mean, var, buffers = batch_statistics(flat(x), state, options, training)
    xhat = standardized(flat(x), mean, var, options)
    moved = each_position(state["target_std"]) * xhat + each_position(state["target_mean"])
    return Answer(affine(moved, state).reshape(x.shape), buffers)
