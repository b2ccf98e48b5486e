"""Running statistics cannot be poisoned: one bad batch, whatever is bad about it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import normkit as nk
from cases import build, every, inputs, label, within
from normkit.errors import NonFiniteWarning

TRACKING = [case for case in every() if "nonfinite_batches" in dict(build(case).named_buffers())]


def tracks(layer):
    return getattr(layer, "num_batches_tracked", None) is not None


@within(bad=(float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("case", TRACKING, ids=label)
def test_a_bad_batch_never_enters_a_buffer(case, bad):
    layer = build(case)
    layer(inputs())
    before = copy.deepcopy(layer.state_dict())
    x = inputs()
    x[1, :, 0, 0] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        layer(x)
    for key, value in layer.state_dict().items():
        same = torch.equal(value, before[key])
        # the score and the annealed radius may move with a count or finite part, never to NaN
        assert same or torch.isfinite(value).all(), key
        if key.startswith("running"):
            assert same, key
    if tracks(layer) and case[0] != "input_norm":
        assert layer.nonfinite_batches == 1
        assert layer.num_batches_tracked == 1
    layer(inputs())  # and training goes on
    for key, value in layer.state_dict().items():
        assert torch.isfinite(value).all(), key


def test_the_warning_names_the_layer_and_comes_once():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.bn2 = nk.BN(8)

        def forward(self, x):
            return self.bn2(self.conv(x))

    model = nn.Sequential()
    model.add_module("layer3", nn.Sequential(Block(), Block()))
    bad = torch.full((2, 3, 9, 9), float("nan"))
    with pytest.warns(NonFiniteWarning, match=r"BN \(bn2\)"):
        model.layer3[0](bad)
    model.layer3[0](bad)  # a second warning would be an error here
    model = nn.Sequential()
    model.add_module("layer3", nn.Sequential(Block()))
    with pytest.warns(NonFiniteWarning, match=r"BN \(layer3\.0\.bn2\)"):
        model(bad)
    assert model.layer3[0].bn2.nonfinite_batches == 1


def test_the_counter_is_not_part_of_the_checkpoint():
    """It would not load into nn.BatchNorm."""
    assert set(nk.BN(8).state_dict()) == set(nn.BatchNorm2d(8).state_dict())


@pytest.mark.parametrize("name", ["bn", "sn", "bgn", "ubn"])
def test_statistics_of_torch_would_have_been_poisoned(name):
    """The difference the guard makes, beside torch.nn in the same run."""
    theirs, ours = nn.BatchNorm2d(8), nk.make(name, 8)
    x = inputs(dtype=torch.float32)
    x[0, 0, 0, 0] = float("inf")
    theirs(x)
    with pytest.warns(NonFiniteWarning):
        ours(x)
    good = inputs(dtype=torch.float32)
    assert not torch.isfinite(theirs.eval()(good)).all()
    assert torch.isfinite(ours.eval()(good)).all()


def test_bcn_collects_only_good_micro_batches():
    layer = nk.BCN(8, groups=2, micro=True, update_rate=1.0, update_every="step")
    good, bad = torch.randn(1, 8, 4, 4), torch.full((1, 8, 4, 4), float("nan"))
    layer(good)
    with pytest.warns(NonFiniteWarning, match="left it out"):
        layer(bad)
    layer.commit()
    torch.testing.assert_close(layer.running_mean, good.mean((0, 2, 3)))
    assert layer.num_batches_tracked == 1
    layer.commit()  # nothing pending: nothing happens
    assert layer.num_batches_tracked == 1
    torch.testing.assert_close(layer.running_mean, good.mean((0, 2, 3)))
