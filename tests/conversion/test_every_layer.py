"""What every layer owes to conversion, folding and fusing; drawn from the catalog."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from cases import CHANNELS, every, label, noted
from cases import build as built
from normkit import catalog
from normkit.conversion import plan_conversion, plan_fuse
from normkit.core.card import Card
from normkit.core.moments import Coefficients, Moments
from normkit.errors import NothingToDo
from normkit.layers.base import Normalizer
from subjects import TARGETS, relative

Case = tuple[str, dict[str, object]]
TABLES = ("weight", "bias", "running_mean", "running_var")
# how the statistics of eight channels become those of groups is another matter, tested below
OPTIONS: dict[str, dict[str, object]] = {"gbgn": {"groups": CHANNELS}}


def model_of(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1, dtype=torch.float64), norm).eval()


def images() -> Tensor:
    return torch.randn(4, 3, 6, 6, dtype=torch.float64)


# -------------------------------------------------------------------- what is said to be carried


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of each pixel, as in timm and torchvision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class FrozenBatchNorm2d(nn.Module):
    """Four buffers and no count, as in torchvision."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in TABLES:
            self.register_buffer(name, torch.ones(channels))
        self.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        tensors = (self.weight, self.bias, self.running_mean, self.running_var)
        weight, bias, mean, var = (t[:, None, None] for t in tensors)
        return (x - mean) * (var + self.eps).rsqrt() * weight + bias


FOREIGN: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(CHANNELS, eps=1e-3, momentum=0.3),
    "BatchNorm2d without affine": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "BatchNorm2d without statistics": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(CHANNELS, momentum=None),
    "FrozenBatchNorm2d": lambda: FrozenBatchNorm2d(CHANNELS),
    "GroupNorm": lambda: nn.GroupNorm(2, CHANNELS, eps=1e-3),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "InstanceNorm2d with statistics": lambda: nn.InstanceNorm2d(
        CHANNELS, affine=True, track_running_stats=True
    ),
    "LayerNorm": lambda: nn.LayerNorm((CHANNELS, 6, 6), elementwise_affine=False),
    "LayerNorm2d": lambda: LayerNorm2d(CHANNELS),
}


def source_of(case: str | Case) -> nn.Module:
    """A norm none of whose tables is at a start value."""
    if not isinstance(case, str):
        return built(case)
    norm = FOREIGN[case]().double()
    with torch.no_grad():
        for name in TABLES:
            if isinstance(table := getattr(norm, name, None), Tensor):
                table.copy_(torch.rand_like(table) + 0.5)
    return norm


def as_torch_bn(norm: nn.Module) -> nn.BatchNorm2d:
    """What a norm is in the terms of torch: one number a channel for each table."""
    if type(norm) is nn.BatchNorm2d:
        return norm
    model = model_of(copy.deepcopy(norm))
    nk.convert(model, "torch_bn", example=False)
    assert isinstance(model[1], nn.BatchNorm2d)
    return model[1]


