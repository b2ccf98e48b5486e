"""Blocks, positions, shortcuts and stems: each answer written down by hand."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from normkit.inspection import Survey, survey


def conv(inputs: int, outputs: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)


def on_meta(build: Any, *args: Any, **options: Any) -> Survey:
    with torch.device("meta"):
        return survey(build(*args, **options))


def rows(found: Survey) -> dict[str, tuple[Any, ...]]:
    return {s.path: (s.block, s.position, s.last_in_block, s.shortcut, s.stem) for s in found}


def sizes(found: Survey) -> Counter[str]:
    """How often blocks have so many norms on the main path and on the shortcut: "3+1"."""
    main = Counter(s.block for s in found if s.block is not None and not s.shortcut)
    aside = Counter(s.block for s in found if s.shortcut)
    return Counter(f"{main[block]}+{aside[block]}" for block in found.blocks)


def outside(found: Survey) -> tuple[list[str], list[str]]:
    """The norms of the stem, and the others that are in no block."""
    stem = [s.path for s in found if s.stem]
    return stem, [s.path for s in found if s.block is None and not s.stem]


class Block(nn.Module):
    """A residual block, with a projection where channels change and no telling names."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a = conv(inputs, outputs)
        self.b = nn.BatchNorm2d(outputs)
        self.c = conv(outputs, outputs)
        self.d = nn.BatchNorm2d(outputs)
        self.e = nn.Identity()
        if inputs != outputs:
            self.e = nn.Sequential(conv(inputs, outputs, 1), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return (self.d(self.c(self.b(self.a(x)).relu())) + self.e(x)).relu()


class Listed(nn.Module):
    """The usual build: stem, stages of blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(3, 8)
        self.norm = nn.BatchNorm2d(8)
        self.stage1 = nn.Sequential(Block(8, 8), Block(8, 8))
        self.stage2 = nn.Sequential(Block(8, 16))
        self.last = nn.Sequential(conv(16, 32, 1), nn.BatchNorm2d(32))


def test_blocks_in_lists() -> None:
    found = survey(Listed())
    assert rows(found) == {
        "norm": (None, None, False, False, True),
        "stage1.0.b": ("stage1.0", 1, False, False, False),
        "stage1.0.d": ("stage1.0", 2, True, False, False),
        "stage1.1.b": ("stage1.1", 1, False, False, False),
        "stage1.1.d": ("stage1.1", 2, True, False, False),
        "stage2.0.b": ("stage2.0", 1, False, False, False),
        "stage2.0.d": ("stage2.0", 2, True, False, False),
        "stage2.0.e.1": ("stage2.0", None, False, True, False),
        "last.1": (None, None, False, False, False),
    }
    assert [s.block_index for s in found] == [None, 0, 0, 1, 1, 2, 2, 2, None]
    assert found["stage2.0.d"].where == "block 3, norm 2 (last)"
    assert found["stage2.0.e.1"].where == "block 3, shortcut"
    assert (found["norm"].where, found["last.1"].where) == ("stem", "")


def test_blocks_that_are_attributes() -> None:
    class Stage(nn.Module):
        def __init__(self, *blocks: nn.Module) -> None:
            super().__init__()
            for i, block in enumerate(blocks):
                self.add_module(f"b{i}", block)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.children():
                x = block(x)
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8))
            self.s0 = Stage(Block(8, 8))  # one block alone: still not the stage is the block
            self.s1 = Stage(Block(8, 8), Block(8, 8))

    found = survey(Model())
    assert found.blocks == ("s0.b0", "s1.b0", "s1.b1")
    assert outside(found) == (["first.1"], [])


def test_a_unit_is_no_block_unless_there_is_nothing_else() -> None:
    class Unit(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.conv = conv(inputs, outputs)
            self.norm = nn.BatchNorm2d(outputs)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).relu()

    class Inverted(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.body = nn.Sequential(Unit(channels, 16), Unit(16, 16), Unit(16, channels))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x)

    found = survey(nn.Sequential(Unit(3, 8), Inverted(8), Inverted(8), Unit(8, 32)))
    assert found.blocks == ("1", "2")
    assert sizes(found) == {"3+0": 2}
    assert outside(found) == (["0.norm"], ["3.norm"])
    alone = survey(nn.Sequential(Unit(3, 8), Unit(8, 8), nn.Flatten()))
    assert rows(alone) == {
        "0.norm": ("0", 1, True, False, False),
        "1.norm": ("1", 1, True, False, False),
    }


def test_a_plain_chain_has_units_of_one_norm() -> None:
    layers = [conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8), nn.BatchNorm2d(8), nn.ReLU()]
    found = survey(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 2)))
    assert rows(found) == {
        "1": ("1", 1, True, False, False),
        "4": ("4", 1, True, False, False),
    }
    assert [s.block_index for s in found] == [0, 1]


def test_sequentials_with_the_same_parts_are_blocks() -> None:
    def double(inputs: int, outputs: int) -> nn.Sequential:
        parts = [conv(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*parts, conv(outputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8))
            self.one, self.two = double(8, 8), double(8, 16)

    found = survey(Net())
    assert found.blocks == ("one", "two")
    assert [s.position for s in found] == [None, 1, 2, 1, 2]
    assert outside(found) == (["first.1"], [])


def test_the_module_that_adds_is_the_block() -> None:
    class Separable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm1 = conv(8, 8), nn.BatchNorm2d(8)
            self.two, self.norm2 = conv(8, 8), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm2(self.two(self.norm1(self.one(x))))

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Sequential(Separable(), Separable(), Separable())

    class Residual(Around):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.stack(x)

    class Stage(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.stack(x)

    assert survey(nn.Sequential(Residual(), Residual())).blocks == ("0", "1")
    inner = tuple(f"{i}.stack.{j}" for i in range(2) for j in range(3))
    assert survey(nn.Sequential(Stage(), Stage())).blocks == inner


def test_classes_without_a_source_have_blocks_too() -> None:
    source = """
    class Typed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)
        def forward(self, x):
            return x + self.c(self.b(self.a(x)))
    """
    scope: dict[str, Any] = {"nn": nn}
    exec(textwrap.dedent(source), scope)
    assert survey(nn.Sequential(scope["Typed"](), scope["Typed"]())).blocks == ("0", "1")


@pytest.mark.parametrize("name", ["downsample", "shortcut", "conv_skip", "identity_bn"])
def test_shortcuts_by_name(name: str) -> None:
    class Plain(nn.Module):  # channels that do not change say nothing
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = conv(8, 8), nn.BatchNorm2d(8)
            self.add_module(name, nn.Sequential(conv(8, 8, 1), nn.BatchNorm2d(8)))
            self.conv2, self.bn2 = conv(8, 8), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return x

    found = survey(nn.Sequential(Plain(), Plain()))
    assert [s.path for s in found if s.shortcut] == [f"0.{name}.1", f"1.{name}.1"]
    assert [s.position for s in found] == [1, None, 2, 1, None, 2]


def test_a_norm_before_the_first_convolution_is_not_on_the_shortcut() -> None:
    """Pre-activation blocks register the projection first, and a norm comes after it."""

    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Sequential(nn.AvgPool2d(1), conv(4, 8, 1))
            self.norm1, self.conv1 = nn.BatchNorm2d(4), conv(4, 8)
            self.norm2, self.conv2 = nn.BatchNorm2d(8), conv(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert sizes(survey(nn.Sequential(Before(), Before()))) == {"2+0": 2}


def test_torchvision_resnet18() -> None:
    found = on_meta(torchvision.models.resnet18)
    assert len(found) == 20
    blocks = [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]
    assert found.blocks == tuple(blocks)
    shortcuts = [f"layer{i}.0.downsample.1" for i in (2, 3, 4)]
    assert [s.path for s in found if s.shortcut] == shortcuts
    assert outside(found) == (["bn1"], [])
    assert [s.path for s in found if s.position == 1] == [f"{b}.bn1" for b in blocks]
    assert [s.path for s in found if s.last_in_block] == [f"{b}.bn2" for b in blocks]


MODELS = {
    # name: norms, sizes of the blocks, stem, other norms in no block
    "timm:resnet50": (53, {"3+1": 4, "3+0": 12}, ["bn1"], []),
    "torchvision:resnet50": (53, {"3+1": 4, "3+0": 12}, ["bn1"], []),
    "timm:resnest14d": (23, {"4+1": 4}, ["conv1.1", "conv1.4", "bn1"], []),
    "timm:resnetv2_50": (49, {"3+0": 16}, [], ["norm"]),
    "torchvision:mobilenet_v2": (52, {"2+0": 1, "3+0": 16}, ["features.0.1"], ["features.18.1"]),
    "torchvision:mobilenet_v3_small": (
        *(34, {"2+0": 1, "3+0": 10}, ["features.0.1"], ["features.12.1"]),
    ),
    "timm:mobilenetv3_small_050": (34, {"2+0": 1, "3+0": 10}, ["bn1"], ["blocks.5.0.bn1"]),
    "timm:efficientnet_b0": (49, {"2+0": 1, "3+0": 15}, ["bn1"], ["bn2"]),
    "torchvision:efficientnet_b0": (49, {"2+0": 1, "3+0": 15}, ["features.0.1"], ["features.8.1"]),
    "timm:efficientnetv2_rw_t": (107, {"1+0": 2, "2+0": 8, "3+0": 29}, ["bn1"], ["bn2"]),
    "torchvision:densenet121": (
        *(121, {"2+0": 58}, ["features.norm0"]),
        [*(f"features.transition{i}.norm" for i in (1, 2, 3)), "features.norm5"],
    ),
    "torchvision:vgg11_bn": (8, {"1+0": 8}, [], []),
    "timm:regnetx_002": (44, {"3+1": 4, "3+0": 9}, ["stem.bn"], []),
    "timm:repvgg_a0": (61, {"2+0": 4, "2+1": 17}, ["stem.conv_kxk.bn", "stem.conv_1x1.bn"], []),
    "timm:convnext_atto": (
        *(17, {"1+0": 12}, ["stem.1"]),
        [*(f"stages.{i}.downsample.0" for i in (1, 2, 3)), "head.norm"],
    ),
    "timm:xception41": (84, {"6+0": 9, "6+1": 4}, ["stem.0.bn", "stem.1.bn"], []),
    "timm:vit_tiny_patch16_224": (25, {"2+0": 12}, [], ["norm"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_known_models(name: str) -> None:
    library, _, model = name.partition(":")
    build = timm.create_model if library == "timm" else torchvision.models.get_model
    found = on_meta(build, model)
    norms, blocks, stem, rest = MODELS[name]
    assert len(found) == norms
    assert sizes(found) == blocks
    assert outside(found) == (stem, rest)


def test_torchvision_regnet_has_its_projection_first() -> None:
    found = survey(torchvision.models.regnet_y_400mf())  # cannot be built on meta
    assert sizes(found) == {"3+1": 4, "3+0": 12}
    shortcuts = [f"trunk_output.block{i}.block{i}-0.proj.1" for i in (1, 2, 3, 4)]
    assert [s.path for s in found if s.shortcut] == shortcuts
