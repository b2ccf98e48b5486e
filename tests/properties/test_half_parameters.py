"""Parameters in half precision are read, and then computed with in full."""

from __future__ import annotations

import copy

import pytest
import torch

import normkit as nk
from cases import build, every, inputs, label, within

CASES = [case for case in every() if case[1].get("method") != "eigh"]  # its own sensitivity


@within(training=(True, False))
@pytest.mark.parametrize("case", CASES, ids=label)
def test_the_same_as_with_these_values_in_float32(case, training):
    """Shares, gates and maps that are made of parameters alone were computed in half precision."""
    half = build(case, torch.float32).bfloat16().train(training)
    wide = copy.deepcopy(half).float()
    x = inputs(dtype=torch.float32)
    torch.testing.assert_close(half(x), wide(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_a_wider_input_is_not_narrowed(case):
    """float64 into a float32 layer: the result is as exact as the statistics."""
    narrow = build(case, torch.float32)
    wide = copy.deepcopy(narrow).double()
    x = inputs(dtype=torch.float64)
    for layer in (narrow, wide):
        layer.eval()
    torch.testing.assert_close(narrow(x), wide(x), rtol=1e-6, atol=1e-6)


def test_closed_gates_stay_closed_in_float16():
    """They became −0 there, which counts as open: instance norm turned into layer norm."""
    x = inputs(dtype=torch.float32)
    torch.testing.assert_close(nk.DN(8, start="in").half()(x), nk.IN(8)(x), rtol=1e-5, atol=1e-5)
