"""normkit list, info and survey, and the help of all commands."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normkit import catalog, inspection
from normkit.commands import COMMANDS
from normkit.commands.info import sections

Run = Callable[..., Any]


def test_list_has_every_layer(normkit: Run) -> None:
    ran = normkit("list")
    assert (ran.status, ran.err) == (0, "")
    first_words = [line.split()[0] for line in ran.out.splitlines() if line.strip()]
    assert [word for word in first_words if word in catalog.ENTRIES] == catalog.names()
    assert re.search(r"ubn +Unified Batch Normalization .*the batch +yes", ran.out)


def test_list_of_one_kind(normkit: Run) -> None:
    out = normkit("list", "--kind", "weight").out
    assert "Weight Standardization" in out
    assert "Unified Batch Normalization" not in out


@pytest.mark.parametrize("name", catalog.names())
def test_info_says_what_docstring_and_card_say(normkit: Run, name: str) -> None:
    layer = catalog.find(name)
    ran = normkit("info", name)
    assert ran.status == 0
    said = " ".join(ran.out.split())
    assert layer.card.title in said
    assert layer.card.paper in said
    for line in inspect.cleandoc(layer.__doc__).splitlines():
        words = " ".join(re.sub(r"^(Formula|Statistics|Shapes|Use when|Avoid when|Paper)"
                                r"(, [^:]*)?:", "", line).split())  # fmt: skip
        assert words in said
    for option in layer.options():
        assert f"{option}=" in said or option in ("device", "dtype")


def test_info_has_all_parts_in_order() -> None:
    for layer in catalog.ENTRIES.values():
        heads = [head for head, _ in sections(inspect.cleandoc(layer.__doc__).split(">>>")[0])]
        heads = [head.split(",")[0] for head in heads]
        assert heads == ["", "Formula", "Statistics", "Shapes", "Use when", "Avoid when", "Paper"]


def test_survey_of_a_file(normkit: Run) -> None:
    ran = normkit("survey", "nets:small_net", "--build", "width=16", "--json", "norms.json")
    assert ran.status == 0, ran.err
    assert "2 of 2 norms (2 bn)" in ran.out
    assert re.search(r"^ *4 +bn +16", ran.out, flags=re.MULTILINE)
    norms = json.loads(Path("norms.json").read_text(encoding="utf-8"))
    assert [norm["path"] for norm in norms] == ["1", "4"]
    assert [norm["channels"] for norm in norms] == [16, 16]


def test_survey_of_a_library_needs_no_memory(normkit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    survey = inspection.survey

    def spy(model: nn.Module, example: object = None) -> Any:
        seen.extend(model.parameters())
        return survey(model, example)

    monkeypatch.setattr(inspection, "survey", spy)
    ran = normkit("survey", "torchvision:vgg11_bn")
    assert ran.status == 0, ran.err
    assert "8 of 8 norms (8 bn)" in ran.out
    assert len(seen) > 16
    assert all(tensor.is_meta for tensor in seen)


def test_survey_chooses(normkit: Run) -> None:
    ran = normkit("survey", "timm:resnet18", "--where", "layer4.*,!shortcut", "--where", "stem")
    assert "5 of 20 norms" in ran.out
    assert "layer4.1.bn2" in ran.out
    assert "layer4.0.downsample.1" not in ran.out


def test_survey_observes(normkit: Run) -> None:
    guessed = normkit("survey", "nets:Shared").out
    seen = normkit("survey", "nets:Shared", "--example", "1x3x4x4").out
    assert "×2" in guessed
    assert "×2" in seen


@pytest.mark.parametrize("command", ["", *(command.NAME for command in COMMANDS)])
def test_help_teaches_by_example(normkit: Run, command: str) -> None:
    ran = normkit(*command.split(), "--help")
    assert ran.status == 0
    assert "examples:" in ran.out
    assert f"normkit {command}".strip() in ran.out.partition("examples:")[2]
    assert max(map(len, ran.out.splitlines())) <= 100


def test_without_a_command(normkit: Run) -> None:
    ran = normkit()
    assert ran.status == 2
    assert "usage: normkit" in ran.out


def test_version(normkit: Run) -> None:
    assert torch.__version__ in normkit("--version").out
