"""The condensation score on Triton: the same as in torch, from parts of moments and one read."""

from __future__ import annotations

import pytest
import torch

from cases import inputs
from normkit.core.fusion import Condensation
from normkit.core.layout import Channels
from normkit.core.moments import Moments
from normkit.engine import plain
from normkit.engine.torch.operations import condensation_score

pytest.importorskip("triton", reason="Triton is not installed")
from normkit.engine.families import condensation
from normkit.engine.triton import forms as triton_forms
from normkit.engine.triton import passes as triton_passes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
DECAY, START = 0.75, 0.4


@pytest.fixture(autouse=True)
def _nan_in_new_memory():
    """What no kernel writes stays NaN and is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["small", "large"])
def machine(request, monkeypatch):
    """A large one cuts cells into parts, and a read into programs."""
    whole = triton_passes.form_of
    caches = triton_passes._moments, condensation._launches
    if request.param == "large":
        monkeypatch.setattr(triton_forms, "UNROLL", 2)
        monkeypatch.setattr(triton_passes, "_multiprocessors", lambda device: 64)
        monkeypatch.setattr(condensation, "WIDTH", 16)
        monkeypatch.setattr(
            triton_passes,
            "form_of",
            lambda shape: whole(shape)._replace(tile_positions=16, tile_cells=8),
        )
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


def updated(x, samples, factor=1.0):
    """The score after an update, and the counter."""
    layout = Channels(x)
    score = torch.full((1,), START, device=DEVICE)
    arrivals = torch.zeros((), dtype=torch.int32, device=DEVICE)
    parts = triton_passes.moment_parts(x, layout)
    for _ in range(2):  # the counter must be ready again
        score.fill_(START)
        condensation.update_score(
            x, parts, layout, score, Condensation(samples, DECAY, factor, arrivals)
        )
        assert arrivals == 0
    return score, parts


def expected(x, samples, factor=1.0):
    wide = x[:samples].double()
    layout = Channels(wide)
    new = condensation_score(wide, Moments(*plain.moments(wide, layout), layout.count))
    return (DECAY * START + (1 - DECAY) * new * factor).float().reshape(1)


@BOTH
@pytest.mark.parametrize("samples", [1, 2, 5, 9, 11])
def test_equal_to_the_expression(samples, memory, machine):
    x = inputs(11, (5, 7), memory, torch.float32, 6).to(DEVICE)
    score, parts = updated(x, samples)
    assert (parts.splits > 1) == (machine == "large")
    torch.testing.assert_close(score, expected(x, samples), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4, 3), (3, 131, 5), (5, 1, 1, 1), (4, 1030, 3)], ids=str)
def test_any_shape(shape, dtype):
    x = (torch.randn(shape, device=DEVICE) + 0.5).to(dtype)
    score, _ = updated(x, shape[0])
    torch.testing.assert_close(score, expected(x, shape[0]), rtol=1e-5, atol=1e-6)


@BOTH
def test_a_factor(memory):
    x = inputs(6, (4, 4), memory, torch.float32).to(DEVICE)
    for samples in (1, 4):
        score, _ = updated(x, samples, samples - 1.0)
        torch.testing.assert_close(score, expected(x, samples, samples - 1.0), rtol=1e-5, atol=1e-6)


def test_a_sample_of_zeros_is_like_no_other():
    x = inputs(4, (3, 3), dtype=torch.float32).to(DEVICE)
    x[1] = 0
    score, _ = updated(x, 4)
    torch.testing.assert_close(score, expected(x, 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_changes_nothing(bad):
    x = inputs(4, (3, 3), dtype=torch.float32).to(DEVICE)
    x[2, 1, 0, 0] = bad
    assert updated(x, 4)[0] == torch.tensor(START)
    assert updated(x, 2)[0] != torch.tensor(START)  # it is not among the first two


def test_samples_beyond_the_first_are_not_read(machine):
    x = inputs(6, (4, 5), dtype=torch.float32).to(DEVICE)
    before, _ = updated(x, 3)
    x[3:] = float("nan")
    assert torch.equal(updated(x, 3)[0], before)
