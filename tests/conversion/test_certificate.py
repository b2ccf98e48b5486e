"""Certificates: numbers that were measured, and no claim without them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.conversion import plan_conversion
from normkit.conversion.certificate import Certificate
from normkit.conversion.forward_probe import difference, leaves, rounding
from normkit.errors import OptionError
from subjects import Net, images, output, portrait, relative, trained


def test_layers_are_compared_on_the_input_of_the_old_model() -> None:
    """In the new model the second layer gets another input; that is not its own doing."""
    model = nn.Sequential(trained(nn.BatchNorm2d(3)), nn.ReLU(), trained(nn.BatchNorm2d(3))).eval()
    x = images()
    middle = model[:2](x)
    old = model[0](x), model[2](middle)
    certificate = plan_conversion(model, "gn").apply(x)
    new = model[0](x), model[2](middle)
    expected = [relative(a, b) for a, b in zip(old, new, strict=True)]
    assert list(certificate.layers) == ["0", "2"]
    assert list(certificate.layers.values()) == pytest.approx(expected, rel=1e-5)
    assert certificate.worst == max(certificate.layers.items(), key=lambda item: item[1])


def test_a_layer_that_runs_twice_counts_with_its_worst() -> None:
    model = trained(Net())
    inputs: list[Tensor] = []
    model.shared.register_forward_pre_hook(lambda m, args: inputs.append(args[0].clone()))
    output(model, x := images())
    old = [model.eval().shared(each) for each in inputs[:2]]
    certificate = plan_conversion(model, "gn", "shared").apply(x)
    worst = max(relative(a, model.shared(each)) for a, each in zip(old, inputs, strict=False))
    assert certificate.layers["shared"] == pytest.approx(worst, rel=1e-4)


def test_the_words_fit_the_numbers() -> None:
    exact = plan_conversion(trained(Net()), "bn").apply(images())
    assert exact.verdict == (
        f"Exact to rounding: the output differs by {exact.difference:.1e} relative."
    )
    other = plan_conversion(trained(Net()), "gn").apply(images())
    path, worst = other.worst or ("", 0.0)
    assert other.verdict == (
        f"The output differs by {other.difference:.1e} relative; "
        f"the layer that differs most is {path} ({worst:.1e})."
    )
    assert "4 norm(s) converted" in str(other)
    assert "Measured in eval mode with the given input (4, 3, 8, 8), float32." in str(other)


class Boxes(nn.Module):
    """A detector in small: it gives the places where its map is above a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), trained(nn.BatchNorm2d(8)))
        self.bound = 0.0

    def forward(self, x: list[Tensor]) -> list[dict[str, Tensor]]:
        maps = self.backbone(torch.stack(x)).mean(1)
        return [{"boxes": (m > self.bound).nonzero().float()} for m in maps]


def test_a_detector_that_finds_other_boxes_is_compared_by_its_maps() -> None:
    """Its certificate began with "The output differs by inf relative": the numbers of boxes before
    and after were not the same, which is no difference of infinity."""
    model, x = Boxes().eval(), list(images())
    before = model.backbone(torch.stack(x))
    certificate = plan_conversion(model, "gn", example=x).apply()
    after = model.backbone(torch.stack(x))
    assert certificate.difference is None
    assert certificate.reshaped
    assert certificate.inside == {"backbone": pytest.approx(relative(before, after), rel=1e-5)}
    first = str(certificate).splitlines()[0]
    assert "inf" not in first
    assert f"what backbone gives differs by {certificate.inside['backbone']:.1e} relative" in first
    assert json.loads(certificate.to_json())["inside"].keys() == {"backbone"}


def test_other_boxes_from_the_same_maps_are_no_contradiction() -> None:
    """Boxes that the last digit decides over come and go, whatever is exact."""

    class Wavering(Boxes):
        def forward(self, x: list[Tensor]) -> list[dict[str, Tensor]]:
            self.bound += 0.1
            return super().forward(x)

    certificate = plan_conversion(Wavering().eval(), "bn", example=list(images())).apply()
    assert certificate.reshaped
    assert certificate.inside["backbone"] <= certificate.tolerance
    assert not certificate.contradicts_exactness


def test_json() -> None:
    certificate = plan_conversion(trained(Net()), "ubn").apply(images())
    read = json.loads(certificate.to_json())
    assert read == certificate.to_dict()
    assert read["exact"] is True
    assert read["layers"].keys() == {"stem.1", "bn", "shared", "flat"}
    bad = Certificate("x", 1, "p", True, difference=math.inf, layers={"a": math.nan})
    assert json.loads(bad.to_json())["difference"] == "inf"
    assert json.loads(bad.to_json())["layers"] == {"a": "nan"}
    assert not bad.exact


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 2**-5), (torch.half, 2**-8)],
)
def test_what_counts_as_rounding(dtype: torch.dtype, limit: float) -> None:
    assert rounding(dtype) == limit


