"""Sources: what is read from every kind of norm, and what is left alone and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import normkit as nk
from cases import build as built
from cases import every, label
from normkit.conversion import plan_conversion
from normkit.conversion.carry import build
from normkit.inspection import survey
from normkit.layers.norm_act import NormAct
from subjects import BatchNormAct2d, relative, trained

C = 8


def model_of(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, C, 3, padding=1), norm)


def images(*size: int) -> Tensor:
    return torch.randn(4, 3, *(size or (6, 6)))


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of each pixel, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class FrozenBatchNorm2d(nn.Module):
    """Four buffers and no count, as in torchvision."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)
        self.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        tensors = (self.weight, self.bias, self.running_mean, self.running_var)
        weight, bias, mean, var = (t[:, None, None] for t in tensors)
        return (x - mean) * (var + self.eps).rsqrt() * weight + bias


def random(norm: nn.Module) -> nn.Module:
    for p in norm.parameters():
        nn.init.normal_(p, 1.0, 0.3)
    return norm


def without_bias(norm: nn.Module) -> nn.Module:
    norm.register_parameter("bias", None)
    return norm


# -------------------------------------------------------------------- foreign sources

SAME_FUNCTION: list[tuple[Callable[[], nn.Module], str, dict[str, Any]]] = [
    (lambda: nn.BatchNorm2d(C, affine=False), "bn", {}),
    (lambda: nn.BatchNorm2d(C, track_running_stats=False), "bn", {}),
    (lambda: nn.SyncBatchNorm(C, momentum=None, eps=0.1), "torch_bn", {}),
    (lambda: nn.SyncBatchNorm(C), "bn", {}),
    (lambda: without_bias(nn.BatchNorm2d(C)), "rbn", {}),
    (lambda: FrozenBatchNorm2d(C), "bn", {}),
    (lambda: FrozenBatchNorm2d(C), "frozen_bn", {}),
    (lambda: nn.InstanceNorm2d(C, track_running_stats=True), "bn", {}),
    (lambda: nn.InstanceNorm2d(C), "in", {}),
    (lambda: nn.InstanceNorm2d(C, affine=True), "gn", {"groups": C}),
    (lambda: nn.GroupNorm(2, C, eps=0.1), "gn", {"groups": 2}),
    (lambda: nn.GroupNorm(1, C), "ln", {}),
    (lambda: nk.LN(C), "torch_gn", {"groups": 1}),
    (lambda: nk.GN(C, groups=2), "torch_gn", {"groups": 2}),
    (lambda: LayerNorm2d(C), "pn", {}),
    (lambda: nn.LayerNorm((C, 6, 6), elementwise_affine=False), "ln", {}),
    (lambda: NormAct(nk.BN(C), "silu"), "rbn", {}),
    (lambda: BatchNormAct2d(C, nn.PReLU(C)), "iebn", {}),
]


@pytest.mark.parametrize(("make", "target", "options"), SAME_FUNCTION)
def test_the_same_function_under_another_name(
    make: Callable[[], nn.Module], target: str, options: dict[str, Any]
) -> None:
    model = model_of(trained(random(make()))).eval()
    plan = plan_conversion(model, target, **options)
    certificate = plan.apply(images())
    assert (plan.count(), certificate.exact, plan.exact) == (1, True, True)


def test_affine_maps_of_sample_norms_are_carried() -> None:
    model = model_of(random(nn.GroupNorm(2, C, eps=0.1)))
    weight, bias = model[1].weight, model[1].bias
    plan = plan_conversion(model, "bcn")
    plan.apply(images())
    assert model[1].weight is weight
    assert model[1].bias is bias
    assert model[1].eps == 0.1
    (step,) = plan.steps
    assert step.carried == ("weight", "bias", "eps")
    assert step.initialised == ("running statistics", "group_weight", "group_bias")
    assert "calibrate" in step.reason


def test_layers_with_a_momentum_of_their_own_keep_it() -> None:
    model = model_of(nn.GroupNorm(2, C))
    plan_conversion(model, "batch_renorm").apply(images())
    assert model[1].momentum == 0.01
    model = model_of(nn.BatchNorm2d(C, momentum=0.3))
    plan_conversion(model, "batch_renorm").apply(images())
    assert model[1].momentum == 0.3


# -------------------------------------------------------------------- our own layers as sources

# which layers are, with these options, a fixed affine map per channel in eval mode
AFFINE = {
    "bn", "ghost_bn", "input_norm", "shifted_bn", "batch_renorm", "frozen_bn", "bgn", "gbgn"
}  # fmt: skip
BY_SAMPLE_OR_POSITION = [("bgn", "groups", 16), ("bgn", "groups", 5), ("gbgn", "eval_weight", 0.3)]


