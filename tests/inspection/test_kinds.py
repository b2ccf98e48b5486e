"""Which modules are norms, of which kind, and what they say about themselves."""

from __future__ import annotations

from typing import Any

import pytest
import timm.layers
import torch
import torchvision
from timm.layers import evo_norm, filter_response_norm, grn, norm, norm_act, split_batchnorm
from torch import Tensor, nn

import normkit as nk
from normkit.catalog import make, names
from normkit.inspection import is_activation, kind_of, survey


class FromScratch(nn.Module):
    """A frozen batch norm as some detection code writes it: buffers, and a telling name."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(6))


class MyFrozenBatchNorm(FromScratch):
    pass


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.variance_epsilon = 1e-6


class LayerNorm(nn.Module):
    """As in the first code of ConvNeXt, which also says where the channels are."""

    def __init__(self, data_format: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.eps = 1e-6
        self.data_format = data_format


class NormFreeBlock(nn.Module):
    """A norm by its name only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)


class OddNorm(nn.Module):
    pass


class Renamed(nn.RMSNorm):
    pass


class WithRelu(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def only(module: nn.Module) -> Any:
    """The one site of a model that is the norm itself."""
    (site,) = survey(module)
    assert site.path == ""
    assert site.module is module
    return site


# module: kind, library, channels, groups, eps, momentum, affine, tracked, channel_axis
TORCH = [
    (nn.BatchNorm1d(6), "bn", "torch", 6, None, 1e-5, 0.1, True, True, 1),
    (nn.BatchNorm2d(6, momentum=None), "bn", "torch", 6, None, 1e-5, None, True, True, 1),
    (nn.BatchNorm3d(6, affine=False), "bn", "torch", 6, None, 1e-5, 0.1, False, True, 1),
    (
        nn.BatchNorm2d(6, track_running_stats=False),
        *("bn", "torch", 6, None, 1e-5, None, True, False, 1),
    ),
    (nn.SyncBatchNorm(6, eps=1e-3), "sync_bn", "torch", 6, None, 1e-3, 0.1, True, True, 1),
    (nn.InstanceNorm1d(6), "in", "torch", 6, None, 1e-5, None, False, False, 1),
    (nn.InstanceNorm3d(6, affine=True), "in", "torch", 6, None, 1e-5, None, True, False, 1),
    (nn.GroupNorm(2, 6), "gn", "torch", 6, 2, 1e-5, None, True, False, 1),
    (nn.LayerNorm(6), "ln", "torch", 6, None, 1e-5, None, True, False, -1),
    (nn.LayerNorm((6, 4, 4)), "ln", "torch", 6, None, 1e-5, None, True, False, 1),
    (nn.RMSNorm(6, eps=1e-6), "rms", "torch", 6, None, 1e-6, None, True, False, -1),
    (nn.LazyBatchNorm2d(), "lazy_bn", "torch", None, None, 1e-5, 0.1, True, True, 1),
    (nn.LazyInstanceNorm2d(), "lazy_in", "torch", None, None, 1e-5, 0.1, True, True, 1),
    (nn.LocalResponseNorm(2), "lrn", "torch", None, None, None, None, False, False, 1),
]
TIMM = [
    (norm_act.BatchNormAct2d(6), "bn", "timm", 6, None, 1e-5, 0.1, True, True, 1),
    (norm_act.SyncBatchNormAct(6), "sync_bn", "timm", 6, None, 1e-5, 0.1, True, True, 1),
    (norm_act.FrozenBatchNormAct2d(6), "frozen_bn", "timm", 6, None, 1e-5, None, True, True, 1),
    (norm_act.GroupNormAct(6, 3), "gn", "timm", 6, 3, 1e-5, None, True, False, 1),
    (norm_act.GroupNorm1Act(6), "gn", "timm", 6, 1, 1e-5, None, True, False, 1),
    (norm_act.LayerNormAct(6), "ln", "timm", 6, None, 1e-5, None, True, False, -1),
    (norm_act.LayerNormAct2d(6), "pn", "timm", 6, None, 1e-5, None, True, False, 1),
    (norm_act.RmsNormAct2d(6), "rms", "timm", 6, None, 1e-6, None, True, False, 1),
    (norm.GroupNorm1(6), "gn", "timm", 6, 1, 1e-5, None, True, False, 1),
    (norm.LayerNorm(6), "ln", "timm", 6, None, 1e-6, None, True, False, -1),
    (norm.LayerNorm2d(6), "pn", "timm", 6, None, 1e-6, None, True, False, 1),
    (norm.LayerNorm2dFp32(6), "pn", "timm", 6, None, 1e-6, None, True, False, 1),
    (norm.LayerNormExp2d(6), "pn", "timm", 6, None, 1e-6, None, True, False, 1),
    (norm.RmsNorm(6, affine=False), "rms", "timm", 6, None, 1e-6, None, False, False, -1),
    (norm.SimpleNorm(6), "simple", "timm", 6, None, 1e-6, None, True, False, -1),
    (evo_norm.EvoNorm2dB0(6), "evo", "timm", 6, None, 1e-3, 0.1, True, True, 1),
    (evo_norm.EvoNorm2dS0(8, groups=4), "evo", "timm", 8, 4, 1e-5, None, True, False, 1),
    (
        filter_response_norm.FilterResponseNormTlu2d(6),
        *("frn", "timm", 6, None, 1e-5, None, True, False, 1),
    ),
    (grn.GlobalResponseNorm(6), "grn", "timm", 6, None, 1e-6, None, True, False, -1),
    (
        grn.GlobalResponseNorm(6, channels_last=False),
        *("grn", "timm", 6, None, 1e-6, None, True, False, 1),
    ),
    (
        split_batchnorm.SplitBatchNorm2d(6),
        *("split_bn", "timm", 6, None, 1e-5, 0.1, True, True, 1),
    ),
]
OTHERS = [
    (
        torchvision.ops.FrozenBatchNorm2d(6),
        *("frozen_bn", "torchvision", 6, None, 1e-5, None, True, True, 1),
    ),
    (
        torchvision.models.convnext.LayerNorm2d(6),
        *("pn", "torchvision", 6, None, 1e-5, None, True, False, 1),
    ),
    (MyFrozenBatchNorm(), "frozen_bn", "other", 6, None, None, None, True, True, 1),
    (LlamaRMSNorm(), "rms", "other", 6, None, 1e-6, None, True, False, -1),
    (LayerNorm("channels_first"), "pn", "other", 6, None, 1e-6, None, True, False, 1),
    (LayerNorm("channels_last"), "ln", "other", 6, None, 1e-6, None, True, False, -1),
    (Renamed(6, eps=1e-6), "rms", "other", 6, None, 1e-6, None, True, False, -1),
    (OddNorm(), "other", "other", None, None, None, None, False, False, 1),
]


@pytest.mark.parametrize("row", [*TORCH, *TIMM, *OTHERS], ids=lambda row: type(row[0]).__name__)
def test_what_a_norm_says(row: tuple[Any, ...]) -> None:
    module, *expected = row
    site = only(module)
    assert site.class_name == type(module).__name__
    assert [
        *(site.kind, site.library, site.channels, site.groups, site.eps),
        *(site.momentum, site.affine, site.tracked, site.channel_axis),
    ] == expected


@pytest.mark.parametrize("name", names("activation"))
def test_ours_have_their_name_in_the_catalog(name: str) -> None:
    layer = make(name, 8)
    site = only(layer)
    assert (site.kind, site.library, site.channels, site.channel_axis) == (name, "normkit", 8, 1)
    eps = layer.eps if layer.has_eps else None
    assert (site.eps, site.momentum) == (eps, getattr(layer, "momentum", None))
    assert site.tracked == hasattr(layer, "running_mean")
    inside = only(nk.NormAct(make(name, 8), "silu"))
    assert (inside.kind, inside.channels, inside.class_name) == (name, 8, "NormAct")
    assert isinstance(inside.act, nn.SiLU)


def test_activations_and_drop_layers_inside_a_norm() -> None:
    drop = nn.Dropout(0.5)
    site = only(norm_act.BatchNormAct2d(6, act_layer="silu", drop_layer=lambda: drop))
    assert isinstance(site.act, nn.SiLU)
    assert site.drop is drop
    assert site.followed_by == "SiLU"
    plain = only(norm_act.GroupNormAct(6, 3, apply_act=False))
    assert (plain.act, plain.drop, plain.followed_by) == (None, None, None)


def test_a_forward_that_may_do_more() -> None:
    assert only(WithRelu(6)).own_forward
    assert not only(nn.BatchNorm2d(6)).own_forward
    assert not only(norm_act.BatchNormAct2d(6)).own_forward
    patched = nn.BatchNorm2d(6)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert only(patched).own_forward


@pytest.mark.parametrize(
    "module",
    [
        timm.layers.ConvNormAct(3, 6),
        NormFreeBlock(),
        torchvision.ops.Conv2dNormActivation(3, 6),
        torchvision.transforms.Normalize([0.5], [0.5]),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nk.WS.attach(nn.Conv2d(3, 6, 3)),
        nn.TransformerEncoderLayer(8, 2),
        nn.Sequential(nn.BatchNorm2d(3)),
        nn.ReLU(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_norm(module: nn.Module) -> None:
    assert kind_of(module) is None
    assert "" not in survey(module)


def test_what_is_inside_is_listed_instead() -> None:
    assert [s.path for s in survey(timm.layers.ConvNormAct(3, 6))] == ["bn"]
    assert [s.path for s in survey(nn.TransformerEncoderLayer(8, 2))] == ["norm1", "norm2"]
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    assert len(survey(nn.Sequential(spectral))) == 0
    split = split_batchnorm.SplitBatchNorm2d(6)  # its further norms are part of it
    assert [s.path for s in survey(nn.Sequential(split))] == ["0"]


def test_activations_are_recognised() -> None:
    class QuickGELU(nn.Module):
        pass

    for module in (nn.ReLU6(), nn.SiLU(), nn.PReLU(), nn.Hardswish(), QuickGELU()):
        assert is_activation(module)
    assert is_activation(timm.layers.create_act_layer("swish"))
    assert is_activation(timm.models.metaformer.StarReLU())
    for other in (nn.Dropout(), nn.MultiheadAttention(4, 1), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)):
        assert not is_activation(other)


def test_normalized_weights_are_listed_apart() -> None:
    model = nn.ModuleDict(
        {
            "ws": timm.layers.StdConv2d(3, 4, 3),
            "scaled": timm.layers.ScaledStdConv2d(3, 4, 3),
            "ours": nk.CWN.attach(nn.Conv2d(3, 4, 3)),
            "new": nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            "old": nn.utils.spectral_norm(nn.Linear(3, 3)),
            "plain": nn.Conv2d(3, 4, 3),
        }
    )
    found = {site.path: site.kind for site in survey(model).weights}
    assert found == {
        "ws": "ws",
        "scaled": "scaled_ws",
        "ours": "cwn",
        "new": "wn",
        "spectral": "spectral",
        "old": "spectral",
    }
