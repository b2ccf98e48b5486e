"""A scale without a shift, or a shift without a scale, on every path: the same as with the value
that changes nothing in the place of what is missing, or words."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import catalog
from normkit.errors import NormkitError

NEUTRAL = {"weight": 1.0, "bias": 0.0}


def refusal(layer, x):
    try:
        copy.deepcopy(layer)(x)
    except NormkitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", catalog.names("activation"))
@pytest.mark.parametrize("missing", NEUTRAL)
@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_half_of_the_affine_map(name, missing, backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    whole = nk.make(name, 16).to(device)
    own = getattr(whole, missing, None)
    if not isinstance(own, nn.Parameter) or own.dim() > 1:
        pytest.skip(f"{name} has no {missing} of one number a channel that is learned")
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.shape == own.shape:
                parameter.uniform_(0.5, 1.5)
        own.fill_(NEUTRAL[missing])
    half = copy.deepcopy(whole)
    setattr(half, missing, None)
    x = torch.randn(4, 16, 5, 5, device=device) * 2 + 1
    for training in (True, False):
        with nk.use_backend("torch"):
            expected = whole.train(training)(x, torch.ones_like(x), "silu")
        with nk.use_backend(backend):
            if said := refusal(half.train(training), x):
                assert f"no {missing}" in said
                continue
            found = half.train(training)(x, torch.ones_like(x), "silu")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
