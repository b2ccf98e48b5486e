"""Bad input: an error that names what came, what was expected and what to try; nothing changed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import normkit as nk
from cases import ACTIVATION, CHANNELS, build, inputs, within
from normkit.errors import DeviceError, DtypeError, OptionError, ShapeError, UnknownName

POOLING = ["bn", "ghost_bn", "input_norm", "shifted_bn", "rbn", "iebn", "bnet", "ubn", "ibn", "bcn"]


def refused(layer, x, error, match):
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=match):
        layer(x)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ACTIVATION)
class TestEveryLayer:
    def test_wrong_channels(self, name):
        refused(
            build((name, {})),
            inputs(channels=5),
            ShapeError,
            r"\(N, 8, \*spatial\).*\(6, 5, 4, 4\)",
        )

    def test_channels_last_by_mistake(self, name):
        x = torch.randn(6, 4, 4, CHANNELS, dtype=torch.float64)
        refused(build((name, {})), x, ShapeError, r"movedim\(-1, 1\)")

    def test_missing_batch_axis(self, name):
        x = torch.randn(CHANNELS, 4, 4, dtype=torch.float64)
        refused(build((name, {})), x, ShapeError, r"unsqueeze\(0\)")

    def test_vector(self, name):
        refused(build((name, {})), torch.randn(CHANNELS), ShapeError, "batch axis")

    @within(dtype=(torch.int64, torch.uint8, torch.bool, torch.complex64))
    def test_not_floating_point(self, name, dtype):
        refused(build((name, {})), inputs().to(dtype), DtypeError, rf"{dtype}.*float\(\)")

    def test_sparse(self, name):
        """It was torch's "unsupported memory format option Contiguous"."""
        refused(build((name, {})), inputs().to_sparse(), ShapeError, r"sparse_coo.*to_dense\(\)")

    def test_other_device(self, name):
        layer = nk.make(name, CHANNELS)
        if not (*layer.parameters(), *layer.buffers()):
            pytest.fail("every layer has a parameter or buffer by default")
        refused(layer, torch.empty(6, 8, 4, 4, device="meta"), DeviceError, "meta")

    def test_residual_of_another_shape(self, name):
        layer, x = build((name, {})), inputs()
        before = copy.deepcopy(layer.state_dict())
        with pytest.raises(ShapeError, match="residual"):
            layer(x, x.new_zeros(6, 8, 4, 1))
        with pytest.raises(OptionError, match="'relu'"):
            layer(x, None, "relo")
        with pytest.raises(OptionError, match="Unknown activation None"):
            layer(x, None, None)
        assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())

    @within(channels=(0, -1, 2.0, "8", True, None))
    def test_impossible_channels(self, name, channels):
        with pytest.raises(OptionError, match=r"channels to be a positive integer"):
            nk.make(name, channels)

    def test_unknown_option(self, name):
        with pytest.raises(OptionError, match=r"no option 'epz'.*'eps'"):
            nk.make(name, CHANNELS, epz=1e-3)

    @within(eps=(-1e-5, float("nan"), float("inf")))
    def test_impossible_eps(self, name, eps):
        with pytest.raises(OptionError, match="eps"):
            nk.make(name, CHANNELS, eps=eps)


def test_an_unknown_activation_of_layers_without_parameters():
    """Of dyt and gw it was a bare KeyError: without scale and shift nobody looked at its name."""
    tried = 0
    for name in ACTIVATION:
        try:
            layer = nk.make(name, CHANNELS, affine=False)
        except OptionError:  # it has no such option
            continue
        tried += 1
        for backend in ("auto", "torch"):
            with nk.use_backend(backend), pytest.raises(OptionError, match="Unknown activation"):
                layer(torch.randn(6, CHANNELS, 4, 4), None, "tanh")
    assert tried > 10


@pytest.mark.parametrize("name", POOLING)
def test_one_value_per_channel(name):
    layer = build((name, {"ratio": 0.0} if name == "ibn" else {}))
    refused(layer, inputs(1, ()), ShapeError, "more than one value per channel.*drop_last")


@pytest.mark.parametrize("name", ["bn", "rbn", "ubn", "bcn"])
def test_one_value_falls_back_if_asked(name):
    layer = build((name, {"on_single": "running"}))
    before = copy.deepcopy(layer.state_dict())
    x = inputs(1, ())
    y = layer(x)
    for key, value in layer.state_dict().items():
        if key.startswith("running") or key == "num_batches_tracked":
            assert torch.equal(value, before[key]), key
    torch.testing.assert_close(y, layer.eval()(x))


def test_ragged_last_run_of_one():
    refused(nk.BN(8, virtual_batch=2), torch.randn(5, 8), ShapeError, "1 sample")


@pytest.mark.parametrize("name", ["gn", "bcn", "gbgn", "gw"])
def test_groups_must_divide(name):
    with pytest.raises(OptionError, match=r"channels=24, groups=16. Try groups=12"):
        nk.make(name, 24, groups=16)


