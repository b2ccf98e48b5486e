"""The survey as a whole: neighbours, shared and lazy norms, odd models, the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import normkit as nk
from normkit.errors import ShapeError, UnknownName
from normkit.inspection import survey

IMAGE = torch.zeros(2, 3, 8, 8)


class Wired(nn.Module):
    """A model from its parts and a function that says how they are wired."""

    def __init__(self, wire: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.wire = wire
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.wire(self, x)


class Bottleneck(nn.Module):
    """One activation for all places, as torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.downsample(x)
        return self.relu(y)


def neighbours(model: nn.Module, example: Any = None) -> dict[str, tuple[str | None, str | None]]:
    return {site.path: (site.fed_by, site.followed_by) for site in survey(model, example)}


def test_neighbours_of_a_bottleneck() -> None:
    guessed = {
        "bn1": ("conv1", "relu"),
        "bn2": ("conv2", "relu"),
        "downsample.1": ("downsample.0", None),
    }
    assert neighbours(Bottleneck()) == guessed
    seen = {**guessed, "downsample.1": ("downsample.0", "relu")}
    assert neighbours(Bottleneck(), IMAGE) == seen
    assert neighbours(Bottleneck().to("meta"), {"x": IMAGE.to("meta")}) == seen


def test_neighbours_in_nested_sequentials() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 1)),
        nn.Sequential(nn.Identity(), nn.BatchNorm2d(4), nn.Dropout(), nn.SiLU()),
        nn.ConvTranspose2d(4, 5, 1),
        nn.GroupNorm(1, 5),
        nn.Flatten(),
        nn.Linear(320, 7),
        nn.BatchNorm1d(7),
        nn.BatchNorm1d(7),
    )
    expected = {
        "1.1": ("0.0", "1.3"),
        "3": ("2", None),
        "6": ("5", None),
        "7": (None, None),
    }
    assert neighbours(model) == expected
    assert neighbours(model, IMAGE) == expected


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (lambda m, x: m.act(m.norm(m.conv(x))), ("conv", "act")),
        (lambda m, x: m.norm(m.conv(x)).relu(), ("conv", "relu")),
        (lambda m, x: nn.functional.silu(m.norm(m.conv(x))), ("conv", "silu")),
        (lambda m, x: torch.relu_(m.norm(m.conv(x)) + x[:, :1]), ("conv", "relu")),
        (lambda m, x: m.norm(m.act(m.conv(x))), (None, None)),
        (lambda m, x: m.act(m.norm(m.conv(x)) * 2), ("conv", None)),
        (lambda m, x: m.conv(m.norm(x.repeat(1, 2, 1, 1))[:, :3]), (None, None)),
    ],
    ids=["module", "method", "function", "sum", "act first", "product", "norm first"],
)
def test_an_example_shows_what_really_happens(wire: Any, expected: Any) -> None:
    parts = {"conv": nn.Conv2d(3, 6, 1), "norm": nk.BN(6), "act": nn.ELU(inplace=True)}
    model = Wired(wire, **parts)
    assert neighbours(model, IMAGE) == {"norm": expected}
    assert neighbours(model) == {"norm": ("conv", "act")}  # the guess does not know


def test_looking_changes_nothing() -> None:
    model = Bottleneck()
    model.bn1.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    survey(model, torch.randn(2, 3, 8, 8))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert (model.training, model.bn1.training, model.bn2.training) == (True, False, True)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_failing_example_says_who_ran_the_model() -> None:
    model = Bottleneck()
    with pytest.raises(RuntimeError) as caught:
        survey(model, torch.zeros(2, 5, 8, 8))
    assert "normkit ran the model on the example" in "".join(caught.value.__notes__)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_a_shared_norm_is_one_site_with_every_path() -> None:
    norm = nn.BatchNorm2d(3)
    unit = nn.Sequential(nn.Conv2d(3, 3, 1), norm)
    model = nn.ModuleDict({"a": unit, "b": nn.Sequential(norm), "c": unit})
    (site,) = survey(model)
    assert site.path == "a.1"
    assert site.paths == ("a.1", "b.0", "c.1")
    assert site.shared
    assert survey(model)["b.0"].module is norm
    assert "×3" in str(survey(model))
    everywhere = [p for p, m in model.named_modules(remove_duplicate=False) if m is norm]
    assert everywhere == list(site.paths)


def test_a_model_that_contains_itself_ends() -> None:
    model = Bottleneck()
    model.relu.back = model  # type: ignore[assignment]
    assert [s.paths for s in survey(model)] == [("bn1",), ("bn2",), ("downsample.1",)]


