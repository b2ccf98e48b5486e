"""Which norms ``where`` chooses, and what it says when it chooses none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from normkit.errors import NothingToDo, OptionError
from normkit.inspection import Survey, select, survey


@pytest.fixture(scope="module")
def resnet() -> Survey:
    with torch.device("meta"):
        model = torchvision.models.resnet18()
        model.layer4[1].bn2 = nn.GroupNorm(32, 512)
    return survey(model)


def named(value: Any) -> str:
    """The same in every process: functions have addresses."""
    return "function" if callable(value) else str(value)[:40]


BLOCKS = [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]
SHORTCUTS = [f"layer{i}.0.downsample.1" for i in (2, 3, 4)]
FIRST, SECOND = [f"{b}.bn1" for b in BLOCKS], [f"{b}.bn2" for b in BLOCKS]
CHOICES: list[tuple[Any, list[str]]] = [
    ("bn1", ["bn1"]),
    ("layer4.1", ["layer4.1.bn1", "layer4.1.bn2"]),
    ("layer2.*.bn2", ["layer2.0.bn2", "layer2.1.bn2"]),
    ("*.downsample.?", SHORTCUTS),
    ("layer[12].0.bn1", ["layer1.0.bn1", "layer2.0.bn1"]),
    ("kind:gn", ["layer4.1.bn2"]),
    ("class_name:GroupNorm", ["layer4.1.bn2"]),
    ({"kind": "bn", "shortcut": True}, SHORTCUTS),
    ({"block": ["layer1.0", "layer1.1"], "position": 2}, ["layer1.0.bn2", "layer1.1.bn2"]),
    ("stem", ["bn1"]),
    ("first", FIRST),
    ("second", SECOND),
    ("last", SECOND),
    ("shortcut", SHORTCUTS),
    (("every:4", "first"), ["layer2.1.bn1", "layer4.1.bn1"]),
    (("every:2", "!shortcut", "!first"), [b + ".bn2" for b in BLOCKS[1::2]]),
    (["stem", "layer1.0"], ["bn1", "layer1.0.bn1", "layer1.0.bn2"]),
    ((["stem", "second"], "kind:bn"), ["bn1", *SECOND[:-1]]),
    ("!layer*", ["bn1"]),
    (("!first", "!second", "!shortcut"), ["bn1"]),
    (("!third", "stem"), ["bn1"]),
    (lambda site: site.channels == 64 and not site.stem, [*FIRST[:2], *SECOND[:2]]),
]


@pytest.mark.parametrize(("where", "expected"), CHOICES, ids=named)
def test_choices(resnet: Survey, where: Any, expected: list[str]) -> None:
    assert sorted(site.path for site in select(resnet, where)) == sorted(expected)


def test_the_order_is_that_of_the_model(resnet: Survey) -> None:
    assert select(resnet) == resnet.sites
    chosen = select(resnet, ["second", "stem", "shortcut", "first", "stem"])
    assert chosen == resnet.sites


def test_every_counts_blocks_from_one(resnet: Survey) -> None:
    assert {s.block for s in select(resnet, "every:2")} == set(BLOCKS[1::2])
    assert {s.block for s in select(resnet, "every:1")} == set(BLOCKS)
    assert {s.block for s in select(resnet, "every:8")} == {"layer4.1"}


def test_every_path_of_a_shared_norm_counts() -> None:
    norm = nn.BatchNorm2d(3)
    found = survey(nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(norm)}))
    assert [s.path for s in select(found, "b.*")] == ["a.0"]


def test_a_class(resnet: Survey) -> None:
    wanted = [site.path for site in resnet if type(site.module) is nn.BatchNorm2d]
    assert [site.path for site in select(resnet, nn.BatchNorm2d)] == wanted
    assert 0 < len(wanted) < len(resnet)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("layer5.*", r"'layer5\.\*' fits none of the 20 norms of ResNet.*nearest: layer"),
        ("layr1.0.bn1", r"nearest: layer1\.0\.bn1"),
        ("!layer9", "'layer9' fits none"),
        ("kind:in", "Its kinds: bn, gn"),
        ("bn", "Try where='kind:bn'"),
        (nn.LayerNorm, "LayerNorm'> fits none"),
        ("third", "It has 8 blocks, with up to 2 norms each"),
        ("every:9", "every:9"),
        (("stem", "second"), r"\('stem', 'second'\) fits none"),
        (["stem", "oops"], "'oops' fits none"),
        (lambda site: False, "fits none"),
        ({"channels": 3}, "fits none"),
    ],
    ids=named,
)
def test_what_fits_nothing_is_named(resnet: Survey, where: Any, words: str) -> None:
    with pytest.raises(NothingToDo, match=words):
        select(resnet, where)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("every:0", "k ≥ 1"),
        ("every:x", "k ≥ 1"),
        ("kid:bn", "Did you mean 'kind'"),
        ({"knd": "bn"}, "Did you mean 'kind'"),
        ("", "describes nothing"),
        ("!", "describes nothing"),
        ([], "describes nothing"),
        ((), "describes nothing"),
        (3, "got 3"),
    ],
    ids=named,
)
def test_what_cannot_be_understood(resnet: Survey, where: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        select(resnet, where)


def test_a_model_without_norms() -> None:
    empty = survey(nn.ReLU())
    assert select(empty) == ()
    with pytest.raises(NothingToDo, match="ReLU has no norms"):
        select(empty, "layer1.*")
