"""The libraries' networks, fitted to small images, other channels and other classes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from normkit.errors import OptionError, UnknownName
from normkit.lab.experiment import Model
from normkit.lab.models import build

CIFAR = (3, 32, 32)

# name, the side of the last maps for 32×32 pixels
STEMS = [
    ("torchvision:resnet18", 4),
    ("torchvision:resnext50_32x4d", 4),
    ("torchvision:mobilenet_v2", 8),
    ("torchvision:densenet121", 4),
    ("torchvision:shufflenet_v2_x0_5", 4),
    ("timm:resnet18", 4),
    ("timm:res2net50_26w_4s", 4),
    ("timm:repvgg_a0", 4),
    ("timm:inception_v4", 7),
]


def last_side(model: nn.Module) -> int:
    """The side of the last maps with more than one channel, of 32×32 pixels."""
    sides: list[int] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        sides.append(y.shape[-1])

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        assert model.eval()(torch.randn(1, *CIFAR)).shape == (1, 10)
    return sides[-1]


@pytest.mark.parametrize(("name", "side"), STEMS)
def test_the_stem_for_cifar_keeps_the_resolution(name: str, side: int) -> None:
    pytest.importorskip(name.partition(":")[0])
    assert last_side(build(Model(name, stem="cifar"), 10, CIFAR)) == side


def test_the_stem_of_revisiting_bn() -> None:
    pytest.importorskip("torchvision")
    model = build(Model("torchvision:resnet18", stem="cifar"), 10, CIFAR)
    said = model.conv1.kernel_size, model.conv1.stride, model.conv1.padding, model.conv1.bias
    assert said == ((3, 3), (1, 1), (1, 1), None)
    assert isinstance(model.maxpool, nn.Identity)
    # started like the other convolutions of the network: normal, by fan-out
    assert model.conv1.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962


def test_mobilenet_changes_the_strides_that_the_paper_names() -> None:
    pytest.importorskip("torchvision")
    model = build(Model("torchvision:mobilenet_v2", stem="cifar"), 10, CIFAR)
    strided = [
        i for i, block in enumerate(model.features)
        for m in block.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)
    ]  # fmt: skip
    # torchvision has strides in 0, 2, 4, 7 and 14: the stem and stages 2, 3, 4 and 6
    assert strided == [7, 14]


def test_vgg_classifies_one_position() -> None:
    pytest.importorskip("torchvision")
    quick = {"init_weights": False}
    model = build(Model("torchvision:vgg11_bn", stem="cifar", options=quick), 10, CIFAR)
    assert model.classifier[0].in_features == 512
    assert model.eval()(torch.randn(1, *CIFAR)).shape == (1, 10)


def test_images_of_one_channel() -> None:
    pytest.importorskip("torchvision")
    for stem in ("own", "cifar"):
        model = build(Model("torchvision:resnet18", stem=stem), 10, (1, 28, 28))
        assert model.eval()(torch.randn(1, 1, 28, 28)).shape == (1, 10)


def test_networks_with_further_outputs_give_one() -> None:
    pytest.importorskip("torchvision")
    model = build(Model("torchvision:googlenet"), 10, (3, 64, 64)).train()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)


class _Own(nn.Module):
    def __init__(self, num_classes: int, in_chans: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(in_chans, num_classes)


@pytest.fixture
def somebodys(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("somebodys_models")
    module.Own, module.ready = _Own, nn.Linear(2, 3)
    monkeypatch.setitem(sys.modules, "somebodys_models", module)
    return module


def test_a_callable_is_told_of_the_data(somebodys: ModuleType) -> None:
    model = build(Model("somebodys_models:Own"), 7, (5, 8, 8))
    assert (model.fc.in_features, model.fc.out_features) == (5, 7)
    model = build(Model("somebodys_models:Own", options={"num_classes": 3}), 7, (5, 8, 8))
    assert model.fc.out_features == 3


def test_a_callable_in_the_working_directory_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed command has not the working directory in its path: the first model of a
    module there was once built without the number of classes and channels."""
    (tmp_path / "nets_of_my_own.py").write_text(
        "from torch import nn\n"
        "def build(num_classes=1000, in_chans=3):\n"
        "    return nn.Conv2d(in_chans, num_classes, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in sys.path
    made = build(Model("nets_of_my_own:build"), 7, (1, 8, 8))
    monkeypatch.delitem(sys.modules, "nets_of_my_own")
    assert (made.in_channels, made.out_channels) == (1, 7)


def test_runs_never_share_a_module(somebodys: ModuleType) -> None:
    """A reference may be to a module that exists: training it would change it for all runs."""
    model = build(Model("somebodys_models:ready"), 3, (2, 1, 1))
    assert model is not somebodys.ready
    assert torch.equal(model.weight, somebodys.ready.weight)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Model("torchvision:resnet19"), "Did you mean 'resnet1"),
        (Model("torchvision:alexnet", stem="cifar"), "no stem"),
        (Model("timm:resnet50d", stem="cifar"), "not one convolution"),
        (Model("torchvision:resnet18", options={"depth": 3}), "could not be built"),
        (Model("resnet18"), "is not a model"),
    ],
)
def test_errors_come_before_training(model: Model, says: str) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("timm")
    with pytest.raises((OptionError, UnknownName), match=says):
        build(model, 10, CIFAR)