def test_norms_in_a_subclass_of_sequential() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    def block() -> Residual:
        return Residual(
            *(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()),
            *(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
        )

    found = survey(nn.Sequential(block(), block()))
    assert [s.path for s in found] == ["0.1", "0.4", "1.1", "1.4"]
    assert [s.fed_by for s in found] == ["0.0", "0.3", "1.0", "1.3"]
    assert found.blocks == ("0", "1")


def test_lazy_norms() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    (site,) = survey(model)
    assert (site.kind, site.channels, site.fed_by, site.followed_by) == ("lazy_bn", None, "0", "2")
    assert "?" in str(survey(model))
    with pytest.raises(ShapeError, match="one batch"):
        survey(model, IMAGE)
    model(IMAGE)
    (site,) = survey(model, IMAGE)
    assert (site.kind, site.channels) == ("bn", 4)


def test_the_model_may_be_the_norm() -> None:
    found = survey(nn.BatchNorm2d(4))
    (site,) = found
    assert (site.path, site.block, site.position) == ("", "", 1)
    assert "(the model)" in str(found)
    assert found[""] is site


def test_a_model_without_norms() -> None:
    found = survey(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    assert len(found) == 0
    assert found.to_rows() == []
    assert str(found) == "Sequential has no normalization layers."
    standardized = survey(nn.Sequential(timm.layers.StdConv2d(3, 4, 3)))
    assert "normalized weights: 1 ws" in str(standardized)


def test_getting_a_site() -> None:
    found = survey(Bottleneck())
    assert found["bn2"] is found[1]
    assert "bn2" in found
    assert "bn3" not in found
    with pytest.raises(UnknownName, match=r"'bn3'.*Did you mean 'bn"):
        found["bn3"]
    with pytest.raises(UnknownName, match="none at all"):
        survey(nn.ReLU())["bn1"]


def test_rows_are_json() -> None:
    rows = survey(torchvision.models.resnet18()).to_rows()
    assert json.loads(json.dumps(rows)) == rows
    assert rows[0]["path"] == "bn1"
    assert rows[0]["shared"] is False
    assert not {"module", "act", "drop"} & set(rows[0])


def test_the_table_of_a_bottleneck() -> None:
    model = Bottleneck()
    model.bn2.eps = 1e-3
    assert str(survey(nn.Sequential(model, Bottleneck()))) == (
        "Sequential: 6 norms (6 bn)\n"
        "all: class BatchNorm2d, momentum 0.1, affine yes, statistics running, train mode\n"
        "\n"
        "path            kind  channels  eps    fed by  then   place\n"
        "0.bn1           bn           4  1e-05  .conv1  .relu  block 1, norm 1\n"
        "0.bn2           bn           6  0.001  .conv2  .relu  block 1, norm 2 (last)\n"
        "0.downsample.1  bn           6  1e-05  .0             block 1, shortcut\n"
        "1.bn1           bn           4  1e-05  .conv1  .relu  block 2, norm 1\n"
        "1.bn2           bn           6  1e-05  .conv2  .relu  block 2, norm 2 (last)\n"
        "1.downsample.1  bn           6  1e-05  .0             block 2, shortcut"
    )


@pytest.mark.parametrize("name", ["maxvit_pico_rw_256", "mobilevit_xxs", "densenet121"])
def test_tables_of_usual_models_fit_the_screen(name: str) -> None:
    with torch.device("meta"):
        found = survey(timm.create_model(name))
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 120
    first = [line.split("  ")[0] for line in lines]
    assert all(site.path in first for site in found)


def test_long_names_are_shortened_to_fit() -> None:
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    for name in ("a" * 60, "b" * 60):
        model = nn.ModuleDict({name: model})
    text = str(survey(model))
    assert max(map(len, text.splitlines())) <= 120
    assert "…" in text


@pytest.mark.parametrize("name", ["efficientnet_b0", "regnety_002", "resnetv2_50x1_bit"])
def test_no_norm_of_a_model_is_missed(name: str) -> None:
    """Against a count that shares nothing with the survey: leaves named norm, Act classes."""
    with torch.device("meta"):
        model = timm.create_model(name)
    expected = [
        p for p, m in model.named_modules() if type(m).__name__.startswith(("Batch", "Group"))
    ]
    assert expected
    assert [s.path for s in survey(model)] == expected


def test_converted_models_are_surveyed_again() -> None:
    model = Bottleneck()
    model.bn1 = nk.NormAct(nk.BCN.from_batch_norm(model.bn1, groups=2), model.relu)  # type: ignore[assignment]
    found = survey(model)
    assert (found["bn1"].kind, found["bn1"].groups, found["bn1"].act) == ("bcn", 2, model.relu)
    assert [s.path for s in found] == ["bn1", "bn2", "downsample.1"]
    assert neighbours(model, IMAGE)["bn1"] == ("conv1", "ReLU")


def test_a_module_of_convolutions_feeds_a_norm_by_its_last_one() -> None:
    class Chain(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            for i, layer in enumerate(layers):
                self.add_module(f"part{i}", layer)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.children():
                x = layer(x)
            return x

    separable = Chain(nn.Conv2d(3, 3, 1, groups=3), nn.Conv2d(3, 4, 1))
    assert neighbours(nn.Sequential(separable, nn.BatchNorm2d(4))) == {"1": ("0.part1", None)}
    # attention is made of linear layers too, and is not a chain of them
    linear = Chain(nn.Linear(3, 9), nn.Linear(9, 4))
    assert neighbours(nn.Sequential(linear, nn.LayerNorm(4))) == {"1": (None, None)}


def test_a_layer_without_eps_has_none_in_the_table() -> None:
    """dyt divides by nothing, and the table gave it an eps of 1e-05."""
    found = survey(nn.Sequential(nk.DyT(8), nk.GN(8, eps=1e-3)))
    assert [site.eps for site in found] == [None, 1e-3]
    assert "eps" not in str(survey(nn.Sequential(nk.DyT(8))))
