"""Distilling on flipped and cropped images: what they are, when, and who is asked about them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk
from normkit.conversion.fit import distill
from normkit.conversion.fit.views import LEAST_AREA, flipped_and_cropped


def blobs(count: int, size: int = 24) -> Tensor:
    """Images without a preferred direction, and nothing in them that is small."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(count, 3, 5, 5, generator=generator)
    return F.interpolate(coarse, (size, size), mode="bicubic")


def noise(count: int, size: int = 24) -> Tensor:
    """Grains, of which a crop in full size makes spots."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def network(images: Tensor) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    with torch.no_grad():
        for _ in range(20):
            model(images)
    return model.eval()


def test_views_are_parts_of_the_image() -> None:
    """Of an image whose value is the place, a view is a line over a part of it, up or down."""
    places = (torch.arange(64.0) + 0.5).expand(40, 1, 64, 64)
    views = flipped_and_cropped(places, torch.Generator().manual_seed(0))
    assert views.shape == places.shape
    assert torch.allclose(views.std(2), torch.zeros(40, 1, 64), atol=1e-3)  # rows are alike
    slopes = views[:, 0, 0].diff().median(1).values
    assert 10 < int((slopes < 0).sum()) < 30
    assert float(slopes.abs().max()) <= 1 + 1e-4
    widths = slopes.abs()
    assert float(widths.min()) >= (LEAST_AREA * 3 / 4) ** 0.5 - 1e-3
    assert bool((views >= 0.5 - 1e-3).all() and (views <= 63.5 + 1e-3).all())
    again = flipped_and_cropped(places, torch.Generator().manual_seed(0))
    assert torch.equal(views, again)


@pytest.mark.parametrize("shape", [(4, 10), (4, 3, 20), (4, 3, 2, 2), (4, 3, 8, 8, 8)])
def test_what_is_no_image_stays_as_it_is(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.equal(flipped_and_cropped(x, torch.Generator()), x)


def test_views_are_learned_from_where_the_fit_holds_for_them() -> None:
    """Digits in a mirror are no digits: to match the network there made it worse for others. So
    the fit has to hold for views as it does for the images."""
    told = {}
    for name, images, augment in (
        ("blobs", blobs(30), True), ("asked not to", blobs(30), False), ("noise", noise(30), True)
    ):  # fmt: skip
        fit = nk.Fit(images, distill=1, augment=augment)
        report = nk.plan_conversion(network(images), "gn", groups=1, fit=fit).fit
        told[name] = report.notes[-1].partition("of 1 steps, ")[2].split()[0]
    assert told == {"blobs": "with", "asked not to": "without", "noise": "without"}


@pytest.mark.parametrize("standardize", [None, "ws"])
def test_the_teacher_is_the_old_network(
    standardize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers for the views, inside the same modules: with its own norms and plain weights."""
    model = network(blobs(30))
    old = copy.deepcopy(model)
    asked: list[Tensor] = []
    train = distill._train

    def checked(student: Any, inputs: Tensor, *rest: Any) -> None:
        asked.append(inputs)
        with torch.no_grad():
            assert torch.equal(student.teacher(inputs)[0], old(inputs))
            assert not torch.allclose(student(inputs)[0], old(inputs))
        train(student, inputs, *rest)

    monkeypatch.setattr(distill, "_train", checked)
    fit = nk.Fit(blobs(30), distill=5, batch=16, standardize=standardize)
    nk.plan_conversion(model, "gn", groups=1, fit=fit)
    assert [len(x) for x in asked] == [8] * 5
    assert len({float(x.double().sum()) for x in asked}) == 5  # other images, or other views
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), old.parameters(), strict=True))