def is_affine(case: tuple[str, dict[str, object]]) -> bool:
    name, options = case
    odd = any(name == n and options.get(o) == v for n, o, v in BY_SAMPLE_OR_POSITION)
    return name in AFFINE and not odd


@pytest.mark.parametrize("case", every(), ids=label)
def test_every_layer_can_be_left_again(case: tuple[str, dict[str, object]]) -> None:
    model = model_of(built(case, torch.float32)).eval()
    before = copy.deepcopy(model)
    plan = plan_conversion(model, "torch_bn")
    x = images()
    certificate = plan.apply(x)
    assert type(model[1]) is nn.BatchNorm2d
    assert plan.count() == 1
    if is_affine(case):
        assert certificate.exact
        assert relative(before(x), model(x)) <= 1e-5
    plan.undo()
    assert torch.equal(before(x), model(x))


@pytest.mark.parametrize("name", ["rbn", "iebn", "ubn", "bnet", "dn"])
def test_exact_there_and_back(name: str) -> None:
    model = model_of(trained(nn.BatchNorm2d(C))).eval()
    x = images()
    before = model(x)
    plan_conversion(model, name).apply(x)
    back = plan_conversion(model, "torch_bn")
    assert back.exact
    assert back.apply(x).exact
    assert relative(before, model(x)) <= 1e-5


def test_what_our_layers_lose_is_said() -> None:
    lost = {}
    for name in ("ubn", "rbn", "iebn", "bnet", "sn", "ibn", "bcn", "dn"):
        plan = plan_conversion(model_of(built((name, {}), torch.float32)), "bn")
        lost[name] = plan.steps[0].lost
    assert lost == {
        "ubn": ("score", "kernel but for its centre", "gate", "centering"),
        "rbn": ("gate", "centering"),
        "iebn": ("gate",),
        "bnet": ("kernel but for its centre",),
        "sn": ("mixture",),
        "ibn": ("instance part",),
        "bcn": ("group norm after it",),
        "dn": ("links",),
    }


def test_statistics_that_are_not_of_channels_are_said_to_be_lost() -> None:
    for groups, lost, carried in ((16, "by position", True), (5, "of uneven groups", False)):
        plan = plan_conversion(model_of(built(("bgn", {"groups": groups}), torch.float32)), "bn")
        (step,) = plan.steps
        assert step.lost == (f"statistics {lost}",)
        assert ("running statistics" in step.carried) == carried


# -------------------------------------------------------------------- left alone


class Clipped(nn.BatchNorm2d):
    """A batch norm that does more than its name says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1, 1)


class Renamed(nn.BatchNorm2d):
    """A batch norm with a forward of its own that does nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def replaced_forward() -> nn.Module:
    norm = nn.BatchNorm2d(C)
    norm.forward = lambda x: x  # type: ignore[method-assign]
    return norm


LEFT: list[tuple[Callable[[], nn.Module], str, str]] = [
    (lambda: nn.LazyBatchNorm2d(), "gn", "no channels yet"),
    (lambda: nn.LocalResponseNorm(2), "gn", "no normalization that another"),
    (lambda: nn.LayerNorm((C, 6, 6)), "gn", r"shape \(8, 6, 6\): not one number a channel"),
    (lambda: nn.LayerNorm(6), "gn", "last axis"),
    (lambda: Clipped(C), "bn", "computes more than the bn"),
    (replaced_forward, "bn", "replaced on the instance"),
    (lambda: parametrizations.weight_norm(nn.BatchNorm2d(C), dim=0), "bn", "parametrization"),
    (lambda: prune.l1_unstructured(nn.BatchNorm2d(C), "weight", 0.5), "bn", "computed by a hook"),
    (lambda: nn.GroupNorm(2, C), "frozen_bn", "no running statistics that could be frozen"),
    (lambda: nn.BatchNorm2d(C, track_running_stats=False), "frozen_bn", "no running statistics"),
    (lambda: nn.BatchNorm2d(C, track_running_stats=False), "ubn", "UBN needs running statistics"),
    (lambda: nn.GroupNorm(2, C), "sync_bn", "nothing to synchronise"),
]


@pytest.mark.parametrize(("make", "target", "reason"), LEFT)
def test_what_cannot_be_converted_is_skipped_with_the_reason(
    make: Callable[[], nn.Module], target: str, reason: str
) -> None:
    model = model_of(make())
    norm = model[1]
    plan = plan_conversion(model, target)
    (step,) = plan.steps
    assert step.action == "skip"
    assert step.reason in str(plan)
    with pytest.warns(UserWarning, match=reason):
        plan.apply()
    assert model[1] is norm


