"""Pooling has one home: against NumPy on the values themselves."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import normkit as nk
from cases import build, inputs
from normkit.core.groups import resolve_groups
from normkit.core.moments import Moments, spread
from normkit.core.pieces import cut
from normkit.errors import OptionError


@given(
    n=st.integers(1, 9),
    samples=st.integers(1, 10),
    groups=st.sampled_from([1, 2, 3, 6]),
    positions=st.integers(1, 5),
)
def test_runs_and_groups(n, samples, groups, positions):
    x = torch.randn(n, 6, positions, dtype=torch.float64)
    found = Moments(x.mean(2), x.var(2, correction=0), positions)
    pooled = found.pooled(samples=samples, channels=6 // groups)
    runs = np.split(x.numpy(), range(samples, n, samples))
    for r, run in enumerate(runs):
        for g, part in enumerate(np.split(run, groups, axis=1)):
            np.testing.assert_allclose(pooled.mean[r, g], part.mean(), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(pooled.var[r, g], part.var(), rtol=1e-12, atol=1e-12)
            if part.size > 1:
                unbiased = pooled.unbiased()[r, g]
                np.testing.assert_allclose(unbiased, part.var(ddof=1), rtol=1e-12, atol=1e-12)
    table = spread(pooled.mean, samples=n, runs_of=samples, groups_of=6 // groups)
    assert table.expand(n, 6).shape == (n, 6)
    torch.testing.assert_close(table.expand(n, 6)[-1, -1], pooled.mean[-1, -1])


@given(channels=st.integers(1, 5), positions=st.integers(1, 12), data=st.data())
def test_balanced_groups(channels, positions, data):
    """Value d belongs to group ⌊d·G/D⌋; sizes differ by at most one; pooling weighs by size."""
    total = channels * positions
    groups = data.draw(st.integers(1, total))
    pieces = cut(channels, positions, groups, torch.device("cpu"))
    d = np.arange(total)
    np.testing.assert_array_equal(pieces.group[pieces.piece.flatten()], d * groups // total)
    np.testing.assert_array_equal(pieces.channel[pieces.piece.flatten()], d // positions)
    np.testing.assert_array_equal(pieces.size, np.bincount(pieces.piece.flatten()))
    sizes = np.bincount(d * groups // total, minlength=groups)
    assert sizes.max() - sizes.min() <= 1
    x = torch.randn(1, total, dtype=torch.float64)
    parts = x[0].split(pieces.size.tolist())
    table = Moments(
        torch.stack([p.mean() for p in parts])[None],
        torch.stack([p.var(correction=0) for p in parts])[None],
        pieces.size,
    ).pooled_by(pieces.group, groups)
    for g in range(groups):
        values = x[0, d * groups // total == g].numpy()
        np.testing.assert_allclose(table.mean[0, g], values.mean(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(table.var[0, g], values.var(), rtol=1e-12, atol=1e-12)


def test_variance_does_not_cancel():
    """E[x²] − E[x]² in float32 would lose everything here."""
    x = 4096 + torch.randn(16, 8, 16, 16)
    layer = nk.BN(8, momentum=1.0)
    layer(x)
    expected = x.double().var((0, 2, 3))
    torch.testing.assert_close(layer.running_var.double(), expected, rtol=1e-4, atol=0)


WORKERS = ["bn", "batch_renorm", "rbn", "iebn", "bnet", "ubn", "ibn", "sn", "shifted_bn", "bgn"]


@pytest.mark.parametrize("n", [6, 8], ids=["even", "ragged"])
@pytest.mark.parametrize("name", [*WORKERS, "bcn", "gbgn", "input_norm"])
def test_virtual_batch_is_what_a_worker_sees(name, n):
    """Each run of k samples as its own worker computes it; buffers are the workers' average."""
    k = 3
    layer = build((name, {"virtual_batch": k}))
    worker = build((name, {}))
    worker.load_state_dict(layer.state_dict())
    x = inputs(n).requires_grad_()
    runs = [run.detach().clone().requires_grad_() for run in x.split(k)]
    workers = [copy.deepcopy(worker) for _ in runs]
    expected = torch.cat([w(run) for w, run in zip(workers, runs, strict=True)])
    y = layer(x)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(x.grad, torch.cat([run.grad for run in runs]))
    share = torch.tensor([len(run) / n for run in runs], dtype=torch.float64)
    for key, value in layer.named_buffers():
        if key.startswith("running"):
            theirs = torch.stack([dict(w.named_buffers())[key] for w in workers], 1)
            torch.testing.assert_close(value, theirs @ share, msg=key)


@pytest.mark.parametrize(
    ("channels", "groups", "policy", "expected"),
    [
        (64, 32, "error", 32),
        (16, 64, "clip_to_channels", 16),
        (36, 32, "gcd", 4),
        (36, 32, "largest_divisor", 18),
        (24, 16, "largest_divisor", 12),
        (64, None, "error", 32),
        (256, None, "error", 32),
        (16, None, "error", 4),
        (3, None, "error", 1),
    ],
)
def test_resolve_groups(channels, groups, policy, expected):
    assert resolve_groups(channels, groups, policy) == expected


def test_clip_does_not_bend_what_does_not_divide():
    with pytest.raises(OptionError, match="groups=12"):
        resolve_groups(24, 16, "clip_to_channels")