def test_more_groups_than_values():
    refused(nk.BGN(8, groups=129), torch.randn(6, 8, 4, 4), ShapeError, "129 groups.*128 values")


def test_uneven_groups_refused_if_asked():
    layer = nk.BGN(8, groups=5, remainder="error")
    refused(layer, torch.randn(6, 8, 4, 4), ShapeError, "balanced")


def test_unknown_name():
    with pytest.raises(UnknownName, match="'bgn'"):
        nk.make("bgnn", 8)
    with pytest.raises(UnknownName, match="Known: batch_renorm"):
        nk.make("zzzzz", 8)
    with pytest.raises(OptionError, match="'weight'"):
        nk.names("weights")


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("bn", {"momentum": 1.5}, "momentum"),
        ("bn", {"virtual_batch": 0}, "virtual_batch"),
        ("bn", {"form": "a3"}, "a1, a2, standard"),
        ("bn", {"on_single": "skip"}, "on_single"),
        ("bn", {"momentum": "0.1"}, "momentum"),
        ("bn", {"eps": None}, "eps ≥ 0, got None"),
        ("bn", {"scale_init": float("nan")}, "scale_init"),
        ("bn", {"scale_init": "1"}, "scale_init"),
        ("input_norm", {"mode": "dataset"}, "mean and std"),
        ("input_norm", {"mode": "dataset", "mean": [0.5], "std": [1.0]}, "8 numbers"),
        ("input_norm", {"mode": "fixed", "momentum": 0.1}, "momentum"),
        ("batch_renorm", {"r_max": 0.5}, "r_max"),
        ("batch_renorm", {"r_ramp": (5, 5)}, "ramp"),
        ("batch_renorm", {"track_running_stats": False}, "running statistics"),
        ("shifted_bn", {"mean_spread": -1.0}, "spreads"),
        ("bnet", {"kernel_size": 4}, "odd kernel_size.*5"),
        ("bnet", {"init": "dirak"}, "'dirac'"),
        ("bnet", {"dims": 4}, "dims"),
        ("ubn", {"preset": "autors"}, "'authors'"),
        ("ubn", {"gate": "behind"}, "gate"),
        ("ubn", {"track_running_stats": False}, "fct=False"),
        ("ubn", {"max_samples": 0}, "max_samples"),
        ("ubn", {"score_decay": 2.0}, "score_decay"),
        ("ubn", {"tau": "0.15"}, "tau"),
        ("gn", {"group_policy": "gdc"}, "'gcd'"),
        ("gn", {"groups": 0}, "groups"),
        ("gw", {"method": "svd"}, "method"),
        ("gw", {"method": "eigh", "eps": 0.0}, "eps"),
        ("ibn", {"ratio": 1.5}, "ratio"),
        ("sn", {"use_bn": False, "momentum": 0.1}, "momentum"),
        ("ssn", {"anneal_steps": 0}, "anneal_steps"),
        ("dn", {"batch": 3}, "powers of two"),
        ("dn", {"start": "bn"}, "batch > 1"),
        ("dn", {"groups": 4}, 'start="gn" only'),
        ("dn", {"start": "gn", "groups": 0}, "positive integer"),
        ("dn", {"start": "gn", "groups": 3}, "divide 8"),
        ("bgn", {"remainder": "drop"}, "remainder"),
        ("gbgn", {"eval_weight": 2.0}, "eval_weight"),
        ("gbgn", {"examples_per_group": 0}, "examples_per_group"),
        ("bcn", {"update_rate": 0.1}, "micro=True"),
        ("bcn", {"micro": True, "momentum": 0.1}, "momentum"),
        ("bcn", {"affine_per": "layer"}, "affine_per"),
    ],
)
def test_impossible_options(name, options, match):
    with pytest.raises(OptionError, match=match):
        nk.make(name, CHANNELS, **options)


@pytest.mark.parametrize("name", ["bn", "bgn", "bcn", "gn", "ibn", "ws"])
def test_integers_of_numpy_are_integers(name):
    """Widths are often computed; torch.nn takes them as well. A kernel needs plain ones."""
    layer = nk.make(name, np.int64(CHANNELS))
    assert type(layer.channels) is int
    assert repr(layer) == repr(nk.make(name, CHANNELS))
    if "groups" in layer.options():
        assert type(nk.make(name, np.int64(CHANNELS), groups=np.int32(4)).groups) is int


def test_pn_needs_channels_and_dn_powers_of_two():
    with pytest.raises(OptionError, match="more than one channel"):
        nk.PN(1)
    with pytest.raises(OptionError, match="powers of two"):
        nk.DN(6)


def test_micro_batches_need_a_rate():
    layer = nk.BCN(8, micro=True)
    with pytest.raises(OptionError, match="follow_learning_rate"):
        layer(torch.randn(1, 8, 4, 4))
    assert layer.eval()(torch.randn(1, 8, 4, 4)).shape == (1, 8, 4, 4)


def test_errors_name_the_path():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sequential(nk.BN(8)))
    with pytest.raises(ShapeError, match=r"BN \(1\.0\) expects"):
        model(torch.randn(2, 3, 8, 8))
