"""Our own networks: sizes that the papers print, options, and errors that help."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit import select, survey
from normkit.errors import OptionError, UnknownName
from normkit.lab.experiment import Model
from normkit.lab.models import NATIVE, build

CIFAR = (3, 32, 32)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "millions"),
    [
        ("resnet20", {}, "0.27"),
        ("resnet", {"depth": 164, "bottleneck": True}, "1.7"),  # He et al. 2016b, table 4
        ("resnet32", {}, "0.46"),
        ("resnet44", {}, "0.66"),
        ("resnet56", {}, "0.85"),
        ("resnet110", {}, "1.7"),
        ("wrn", {"depth": 28, "width": 10}, "36.5"),
        ("wrn", {"depth": 16, "width": 8}, "11.0"),
        ("wrn", {"depth": 40, "width": 1}, "0.6"),
    ],
)
def test_as_many_parameters_as_the_papers_print(
    name: str, options: dict[str, int], millions: str
) -> None:
    found = parameters(build(Model(f"native:{name}", options=options), 10, CIFAR)) / 1e6
    digits = len(millions.partition(".")[2])
    assert f"{found:.{digits}f}" == millions


def test_mlp_is_twenty_normalized_layers_and_an_output() -> None:
    model = build(Model("native:mlp"), 10, (1, 28, 28))
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert [m.out_features for m in linear] == [128] * 20 + [10]
    assert survey(model).kinds == {"bn": 20}


def test_every_second_layer_of_the_mlp_can_be_chosen() -> None:
    model = build(Model("native:mlp", options={"depth": 4}), 10, (1, 8, 8))
    odd = [site.path for site in select(survey(model), "!every:2")]
    assert odd == ["layers.0.norm", "layers.2.norm"]


def test_mlp_without_norms() -> None:
    model = build(Model("native:mlp", options={"norm": False, "depth": 3}), 10, (1, 8, 8))
    assert len(survey(model)) == 0
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_shortcuts_a_and_b_of_resnet() -> None:
    a, b = (
        build(Model("native:resnet20", options={"shortcut": which}), 10, CIFAR) for which in "AB"
    )
    assert parameters(b) - parameters(a) == 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64
    block = a.layer2[0].shortcut
    x = torch.randn(1, 16, 4, 4)
    passed = block(x)
    assert torch.equal(passed[:, 8:24], x[:, :, ::2, ::2])
    assert not passed[:, :8].any()
    assert not passed[:, 24:].any()


def test_zero_init_residual_makes_blocks_start_as_their_shortcut() -> None:
    model = build(Model("native:resnet20", options={"zero_init_residual": True}), 10, CIFAR)
    x = torch.rand(2, 16, 8, 8)
    assert torch.equal(model.layer1[0](x), x)


def test_wrn_looks_before_each_convolution() -> None:
    model = build(Model("native:wrn", options={"depth": 10, "width": 2}), 10, CIFAR)
    sizes = [site.channels for site in survey(model)]
    assert sizes == [16, 32, 32, 64, 64, 128, 128]


def test_four_layer_pools_after_each_convolution() -> None:
    model = build(Model("native:four_layer"), 10, CIFAR)
    sizes: list[tuple[int, ...]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda m, a, y: sizes.append(tuple(y.shape[1:])))
    assert model(torch.randn(1, *CIFAR)).shape == (1, 10)
    assert sizes == [(32, 16, 16), (32, 8, 8), (32, 4, 4), (32, 2, 2)]


DETECTORS = {"faster_rcnn", "mask_rcnn"}  # which take lists of images: tests/lab/tasks


@pytest.mark.parametrize("name", sorted(NATIVE.keys() - DETECTORS))
@pytest.mark.parametrize("shape", [(1, 8, 8), (4, 12, 10)])
def test_any_channels_sizes_and_classes(name: str, shape: tuple[int, int, int]) -> None:
    small = {"wrn": {"depth": 10, "width": 1}, "deeplabv3": {"backbone": "resnet18"}}
    model = build(Model(f"native:{name}", options=small.get(name, {})), 7, shape)
    every_pixel = shape[1:] if name == "deeplabv3" else ()
    assert model(torch.randn(2, *shape)).shape == (2, 7, *every_pixel)


@pytest.mark.parametrize(("stride", "rates"), [(16, (6, 12, 18)), (8, (12, 24, 36))])
def test_deeplab_keeps_the_size_of_its_last_maps(stride: int, rates: tuple[int, ...]) -> None:
    options = {"backbone": "resnet50", "output_stride": stride}
    model = build(Model("native:deeplabv3", options=options), 7, (3, 64, 64)).eval()
    assert model.backbone(torch.randn(1, 3, 64, 64)).shape == (1, 2048, 64 // stride, 64 // stride)
    # the same network as torchvision's own way of widening the last stages
    from torchvision.models import resnet50

    wanted = resnet50(replace_stride_with_dilation=[False, stride == 8, True])
    ours = [m.dilation for m in model.backbone.modules() if isinstance(m, nn.Conv2d)]
    theirs = [m.dilation for m in wanted.modules() if isinstance(m, nn.Conv2d)]
    assert ours == theirs
    aspp = [m.dilation[0] for m in model.head[0].convs.modules() if isinstance(m, nn.Conv2d)]
    assert sorted({each for each in aspp if each > 1}) == list(rates)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Model("native:smal_cnn"), "Did you mean 'small_cnn'"),
        (Model("native:mlp", options={"dept": 3}), "Did you mean 'depth'"),
        (Model("native:resnet20", options={"depth": 56}), "no option 'depth'"),
        (Model("native:resnet", options={"depth": 21}), "6n . 2, such as 20"),
        (Model("native:wrn", options={"depth": 28, "width": 0}), "positive integer"),
        (Model("native:resnet20", options={"shortcut": "C"}), "shortcut='C'"),
        (Model("native:mlp", stem="cifar"), "stem='own'"),
        (Model("native:mlp", stem="cifr"), "Did you mean 'cifar'"),
    ],
)
def test_errors_name_what_was_meant(model: Model, says: str) -> None:
    with pytest.raises((OptionError, UnknownName), match=says):
        build(model, 10, CIFAR)


def test_resnet18_is_torchvisions_with_a_small_stem() -> None:
    pytest.importorskip("torchvision")
    ours = build(Model("native:resnet18"), 10, CIFAR).eval()
    theirs = build(Model("torchvision:resnet18", stem="cifar"), 10, CIFAR).eval()
    values = theirs.state_dict().values()
    assert [v.shape for v in ours.state_dict().values()] == [v.shape for v in values]
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    x = torch.randn(2, *CIFAR)
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
