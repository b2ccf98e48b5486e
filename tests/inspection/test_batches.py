"""How a model is given a batch: positional arguments, lists of images, a forward of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.errors import OptionError, ShapeError
from normkit.inspection.batches import (
    ModelCall,
    call_model,
    explained,
    images_in,
    inputs_of,
    samples_in,
    takes_list,
    tensors_in,
)
from normkit.inspection.checks import refuse_meta
from normkit.inspection.run import undisturbed


class Sum(nn.Module):
    """Two positional arguments."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Detector(nn.Module):
    """A list of images, as detectors take it."""

    def forward(self, images: list[Tensor], targets: Any = None) -> list[Tensor]:
        return [image.mean((1, 2)) for image in images]


class Typed(nn.Module):
    def forward(self, images: Sequence[Tensor]) -> int:
        return len(images)


IMAGES = [torch.zeros(3, 4, 5), torch.ones(3, 6, 7)]


def test_a_tuple_is_positional_arguments() -> None:
    a, b = torch.randn(2, 3, 4, 4)
    assert torch.equal(call_model(Sum(), (a, b)), a + b)
    assert torch.equal(call_model(Sum(), {"a": a, "b": b}), a + b)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_model_that_says_so_gets_the_list(kind: type) -> None:
    assert takes_list(Detector())
    assert takes_list(Typed())
    assert not takes_list(Sum())
    found = call_model(Detector(), kind(IMAGES))
    assert [float(x.mean()) for x in found] == [0.0, 1.0]
    assert call_model(Typed(), kind(torch.zeros(3, 2, 4, 8, 8))) == 3  # as of feature maps


def test_images_alone_are_no_pair() -> None:
    model = Detector()
    assert inputs_of(IMAGES, model) is IMAGES
    assert inputs_of((IMAGES, [{}]), model) is IMAGES
    assert inputs_of((IMAGES[0], IMAGES[1]), Sum()) is IMAGES[0]
    assert images_in(model, [torch.zeros(2, 3, 4, 5)]) is None  # a batch, not an image


def test_a_call_brings_its_forward_and_its_size() -> None:
    call = ModelCall(lambda model, batch: model(batch["x"], batch["x"]), {"x": torch.ones(2, 1)})
    assert call_model(Sum(), call).tolist() == [[2.0], [2.0]]
    assert [t.shape for t in tensors_in(call)] == [(2, 1)]
    assert samples_in(call) == 2
    assert samples_in(ModelCall(call_model, IMAGES, 2)) == 2


@pytest.mark.parametrize("error", [AttributeError("no items"), KeyError("x"), IndexError("1")])
def test_a_model_that_does_not_expect_the_batch_is_explained(error: Exception) -> None:
    with pytest.raises(ShapeError, match=r"batch 3, \(2, 1\)"), explained(torch.ones(2, 1), 3):
        raise error


def test_code_that_was_compiled_in_place_is_not_run() -> None:
    """Compiled code does not run hooks that come later, so that norms went unseen."""
    model = nn.Sequential(nn.Linear(2, 2))
    model._compiled_call_impl = compiled = lambda *_: pytest.fail("compiled code ran")
    with undisturbed(model):
        assert model(torch.ones(1, 2)).shape == (1, 2)
    assert model._compiled_call_impl is compiled


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(OptionError, match="meta device"):
        refuse_meta(nn.BatchNorm1d(2, device="meta"))