def test_a_layer_that_no_option_helps_is_skipped() -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.Conv2d(12, C, 3))
    model.append(nn.BatchNorm2d(C))
    plan = plan_conversion(model, "dn")  # powers of two only
    assert [step.action for step in plan.steps] == ["skip", "convert"]
    assert "powers of two" in plan.steps[0].reason


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_forward_of_its_own_is_checked(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(Renamed(C), Clipped(C), BatchNormAct2d(C, nn.SiLU()))
    plan = plan_conversion(model, "gn")
    assert [step.action for step in plan.steps] == ["convert", "skip", "convert"]


# -------------------------------------------------------------------- what hangs on a norm


def test_hooks_go_on() -> None:
    model = model_of(trained(nn.BatchNorm2d(C)))
    seen: list[str] = []
    handles = [
        model[1].register_forward_hook(lambda m, x, y: seen.append(type(m).__name__)),
        model[1].register_forward_pre_hook(lambda m, x: seen.append("before")),
        model[1].register_full_backward_hook(lambda m, dx, dy: seen.append("back")),
    ]
    plan = plan_conversion(model, "gn")
    assert "3 hook(s)" in plan.steps[0].carried
    assert seen == []
    plan.apply(images())
    seen.clear()
    model(images()).sum().backward()
    assert seen == ["before", "GN", "back"]
    for handle in handles:
        handle.remove()
    seen.clear()
    model(images())
    plan.undo()
    model(images())
    assert seen == []


def test_a_hook_that_changes_the_output_is_not_taken_for_the_layer() -> None:
    model = model_of(trained(nn.BatchNorm2d(C)))
    model[1].register_forward_hook(lambda m, x, y: y * 2)
    certificate = plan_conversion(model, "bn").apply(images())
    assert certificate.exact


def test_what_nobody_could_carry_is_said_to_be_lost() -> None:
    norm = nn.BatchNorm2d(C)
    norm.register_buffer("seen", torch.zeros(3))
    norm.register_state_dict_post_hook(lambda *_: None)
    norm.weight.register_hook(lambda g: g)
    lost = {name: plan_conversion(model_of(norm), name).steps[0].lost for name in ("bn", "ubn")}
    assert lost["bn"] == ("1 hook(s) of state_dict", "seen")
    assert lost["ubn"] == ("1 hook(s) of state_dict", "seen", "1 hook(s) of weight")


def test_attributes_of_others_go_on() -> None:
    norm = nn.BatchNorm2d(C)
    norm.lr_factor = 0.1
    model = model_of(norm)
    for name in ("gn", "bcn", "torch_bn", "bn"):
        plan_conversion(model, name).apply(images())
        assert (model[1].lr_factor, model[1].num_features) == (0.1, C)
    assert not hasattr(model[1], "groups")


@pytest.mark.parametrize("target", ["gn", "rbn", "ubn"])
def test_tied_parameters_stay_tied(target: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(C), nn.BatchNorm2d(C))
    model[1].weight = model[0].weight
    plan_conversion(model, target).apply(torch.randn(2, C, 4, 4))
    assert model[1].weight is model[0].weight
    assert model[1].bias is not model[0].bias


def test_a_tie_that_breaks_is_said_to_be_lost() -> None:
    model = nn.Sequential(nn.BatchNorm2d(C), nn.BatchNorm2d(C))
    model[1].weight = model[0].weight
    assert plan_conversion(model, "gn", "0").steps[0].lost == ("running statistics",)
    assert plan_conversion(model, "rbn", "0").steps[0].lost == (
        "tie of weight with another module",
    )


def test_frozen_norms_stay_frozen() -> None:
    from normkit.conversion import freeze, unfreeze

    model = nn.Sequential(trained(nn.BatchNorm2d(C)), trained(nn.BatchNorm2d(C))).train()
    freeze(model, where="0")
    plan = plan_conversion(model, "rbn")
    assert plan.steps[0].carried[-2:] == ("freezing of statistics", "freezing of affine")
    plan.apply(torch.randn(2, C, 4, 4))
    assert not model.train()[0].training
    assert not any(p.requires_grad for p in model[0].parameters())
    unfreeze(model)
    assert model[0].training
    assert all(p.requires_grad for p in model[0].parameters())
    assert model[1].gate_weight.requires_grad


def test_build_is_one_layer_alone() -> None:
    (site,) = survey(model_of(nn.BatchNorm2d(C)))
    new, step = build(site, "bnet", {"kernel_size": 5}, rank=2)
    assert isinstance(new, nk.BNET)
    assert new.weight.shape == (C, 1, 5, 5)
    assert step.becomes == repr(new)
