"""Conversion of models that people use, from timm and torchvision."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.conversion import convert, plan_conversion
from normkit.layers.norm_act import NormAct
from subjects import output, portrait, relative, trained

REASON = "timm and torchvision are extras"
timm = pytest.importorskip("timm", reason=REASON)
torchvision = pytest.importorskip("torchvision", reason=REASON)


def make(name: str) -> Any:
    library, _, which = name.partition(":")
    if library == "timm":
        return trained(timm.create_model(which, pretrained=False)).eval()
    options = {"weights_backbone": None} if which.startswith("lraspp") else {}
    return trained(torchvision.models.get_model(which, weights=None, **options)).eval()


# plain, fused activation, three branches a block, GroupNorm and LayerNorm beside batch norms
MODELS = [
    "timm:test_resnet",
    "timm:test_efficientnet",
    "timm:test_byobnet",
    "timm:test_vit3",
    "torchvision:mobilenet_v3_small",
    "torchvision:lraspp_mobilenet_v3_large",
]
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("target", ["bn", "ubn", "frozen_bn", "sync_bn"])
@pytest.mark.parametrize("name", [n for n in MODELS if "vit" not in n])
def test_exact_and_back(name: str, target: str) -> None:
    model = make(name)
    before = portrait(model)
    plan = plan_conversion(model, target, "kind:bn")
    certificate = plan.apply(IMAGES)
    assert certificate.converted > 10
    assert certificate.exact
    plan.undo()
    assert portrait(model) == before


@pytest.mark.parametrize("name", [n for n in MODELS if "vit" not in n])
def test_trained_on(name: str) -> None:
    model = convert(make(name), "bcn", example=IMAGES).train()
    result = model(IMAGES)
    loss = sum(
        t.square().mean() for t in (result.values() if isinstance(result, dict) else [result])
    )
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_fused_activations_are_kept_where_torch_drops_them() -> None:
    """torch's own conversion takes timm's norms for batch norms: 8.5 where the output is 1e-5."""
    model = make("timm:test_efficientnet")
    expected = output(model, IMAGES)
    by_torch = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert relative(expected, output(by_torch, IMAGES)) > 0.1
    acts = [type(m.act).__name__ for m in model.modules() if hasattr(m, "act")]
    convert(model, "sync_bn", example=IMAGES)
    assert relative(expected, output(model, IMAGES)) <= 1e-5
    fused = [m for m in model.modules() if isinstance(m, NormAct)]
    assert len(fused) == acts.count("SiLU")


def test_checkpoints_of_timm_load_into_the_converted_model() -> None:
    model, other = make("timm:test_efficientnet"), make("timm:test_efficientnet")
    convert(model, "bn", example=IMAGES)
    model.load_state_dict(other.state_dict())
    assert relative(output(other, IMAGES), output(model, IMAGES)) <= 1e-5


def test_the_input_size_of_timm_is_found() -> None:
    certificate = plan_conversion(make("timm:test_resnet"), "bn").apply()
    assert certificate.exact
    assert certificate.probe.startswith("random numbers (2, 3, ")


def test_a_transformer_has_nothing_to_convert() -> None:
    model = make("timm:test_vit3")
    with pytest.warns(UserWarning, match="no layer is converted"):
        convert(model, "gn")


def test_frozen_norms_of_torchvision() -> None:
    frozen = torchvision.ops.FrozenBatchNorm2d
    model = trained(torchvision.models.mobilenet_v3_small(weights=None, norm_layer=frozen)).eval()
    for target in ("frozen_bn", "bn"):
        assert plan_conversion(model, target).apply(IMAGES).exact
    assert not any(isinstance(m, frozen) for m in model.modules())
    assert not any(p.requires_grad for p in model.features[0][1].parameters())


def test_to_the_frozen_norm_of_torchvision_and_back() -> None:
    """By name and by class; in float64, where the order of a few products does not show."""
    frozen = torchvision.ops.FrozenBatchNorm2d
    parts = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, eps=1e-3))
    model = trained(nn.Sequential(*parts)).eval().double()
    x = IMAGES[..., :9, :9].double()
    expected = output(model, x)
    for target in ("torchvision_frozen_bn", "bn", frozen, "torch_bn"):
        plan = plan_conversion(model, target)
        assert plan.apply(x).exact
        assert relative(expected, output(model, x)) < 1e-12
        kinds = {type(site.norm) for site in nk.survey(model)}
        named = target in ("torchvision_frozen_bn", frozen)
        assert kinds == {{"bn": nk.BN, "torch_bn": nn.BatchNorm2d}.get(str(target), frozen)}
        assert ("become buffers" if named else "stay untrained") in str(plan)
    assert not model[1].weight.requires_grad
    nk.convert(model, frozen, example=x)
    assert plan_conversion(model, frozen).count("keep") == 2
    assert plan_conversion(model, frozen, eps=1e-3).count("convert") == 1


def test_frozen_norms_of_torchvision_need_statistics_and_images() -> None:
    for norm, reason in (
        (nn.GroupNorm(2, 4), "keeps no running statistics"),
        (nn.BatchNorm1d(4), "it is for images, and this norm has 1 spatial axes"),
    ):
        plan = plan_conversion(nn.Sequential(norm), "torchvision_frozen_bn")
        assert plan.count("convert") == 0
        assert reason in str(plan)


def test_a_detector() -> None:
    """Its boxes are chosen and sorted, so that rounding may show; each layer is exact."""
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None
    )
    certificate = plan_conversion(trained(model), "bn").apply(([torch.rand(3, 64, 64)],))
    assert certificate.converted == 46
    assert certificate.layers_exact


def test_folding_by_the_model_itself_is_warned_of() -> None:
    model = timm.create_model("repvgg_a0", pretrained=False)
    text = "reparameterize would take the new layers for batch norms: convert to torch_bn"
    assert text in str(plan_conversion(model, "bcn", "stages.0"))
    assert text not in str(plan_conversion(model, "torch_bn", "stages.0"))


def test_every_attribute_that_timm_reads_is_there() -> None:
    """Re-parametrization reads scale, shift, statistics and eps of the norms."""
    model = make("timm:efficientvit_m0")
    expected = output(model, x := torch.randn(1, 3, 224, 224))
    convert(model, "bn", example=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folded = timm.utils.reparameterize_model(model)
    assert not any(isinstance(m, nk.BN) for m in folded.modules())
    assert relative(expected, output(folded, x)) <= 1e-5