def test_nothing_is_exact_without_a_probe() -> None:
    certificate = plan_conversion(trained(Net()), "bn").apply(example=False)
    assert (certificate.exact, certificate.probed, certificate.difference) == (False, False, None)
    assert certificate.layers == {}
    assert "Not measured: example=False was given." in str(certificate)


# -------------------------------------------------------------------- finding an input


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Sequential(nn.Conv2d(5, 8, 3), nn.BatchNorm2d(8)), "(2, 5, 64, 64)"),
        (nn.Sequential(nn.Conv1d(5, 8, 3), nn.BatchNorm1d(8)), "(2, 5, 256)"),
        (nn.Sequential(nn.Conv3d(1, 8, 3), nn.BatchNorm3d(8)), "(2, 1, 16, 64, 64)"),
        (nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), "(2, 5)"),
        (nn.Sequential(nn.BatchNorm2d(4)), "(2, 4, 64, 64)"),
        (nn.Sequential(nn.BatchNorm1d(4)), "(2, 4, 256)"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(2916, 2)),
            "(2, 3, 28, 28)",
        ),
        (nn.Sequential(nn.Embedding(9, 16), nn.BatchNorm1d(16)), "tokens (2, 16)"),
    ],
)
def test_inputs_are_found(model: nn.Module, text: str) -> None:
    certificate = plan_conversion(trained(model), "bn").apply()
    assert certificate.probe.endswith(text)
    assert certificate.exact


def test_a_model_may_know_its_input() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (3, 9, 7)), nn.BatchNorm2d(3))
    model.default_cfg = {"input_size": (3, 9, 7)}
    assert plan_conversion(model, "bn").apply().probe == "random numbers (2, 3, 9, 7)"


class Particular(nn.Module):
    """Takes nothing that could be guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        return {"y": self.norm(x) * scale, "n": len(x)}


def test_a_model_that_takes_no_guess_is_converted_unmeasured() -> None:
    model = Particular()
    certificate = plan_conversion(model, "bn").apply()
    assert isinstance(model.norm, nk.BN)
    assert not certificate.probed
    assert "The model took none of: random numbers (2, 3, 64, 64)" in certificate.probe
    assert "TypeError: Particular.forward() missing 1 required" in str(certificate)


def test_an_example_may_be_keyword_arguments() -> None:
    model = Particular()
    certificate = plan_conversion(model, "bn").apply({"x": images(), "scale": 2.0})
    assert certificate.exact
    assert certificate.probe == "the given input (4, 3, 8, 8), float"


# -------------------------------------------------------------------- what can go wrong


def test_a_model_that_fails_on_the_given_input() -> None:
    model = trained(Net())
    before = portrait(model)
    plan = plan_conversion(model, "bn")
    with pytest.raises(OptionError, match=r"given input \(2, 5, 8, 8\): RuntimeError: .* Nothing"):
        plan.apply(torch.randn(2, 5, 8, 8))
    assert portrait(model) == before
    assert not plan.applied
    assert plan.apply(images()).exact


def test_a_new_layer_that_cannot_take_the_input() -> None:
    model = trained(Net())
    before = portrait(model)
    with pytest.raises(OptionError, match=r'flat: IN expects .* where="!flat"'):
        plan_conversion(model, "in").apply(images())
    assert portrait(model) == before


def test_a_converted_model_that_fails() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + self.norm.running_mean.sum()

    model = Reads()
    before = portrait(model)
    with pytest.raises(OptionError, match=r"converted model fails .* AttributeError"):
        plan_conversion(model, "gn").apply(images())
    assert portrait(model) == before
    assert plan_conversion(model, "bcn").apply(images()).probed


class Sometimes(nn.Module):
    """Has a head for training only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.extra = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.norm(x)) if self.training else self.norm(x)


@pytest.mark.parametrize(("target", "exact"), [("bn", True), ("gn", False)])
def test_layers_that_are_not_reached_are_measured_alone(target: str, exact: bool) -> None:
    certificate = plan_conversion(trained(Sometimes()), target).apply(images())
    assert certificate.unreached == ("extra",)
    assert certificate.layers.keys() == {"norm", "extra"}
    assert certificate.exact == exact
    assert "Not called for this input, and measured with random numbers: extra." in str(certificate)


