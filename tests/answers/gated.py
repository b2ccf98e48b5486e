"""Answers of the layers whose scale depends on the sample or its pixels: RBN, IEBN, BNET, UBN."""

from __future__ import annotations

import numpy as np

from answers.pooling import (
    Answer,
    Array,
    Options,
    State,
    affine,
    batch_statistics,
    each_position,
    flat,
    sigmoid,
    standardized,
)


def pooled(x: Array) -> Array:
    """Global average pooling, (N, C, L) to (N, C)."""
    return x.mean(axis=2)


def rbn(x: Array, state: State, options: Options, training: bool) -> Answer:
    values = flat(x)
    minus = options.get("minus", False)
    if options.get("centering", True) and not minus:
        values = values + each_position(state["center_weight"] * pooled(values))
    mean, var, buffers = batch_statistics(values, state, options, training)
    xhat = standardized(values, mean, var, options)
    signal = 0.0 if minus else state["gate_weight"] * pooled(xhat)
    gate = np.broadcast_to(sigmoid(signal + state["gate_bias"]), mean.shape)
    return Answer(affine(xhat, state, each_position(gate)).reshape(x.shape), buffers)


def iebn(x: Array, state: State, options: Options, training: bool) -> Answer:
    values = flat(x)
    mean, var, buffers = batch_statistics(values, state, options, training)
    xhat = standardized(values, mean, var, options)
    signal = 0.0 if options.get("minus", False) else state["gate_weight"] * pooled(values)
    gate = np.broadcast_to(sigmoid(signal + state["gate_bias"]), mean.shape)
    return Answer(affine(xhat, state, each_position(gate)).reshape(x.shape), buffers)


def depthwise(x: Array, kernel: Array, bias: Array) -> Array:
    """Each channel's own convolution, stride 1, zeros around the border, any number of axes.

    x is (N, C, *spatial), kernel (C, 1, *k); a table (N, C) is a map of one position.
    """
    n, c, *spatial = x.shape
    k = kernel.shape[2:]
    spatial = spatial or [1] * len(k)
    maps = np.ma.filled(x.reshape(n, c, *spatial), 0)  # what is hidden counts as border
    padded = np.pad(maps, [(0, 0), (0, 0), *(((s - 1) // 2,) * 2 for s in k)])
    y = np.zeros_like(maps)
    for tap in np.ndindex(*k):
        window = tuple(slice(t, t + s) for t, s in zip(tap, spatial, strict=True))
        factor = kernel[(slice(None), 0, *tap)].reshape(c, *[1] * len(k))
        y += factor * padded[(slice(None), slice(None), *window)]
    return (y + bias.reshape(c, *[1] * len(k))).reshape(x.shape)


def bnet(x: Array, state: State, options: Options, training: bool) -> Answer:
    mean, var, buffers = batch_statistics(flat(x), state, options, training)
    xhat = standardized(flat(x), mean, var, options).reshape(x.shape)
    if "weight" not in state:
        return Answer(xhat, buffers)
    return Answer(depthwise(xhat, state["weight"], state["bias"]), buffers)


def condensation(samples: Array, norm: str) -> float:
    """The cosine between all ordered pairs of different samples, summed, then divided.

    By the number of pairs, or as eq. 3 of the UBN paper prints it by the number of samples. A
    sample of zeros has cosine 0 with every other. The sheet's two remarks on such samples (the
    matrix of cosines holds 0 on its diagonal but n is subtracted) make an all-zero batch
    −1/(n − 1) for pairs.
    """
    rows = np.ma.filled(samples.reshape(samples.shape[0], -1), 0)
    n = len(rows)
    if n == 1:
        return 1.0 if norm == "pairs" else 0.0  # the authors' rule; a sum over no pairs
    total = -float(n)
    for i in range(n):
        for j in range(n):
            lengths = np.linalg.norm(rows[i]) * np.linalg.norm(rows[j])
            total += rows[i] @ rows[j] / lengths if lengths > 0 else 0.0
    return total / (n * (n - 1)) if norm == "pairs" else total / n


UBN_DEFAULTS = {
    "tau": 0.15,
    "score_decay": 0.9,
    "fct": True,
    "centering": True,
    "scaling": True,
    "affine_conv": True,
    "affine": True,
    "score_norm": "pairs",
    "max_samples": 16,
    "update_in_eval": False,
    "train_stats": "batch",
    "stats_from": "calibrated",
    "gate": "after",
}
UBN_PRESETS: dict[str | None, dict[str, object]] = {
    None: {},
    "authors": {"update_in_eval": True},
    "paper": {
        "score_norm": "batch",
        "max_samples": None,
        "train_stats": "ema",
        "stats_from": "raw",
        "gate": "before",
    },
}


def ubn(x: Array, state: State, options: Options, training: bool) -> Answer:
    o = {**UBN_DEFAULTS, **UBN_PRESETS[options.get("preset")], **options}
    values, buffers = flat(x), {}
    # stage 1: is the batch condensed, and which statistics follow from that
    score = state["score"][0]
    if o["fct"] and (training or o["update_in_eval"]):
        # with virtual batches the first one speaks for the score, as one worker would
        first = values[: o.get("virtual_batch")][: o["max_samples"]]
        now = condensation(first, o["score_norm"])
        score = o["score_decay"] * score + (1 - o["score_decay"]) * now
        buffers["score"] = np.array([score])
    calibrated = values
    if o["centering"]:
        calibrated = values + each_position(state["center_weight"] * pooled(values))
    source = values if o["stats_from"] == "raw" else calibrated
    condensed = not o["fct"] or score > o["tau"]
    mean, var, moved = batch_statistics(source, state, o, training and condensed)
    if moved and o["train_stats"] == "ema":
        mean = np.tile(moved["running_mean"], (x.shape[0], 1))
        var = np.tile(moved["running_var"], (x.shape[0], 1))
    buffers.update(moved)
    if training and o.get("track_running_stats", True):
        buffers["num_batches_tracked"] = state["num_batches_tracked"] + 1
    # stage 2: normalize, scale by the gate, mix with the neighbours
    xhat = standardized(calibrated, mean, var, o)
    gate: Array | float = 1.0
    if o["scaling"]:
        signal = state["gate_weight"] * pooled(xhat) + state["gate_bias"]
        gate = each_position(sigmoid(signal))
    y = gate * xhat if o["gate"] == "before" else xhat
    if o["affine"] and o["affine_conv"]:
        y = flat(depthwise(y.reshape(x.shape), state["weight"], state["bias"]))
    elif o["affine"]:
        y = affine(y, state)
    if o["gate"] == "after":
        y = gate * y
    return Answer(y.reshape(x.shape), buffers)
