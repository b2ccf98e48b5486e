"""Diagnosis of every layer: all measures are there or refused for a true reason, new ones no alarm.

Drawn from the catalog: a new layer is asked for all of them. What a layer says about itself is
compared with what it computes, so that a wrong answer, or one inherited by accident, is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import normkit as nk
from cases import CHANNELS, build, every, label
from normkit import catalog
from normkit.diagnosis import MEASURES, Measurements, collect
from normkit.diagnosis.diagnose import diagnose
from normkit.diagnosis.findings import KINDS
from normkit.diagnosis.observe.observer import CHEAP, DEARER
from normkit.inspection import survey
from normkit.inspection.foreign import measured
from normkit.inspection.statistics import channel_moments, pooled_statistics_of
from normkit.layers.base import Normalizer
from normkit.layers.measured import OWN_STATISTICS, Refusal

FOREIGN: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(CHANNELS),
    "BatchNorm2d, untracked": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True),
    "GroupNorm": lambda: nn.GroupNorm(2, CHANNELS),
    "LayerNorm of maps": lambda: nn.LayerNorm((CHANNELS, 12, 12)),
    "LayerNorm of rows": lambda: nn.LayerNorm(12),
    "RMSNorm": lambda: nn.RMSNorm(12),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(3),
    "timm LayerNorm2d": lambda: timm.layers.LayerNorm2d(CHANNELS),
    "timm RmsNorm2d": lambda: timm.layers.RmsNorm2d(CHANNELS),
    "timm EvoNorm2dB0": lambda: timm.layers.EvoNorm2dB0(CHANNELS),
    "timm FrozenBatchNormAct2d": lambda: timm.layers.FrozenBatchNormAct2d(
        CHANNELS, apply_act=False
    ),
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    **{label(case): lambda case=case: build(case, torch.float32) for case in every()},  # type: ignore[misc]
    **FOREIGN,
}
OURS = [label(case) for case in every()]


def inputs() -> Tensor:
    """Channels of very different size, and many values of each."""
    scale = torch.logspace(-1, 1, CHANNELS).reshape(1, -1, 1, 1)
    return (torch.randn(16, CHANNELS, 12, 12) + 0.5) * scale


def measures_of(norm: nn.Module, x: Tensor, act: nn.Module | None = None) -> Measurements:
    model = nn.Sequential(norm, act or nn.ReLU())
    return collect(model, [x], start={k: v.clone() for k, v in model.state_dict().items()})


@pytest.mark.parametrize("name", NORMS)
def test_every_measure_is_there_or_refused(name: str) -> None:
    for act, without in ((nn.ReLU(), "saturated"), (nn.Sigmoid(), "dead")):
        result = measures_of(NORMS[name](), inputs(), act)
        for measure in MEASURES.keys() - {"frozen_share"}:  # which is of the model
            if measure == "condensation_matrix":
                assert "0" in result.matrices
                continue
            value, why = result.value("0", measure), result.why_not("0", measure)
            assert (value is None) != (why is None), f"{measure}: {value}, {why}"
            assert why is None or len(why.split()) >= 3
        assert result.value("0", without) is None


@pytest.mark.parametrize("name", NORMS)
def test_what_is_observed_is_there_or_refused(name: str) -> None:
    model = nn.Sequential(NORMS[name](), nn.ReLU())
    with nk.observe(model, every=1, measures=[*CHEAP, *DEARER]) as observer:
        model(inputs())
    there = {record.measure for record in observer.records if record.path == "0"}
    for measure in (*CHEAP, *DEARER):
        assert (measure in there) != (observer.why_not("0", measure) is not None), measure


@pytest.mark.parametrize("name", NORMS)
def test_statistics_that_are_kept_are_judged(name: str) -> None:
    norm = NORMS[name]()
    kept = {key for key, _ in norm.named_buffers() if key.startswith("running_")}
    shifted = measures_of(norm, inputs()).value("0", "esm_mean") is not None
    # instance norms average what they never pool, and EvoNorm keeps no mean
    assert shifted == (bool(kept) and "InstanceNorm" not in name and "EvoNorm" not in name)


@pytest.mark.parametrize("name", NORMS)
def test_channels_share_statistics_as_the_layer_says(name: str) -> None:
    """One channel is changed: where statistics are shared, outputs of others change as well."""
    norm, x = NORMS[name](), inputs()
    result = measures_of(norm, x)
    axis = survey(nn.Sequential(norm))["0"].channel_axis
    norm.train()
    state = {key: value.clone() for key, value in norm.state_dict().items()}
    other = x.clone()
    other.select(axis, 0).mul_(3).add_(torch.randn_like(other.select(axis, 0)))
    with torch.no_grad():
        before = norm(x)
        norm.load_state_dict(state)
        after = norm(other)
    rest = slice(1, None)
    changed = not torch.allclose(
        before.movedim(axis, 0)[rest], after.movedim(axis, 0)[rest], rtol=1e-4, atol=1e-4
    )
    if result.value("0", "stat_diff") is not None:
        assert changed
        assert result.value("0", "under_represented") is not None
    elif result.why_not("0", "stat_diff") == OWN_STATISTICS:
        assert not changed


@pytest.mark.parametrize("name", [n for n in NORMS if n not in ("LayerNorm of rows", "RMSNorm")])
def test_gradient_factor_is_the_slope_of_the_layer(name: str) -> None:
    """With exact statistics y = factor · gate · x + …, read off by regression, channel by channel.

    A sample of 144 values and a gate of its own are not quite the average: hence 5 %.
    """
    norm, x = NORMS[name](), inputs()
    exact(norm, x)
    result = measures_of(norm.eval(), x)
    factor = result.channels["0"].get("gradient_factor")
    if factor is None:
        return
    with torch.no_grad():
        y = norm(x).double()
        gates = norm.gates(channel_moments(x)) if isinstance(norm, Normalizer) else Refusal()
    each = (0, 2, 3)
    centred = x.double() - x.double().mean(each, keepdim=True)
    slope = (centred * y).sum(each) / centred.square().sum(each)
    gate = 1.0 if isinstance(gates, Refusal) else gates.mean(0)
    torch.testing.assert_close(slope, factor.double() * gate, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("name", NORMS)
def test_standardized_values_are_those_of_the_layer(name: str) -> None:
    """What is left of the output of the layer if its affine map and its gate do nothing."""
    if name.startswith("bcn"):
        return  # two norms in turn: what is counted is x̂ of the first
    norm, x = NORMS[name](), inputs()
    exact(norm, x)
    neutral(norm)
    with torch.no_grad():
        found = measured(survey(nn.Sequential(norm))["0"]).standardized(
            x, channel_moments(x, survey(nn.Sequential(norm))["0"].channel_axis), batch=False
        )
        if isinstance(found, Refusal):
            return
        torch.testing.assert_close(found.float(), norm.eval()(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", OURS)
def test_gates_and_thresholds_that_exist_are_measured(name: str) -> None:
    norm, x = NORMS[name](), inputs()
    bias = dict(norm.named_parameters()).get("gate_bias")
    if bias is not None:
        with torch.no_grad():
            bias.fill_(99.0)
    result = measures_of(norm, x)
    assert result.value("0", "gate_saturation") == (None if bias is None else 1.0)
    score = dict(norm.named_buffers()).get("score")
    for measure in ("frozen", "score"):
        assert (result.value("0", measure) is None) == (score is None)


def exact(norm: nn.Module, x: Tensor) -> None:
    """Running statistics become those of x."""
    reader = pooled_statistics_of(norm)
    if reader is not None:
        reader.put(reader.pooled(channel_moments(x), x))
    elif isinstance(norm, nn.InstanceNorm2d):
        norm.running_mean.copy_(x.mean((0, 2, 3)))
        norm.running_var.copy_(x.var((0, 2, 3)))


def neutral(norm: nn.Module) -> None:
    """γ is 1, β is 0, gates are open, and nothing else is added."""
    starts = {
        "weight": 1.0,
        "bias": 0.0,
        "gate_weight": 0.0,
        "gate_bias": 99.0,
        "inner_weight": 1.0,
    }
    starts |= {"target_std": 1.0, "target_mean": 0.0}
    with torch.no_grad():
        for key, value in (*norm.named_parameters(), *norm.named_buffers()):
            if key == "weight" and value.dim() > 1 and value.shape[1] == 1:
                value.zero_()
                value[(slice(None), 0, *(size // 2 for size in value.shape[2:]))] = 1.0
            elif key in starts:
                value.fill_(starts[key])


# ---------------------------------------------------------------- new layers


def kinds(model: nn.Module, loader: Any) -> dict[str, str]:
    """The severity of each kind that was found."""
    return {f.kind: f.severity for f in diagnose(model, loader, attribution=None)}


@pytest.mark.parametrize("way", ["made", "converted"])
@pytest.mark.parametrize("name", [n for n in catalog.names("activation") if n != "frozen_bn"])
def test_a_new_layer_is_no_alarm(name: str, way: str) -> None:
    """Kernels and biases that are drawn, and scales that make up for a gate, looked trained."""
    if way == "made":
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nk.make(name, 8), nn.ReLU())
    else:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        nk.convert(model, name)
    found = kinds(model, [torch.randn(16, 3, 8, 8) + 1 for _ in range(3)])
    assert not {kind for kind, severity in found.items() if severity != "note"}


@pytest.mark.parametrize("name", ["ubn", "bnet"])
def test_a_kernel_that_was_trained_does_not_look_new(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nk.make(name, 8), nn.ReLU())
    with torch.no_grad():
        model[1].weight *= 1.5
    assert "lost-statistics" in kinds(model, [torch.randn(16, 3, 8, 8) + 1 for _ in range(3)])


def test_small_variances_of_new_weights_are_no_alarm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8))
    with torch.no_grad():
        model[0].weight *= 1e-4
    data = [torch.randn(16, 3, 8, 8) for _ in range(3)]
    assert set(kinds(model, data)) == {"untrained"}
    for x in data * 30:
        model(x)
    assert "eps-dominates" in kinds(model, data)


def test_what_cards_say_that_layers_cure_is_found_and_cured_once() -> None:
    cured = [kind for name in catalog.names() for kind in catalog.find(name).card.cures]
    assert set(cured) <= set(KINDS)
    assert len(set(cured)) == len(cured)