class Chooses(nn.Module):
    """Sorts its results, as detectors do: rounding decides between equals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.frac(self.norm(x) * 1e7)  # the last digits


def test_a_model_in_which_rounding_shows() -> None:
    certificate = plan_conversion(trained(Chooses()), "rbn").apply(images())
    assert not certificate.exact
    assert certificate.layers_exact
    assert "though each layer alone is exact to rounding" in certificate.verdict
    assert "rounding is enough" in certificate.note


def test_outputs_of_all_forms() -> None:
    @dataclass
    class Result:
        boxes: list[Tensor]
        label: str = "x"

    a, b = torch.ones(2), torch.zeros(3)
    found = leaves({"a": a, "more": (Result([b]), torch.ones(2, dtype=torch.long), None, "text")})
    assert [id(t) for t in found] == [id(a), id(b)]
    assert leaves(torch.empty(0, 4)) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([0.0, 0.0], [0.0, 0.5], 0.5),
        ([math.nan, 2.0], [math.nan, 2.0], 0.0),
        ([math.inf, 2.0], [math.inf, 3.0], 0.5),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([1.0, math.inf], [1.0, 2.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_the_measure(before: list[float], after: list[float], expected: float) -> None:
    assert difference([torch.tensor(before)], [torch.tensor(after)]) == expected


def test_output_without_numbers() -> None:
    class Nothing(Sometimes):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:0]

    certificate = plan_conversion(Nothing(), "gn", "norm").apply(images())
    assert certificate.difference is None
    assert not certificate.exact
    assert "no numbers to compare" in str(certificate)


def test_measuring_leaves_no_trace() -> None:
    model = trained(Net()).train()
    counts = {"calls": 0}
    model.shared.register_forward_hook(lambda *_: counts.update(calls=counts["calls"] + 1))
    plan = plan_conversion(model, "ubn", preset="paper")
    before, buffers = portrait(model), {n: id(b) for n, b in model.named_buffers()}
    plan.apply(images())
    assert counts["calls"] == 4  # before and after, two calls each: the new layer has no hooks yet
    assert all(b.num_batches_tracked == 7 for b in (model.shared, model.flat))
    assert model.shared.score == 0  # eval mode would move it, with this preset
    plan.undo()
    assert portrait(model) == before
    assert {n: id(b) for n, b in model.named_buffers()} == buffers


def test_where_all_is_nan_nothing_is_claimed() -> None:
    """Any two models agree on NaN: such a certificate once said "exact to rounding"."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.warns(UserWarning, match="Not measured"):
        certificate = plan_conversion(model, "gn").apply(torch.full((2, 3, 8, 8), math.inf))
    assert not certificate.exact
    assert certificate.difference is None
    assert "no finite number for the given input (2, 3, 8, 8)" in str(certificate)
    with torch.no_grad():
        model[0].bias.fill_(math.inf)
    with pytest.warns(UserWarning, match=r"0\.bias is not finite"):
        certificate = plan_conversion(model, "torch_gn").apply()
    assert not certificate.probed
    assert "no finite number" in str(certificate)


@pytest.mark.parametrize("verb", ["plan", "apply", "fold", "fuse"])
def test_an_example_with_nan_is_named(verb: str) -> None:
    """It measured nothing, and said so nowhere but in the certificate."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    example = torch.randn(2, 3, 9, 9)
    example[0, 0, 0, 0] = float("nan")
    calls = {
        "plan": lambda: nk.plan_conversion(model, "gn", example={"input": example}),
        "apply": lambda: nk.plan_conversion(model, "gn").apply(example),
        "fold": lambda: nk.fold(model, example=example),
        "fuse": lambda: nk.fuse(nn.Sequential(nk.BN(3), nn.ReLU()), example=example),
    }
    with pytest.raises(OptionError, match=r"example= holds NaN: 1 of the 486 numbers"):
        calls[verb]()
    assert isinstance(model[1], nn.BatchNorm2d)


def test_an_example_that_is_a_shape_is_told() -> None:
    """example=(2, 1, 8, 8) was taken for four arguments: "takes 2 positional arguments but 5"."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(OptionError, match=r"looks like a shape.*Try example=torch\.randn\(2, 1, 8"):
        nk.convert(model, "bcn", example=(2, 1, 8, 8))
    assert isinstance(model[1], nn.BatchNorm2d)


def test_a_reason_that_is_a_sentence_has_one_full_stop() -> None:
    """It read "Try fct=False.."."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    with pytest.warns(UserWarning, match=r"Try fct=False\.(?!\.)"):
        nk.convert(model, "ubn", example=False)
