"""What a card claims is true, and what it does not claim is false where that can be seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from cases import ACTIVATION, CHANNELS, build, every, inputs, label, within
from normkit import catalog


def trained_bn(dims=2, affine=True):
    bn = getattr(nn, f"BatchNorm{dims}d")(CHANNELS, eps=1e-3, momentum=0.2, affine=affine).double()
    with torch.no_grad():
        if affine:
            bn.weight.uniform_(-1.5, 1.5)
            bn.bias.uniform_(-1, 1)
    for _ in range(20):
        bn(3 + 2 * torch.randn(8, CHANNELS, *(5,) * dims, dtype=torch.float64))
    return bn


@within(training=(True, False), affine=(True, False))
@pytest.mark.parametrize("name", ACTIVATION)
def test_from_batch_norm(name, training, affine):
    """Same device, type and mode; and equal in eval mode if and only if the card says so."""
    bn = trained_bn(affine=affine).train(training)
    layer = catalog.find(name).from_batch_norm(bn)
    assert layer.training == training
    if layer.card.statistics != "none":  # or there is nothing to divide by
        assert layer.eps == bn.eps
    for key, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if tensor.is_floating_point():
            assert tensor.dtype == torch.float64, key
    x = 3 + 2 * inputs()
    y, expected = layer.eval()(x), bn.eval()(x)
    if layer.card.exact_from_bn:
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    else:
        assert (y - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ACTIVATION)
def test_from_batch_norm_keeps_it_frozen(name):
    bn = trained_bn()
    bn.requires_grad_(False)
    assert not any(p.requires_grad for p in catalog.find(name).from_batch_norm(bn).parameters())


def test_from_batch_norm_other_sources():
    for source in (
        nn.SyncBatchNorm(CHANNELS),
        nn.BatchNorm1d(CHANNELS),
        nk.BN(CHANNELS),
        nk.FrozenBN(CHANNELS),
    ):
        assert nk.BGN.from_batch_norm(source).groups == CHANNELS
    with pytest.raises(nk.NormkitError, match="track_running_stats=True"):
        nk.BN.from_batch_norm(nn.BatchNorm2d(CHANNELS, track_running_stats=False))
    with pytest.raises(nk.NormkitError, match="GroupNorm"):
        nk.BN.from_batch_norm(nn.GroupNorm(2, CHANNELS))


@pytest.mark.parametrize("options", [{"form": "a1"}, {"form": "a2"}, {"virtual_batch": 2}])
def test_bn_forms_start_equal(options):
    bn = trained_bn().eval()
    x = inputs()
    torch.testing.assert_close(
        nk.BN.from_batch_norm(bn, **options)(x), bn(x), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("gate", ["after", "before"])
@pytest.mark.parametrize("affine_conv", [True, False])
def test_ubn_starts_equal_with_either_gate(gate, affine_conv):
    bn = trained_bn().eval()
    layer = nk.UBN.from_batch_norm(bn, gate=gate, affine_conv=affine_conv)
    x = inputs()
    torch.testing.assert_close(layer(x), bn(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", every(), ids=label)
def test_same_in_eval(case):
    """Train and eval compute the same function, or visibly not."""
    layer = build(case)
    x = inputs()
    y, z = layer.train()(x), layer.eval()(x)
    if layer.card.same_in_eval or nothing_differs(case):
        torch.testing.assert_close(y, z)
    else:
        assert (y - z).abs().max() > 1e-3


def nothing_differs(case):
    """Options that leave nothing of the batch in training, though the layer in general has it."""
    name, options = case
    return (
        (name == "input_norm" and options.get("mode") == "fixed")
        or (name == "bcn" and options.get("micro"))  # updated estimates, which eval mode uses too
        or (name == "ubn" and options.get("preset") == "paper")  # likewise
        or (name == "ubn" and options.get("tau") == 1.0)  # frozen from the first batch on
        or (name == "sn" and not options.get("use_bn", True))
        or (name == "dn" and options.get("start") != "bn")
    )


@pytest.mark.parametrize("name", ACTIVATION)
def test_pools_samples(name):
    """Whether another sample in the batch changes what happens to the first."""
    layer = build((name, {})).train()
    twin = build((name, {}))
    twin.load_state_dict(layer.state_dict())
    x = inputs()
    other = x.clone()
    other[1:] = 5 * torch.randn_like(other[1:])
    difference = (layer(x)[0] - twin(other)[0]).abs().max()
    assert (difference > 1e-3) == layer.card.pools_samples


@pytest.mark.parametrize("name", ACTIVATION)
def test_statistics(name):
    """Whether another value of the input changes what happens to the first, in training."""
    layer = build((name, {}))
    twin = build((name, {}))
    twin.load_state_dict(layer.state_dict())
    x = inputs()
    other = 5 * torch.randn_like(x)
    other[0, 0, 0, 0] = x[0, 0, 0, 0]
    difference = (layer(x) - twin(other))[0, 0, 0, 0].abs()
    assert (difference > 1e-3) == (layer.card.statistics == "input")
    assert layer.uses_moments() == (layer.card.statistics == "input")
    kept = any("running" in key or "stat" in key for key, _ in layer.named_buffers())
    assert kept or layer.card.statistics != "stored"


@pytest.mark.parametrize("name", ACTIVATION)
def test_family(name):
    """A family layer is one affine map per sample and channel: y is linear in x there."""
    layer = build((name, {})).eval()
    x = inputs(2, (5, 5))
    y = layer(x)
    flat_x, flat_y = x.flatten(2), y.flatten(2)
    centred_x = flat_x - flat_x.mean(2, keepdim=True)
    centred_y = flat_y - flat_y.mean(2, keepdim=True)
    slope = (centred_x * centred_y).sum(2) / centred_x.square().sum(2)
    rest = (centred_y - slope[..., None] * centred_x).abs().max()
    assert (rest < 1e-10) == layer.card.family