def agree(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def is_one_to_one(case: Case) -> bool:
    """Whether a target keeps one number a channel, and computes with it what a batch norm does."""
    name, options = case
    grouped = name in ("bgn", "gbgn") and "groups" in options
    return not grouped and "mean_spread" not in options


# from batch norm, also without parameters or statistics, to every target, and from other sources to
# a quarter of them: a target is made from what a source is as a batch norm, whoever it is, so that
# each meets eight of them; and, where the options of either choose other code, with them
EVERY: list[Case] = [(target, OPTIONS.get(target, {})) for target in TARGETS]
WHOLE = ("BatchNorm2d", "BatchNorm2d without affine", "BatchNorm2d without statistics", ("bn", {}))
PAIRS: list[tuple[str | Case, list[Case]]] = [
    *((source, EVERY) for source in WHOLE),
    *(
        (source, EVERY[number % 4 :: 4])
        for number, source in enumerate(
            [*FOREIGN, *((name, {}) for name in catalog.names("activation"))]
        )
        if source not in WHOLE
    ),
    *((case, [("bn", {})]) for case in every() if case[1]),
    *(("BatchNorm2d", [case]) for case in every() if case[1] and is_one_to_one(case)),
]


def label_of(part: object) -> str:
    if isinstance(part, list):
        return label(part[0]) if len(part) == 1 else f"{len(part)} targets"
    return label(part)


@pytest.mark.parametrize(("source", "targets"), PAIRS, ids=label_of)
def test_what_a_plan_says_is_carried_is_carried(source: str | Case, targets: list[Case]) -> None:
    """Into the target and out again to torch: what was carried must come out as it went in."""
    known: list[nn.BatchNorm2d] = []  # what the source is in the terms of torch
    for target in targets:
        with noted(target):
            check_what_is_carried(source, target, known)


def check_what_is_carried(source: str | Case, target: Case, known: list[nn.BatchNorm2d]) -> None:
    torch.manual_seed(0)
    norm = source_of(source)
    plan = plan_conversion(model_of(norm), target[0], example=False, **target[1])
    (step,) = plan.steps
    if step.action != "convert":
        assert step.reason
        return
    if not known:
        known.append(as_torch_bn(norm))
    expected = known[0]
    plan.apply(example=False)
    new = plan.model[1]
    found = as_torch_bn(new)
    tracked = any(name.startswith("running_") for name, _ in new.named_buffers())
    # the new layer has the table, and the old one knew it: then it has to be said
    affine, mean = expected.weight is not None, expected.running_mean
    had = isinstance(mean, Tensor) and not agree(mean, torch.zeros_like(mean))
    for name, is_there in (
        ("weight", affine and getattr(new, "weight", None) is not None),
        ("bias", affine and getattr(new, "bias", None) is not None),
        ("running statistics", tracked and had),
    ):
        assert (name in step.carried) == is_there, f"{name}: {step.contents}"
        if is_there:
            assert name not in (*step.initialised, *step.lost)
    for name in {"weight", "bias"} & set(step.carried):
        assert agree(getattr(found, name), getattr(expected, name)), name
    if "running statistics" in step.carried:
        for name in ("running_mean", "running_var"):
            here = slice(getattr(new, "split", 0), None)  # half of ibn keeps none
            before, after = getattr(expected, name)[here], getattr(found, name)[here]
            assert agree(after, before), name
    for name in {"eps", "momentum"} & set(step.carried):
        assert getattr(new, name) == getattr(norm, name)
    # where nothing is divided, eps means nothing
    divides = not isinstance(new, Normalizer) or new.card.statistics != "none"
    assert ("eps" in step.carried) == (divides and getattr(norm, "eps", None) == new.eps)


def test_pooled_statistics_are_those_of_the_groups() -> None:
    """What groups keep of the channels' statistics, by the law of total variance."""
    norm = source_of("BatchNorm2d")
    mean = norm.running_mean.reshape(2, -1)
    var = norm.running_var.reshape(2, -1)
    total = var.mean(1) + mean.var(1, correction=0)
    for target in ("bgn", "gbgn"):
        model = model_of(copy.deepcopy(norm))
        nk.convert(model, target, groups=2)
        found = as_torch_bn(model[1])
        assert agree(found.running_mean, mean.mean(1).repeat_interleave(4))
        assert agree(found.running_var, total.repeat_interleave(4))


def test_an_activation_inside_lives_on() -> None:
    for target in TARGETS:
        model = model_of(nk.NormAct(source_of("BatchNorm2d"), nn.PReLU(dtype=torch.float64)))
        act = model[1].act
        (step,) = plan_conversion(model, target).steps
        nk.convert(model, target, example=images())
        assert model[1].act is act
        assert "activation PReLU" in step.carried or step.action == "keep"


# -------------------------------------------------------------------- folding


class Squashed(Normalizer):
    """A layer that looks at no statistics and is no affine map: tanh."""

    card = Card(name="squashed", title="", paper="", family=False, same_in_eval=True)

    def uses_moments(self) -> bool:
        return False

    def normalize(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        return torch.tanh(x)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", every(), ids=label)
def test_every_layer_folds_or_says_why_not(case: Case, training: bool) -> None:
    torch.manual_seed(0)
    model, x = model_of(built(case)), images()
    model[1].train(training)
    plan = nk.plan_fold(model, x)
    model.eval()
    layer, expected = model[1], model(x)
    if "1" in plan.left:
        assert len(plan.left["1"]) > 10
        varies = layer.uses_moments() or training or not layer.card.family
        assert varies or "groups cut" in plan.left["1"]
        with pytest.raises(NothingToDo, match="fold found nothing"):
            nk.fold(model.train(training), x)
        return
    assert not training or layer.card.same_in_eval
    folded = nk.fold(model, x)
    assert relative(expected, folded(x)) <= 1e-10
    assert not any(isinstance(m, Normalizer) for m in folded.modules())


def test_a_layer_that_has_no_table_is_not_folded() -> None:
    """Neither an error of Python nor a wrong fold."""
    for kind in (Squashed, Claiming, Doubled):
        plan = nk.plan_fold(model_of(kind(CHANNELS, dtype=torch.float64)), images())
        assert "no scale and shift" in plan.left["1"]


class Claiming(Squashed):
    """Its card says that it has a table, which nobody wrote."""

    card = Card(name="claiming", title="", paper="", same_in_eval=True)


class Doubled(Squashed):
    """It has a table, which is not all that it does."""

    def coefficients(self, moments: Moments | None) -> Coefficients:
        one = torch.ones(1, self.channels, dtype=torch.float64)
        return Coefficients(2 * one, 0 * one)


# -------------------------------------------------------------------- fusing


class Residual(nn.Module):
    """relu(norm(conv(x)) + x), and a norm before a SiLU."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1, dtype=torch.float64)
        self.norm = norm
        self.rest = nn.Sequential(copy.deepcopy(norm), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.relu(self.norm(self.conv(x)) + x))


@pytest.mark.parametrize("case", every(), ids=label)
def test_every_layer_fuses(case: Case) -> None:
    torch.manual_seed(0)
    model = Residual(built(case)).eval()
    x = torch.randn(4, CHANNELS, 6, 6, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plan = plan_fuse(model)
    assert (plan.fused, plan.left) == ({"rest.0": "silu", "norm": "sum and relu"}, {})
    nk.fuse(model, x)
    assert isinstance(model.rest[0], nk.NormAct)
    assert type(model).forward is not Residual.forward
    assert relative(plain(x), model(x)) <= 1e-12
    plain.train(), model.train()
    torch.manual_seed(1)
    before = plain(x)
    torch.manual_seed(1)
    assert relative(before, model(x)) <= 1e-12


def test_every_layer_is_in_these_tests() -> None:
    assert {name for name, _ in every()} == set(catalog.names("activation"))
