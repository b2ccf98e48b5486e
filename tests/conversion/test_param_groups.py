"""param_groups: every parameter in the right group, once, under any optimizer and scheduler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler

from normkit import catalog
from normkit.conversion import standardize
from normkit.conversion.param_groups import param_groups
from normkit.errors import NothingToDo, OptionError, ShapeError

NO_GROUPS = {"LBFGS": "takes no groups", "Muon": "takes matrices only", "SparseAdam": "sparse only"}
OPTIMIZERS = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name != "Optimizer" and name not in NO_GROUPS
]


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def found(model: nn.Module, **options: Any) -> dict[str, set[str]]:
    """The names of the parameters of each group."""
    groups = param_groups(model, 0.1, 1e-4, **options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {group["name"]: {names[p] for p in group["params"]} for group in groups}


def every_parameter_once(model: nn.Module, groups: list[dict[str, Any]]) -> bool:
    members = [p for group in groups for p in group["params"]]
    return len(members) == len(set(members)) and set(members) == set(model.parameters())


# -------------------------------------------------------------------- what goes where

# a weight is a scale, or a kernel that is trained as that of a convolution; of all other parameters
# these are not at the full rate without decay
OTHERS = {"group_weight": "scales", "mean_weight": "decayed", "var_weight": "decayed"}


@pytest.mark.parametrize("name", catalog.names("activation"))
def test_every_layer_of_the_catalog(name: str) -> None:
    layer = catalog.make(name, 8)
    if not list(layer.parameters()):
        with pytest.raises(NothingToDo):
            param_groups(layer, 0.1, 1e-4)
        return
    expected: dict[str, set[str]] = {}
    for key, parameter in layer.named_parameters():
        role = OTHERS.get(key, "not_decayed")
        if key == "weight":
            role = "scales" if parameter.dim() == 1 else "decayed"
        expected.setdefault(role, set()).add(key)
    assert found(layer) == expected


def test_a2_learns_its_inner_weight_at_the_full_rate() -> None:
    groups = found(catalog.make("bn", 8, form="a2"))
    assert groups == {"scales": {"weight"}, "not_decayed": {"inner_weight", "bias"}}


def test_ubn_without_its_kernel_has_a_scale() -> None:
    groups = found(catalog.make("ubn", 8, affine_conv=False))
    assert groups["scales"] == {"weight"}
    assert "decayed" not in groups


def test_weight_normalizers() -> None:
    conv = {m: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)) for m in ("ws", "wn", "cwn")}
    for method, model in conv.items():
        standardize(model, method)
    raw = "0.parametrizations.weight.original"
    rest = {"scales": {"1.weight"}, "not_decayed": {"0.bias", "1.bias"}}
    assert found(conv["ws"]) == {"decayed": {raw}, **rest}
    assert found(conv["wn"]) == {"decayed": {f"{raw}0", f"{raw}1"}, **rest}
    gain = {"0.parametrizations.weight.0.gain"}
    assert found(conv["cwn"]) == {
        "decayed": {raw},
        "scales": {"1.weight"},
        "not_decayed": rest["not_decayed"] | gain,
    }


def test_torch_nn_in_all_its_forms() -> None:
    model = nn.ModuleDict(
        {
            "depthwise": nn.Conv2d(4, 4, 1, groups=4),
            "row": nn.Linear(4, 1),
            "one": nn.BatchNorm1d(1),
            "sync": nn.SyncBatchNorm(4),
            "instance": nn.InstanceNorm3d(4, affine=True),
            "group": nn.GroupNorm(2, 4),
            "layer": nn.LayerNorm([4, 5, 5]),
            "rms": nn.RMSNorm(4),
            "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "rnn": nn.LSTM(4, 4),
            "embedding": nn.Embedding(3, 4),
            "slope": nn.PReLU(),
            "normed": parametrizations.weight_norm(nn.Linear(4, 4), "weight"),
        }
    )
    groups = found(model)
    norms = ("one", "sync", "instance", "group", "layer", "rms")
    assert groups["scales"] == {f"{name}.weight" for name in norms}
    assert groups["not_decayed"] == {
        "slope.weight",
        *(name for name, _ in model.named_parameters() if "bias" in name),
    }
    assert "depthwise.weight" in groups["decayed"]
    assert "attention.in_proj_weight" in groups["decayed"]
    assert len(groups["decayed"]) + len(groups["not_decayed"]) + 6 == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("model", "scales"),
    [
        (torchvision.models.resnet18, 20),
        (torchvision.models.mobilenet_v3_small, 34),
        (lambda: timm.create_model("resnet18"), 20),
        (lambda: timm.create_model("resnetv2_50"), 49),  # fused activations
        (lambda: timm.create_model("test_convnext"), 14),  # norms over the last axis and maps
        (lambda: timm.create_model("test_vit"), 13),
    ],
    ids=["torchvision-resnet18", "mobilenet", "timm-resnet18", "fused", "convnext", "vit"],
)
def test_models_of_other_libraries(model: Any, scales: int) -> None:
    with torch.device("meta"):
        built = model()
    groups = param_groups(built, 0.1, 1e-4)
    assert every_parameter_once(built, groups)
    by_name = {group["name"]: group["params"] for group in groups}
    norms = [m for m in built.modules() if "Norm" in type(m).__name__ and m._parameters]
    assert len(by_name["scales"]) == scales == len(norms)
    assert all(p.dim() == 1 for p in by_name["scales"])
    assert all(p.dim() > 1 for p in by_name["decayed"])


def test_shared_parameters_are_listed_once_and_a_norm_has_the_say() -> None:
    model = net()
    model.append(nn.BatchNorm1d(5))
    model.append(nn.Linear(5, 5))
    model[-1].bias = model[-2].weight  # a scale that also serves as a bias
    model.append(model[1])  # a norm in two places
    groups = param_groups(model, 0.1, 1e-4)
    assert every_parameter_once(model, groups)
    assert found(model)["scales"] == {"1.weight", "5.weight"}


def test_frozen_parameters_stay_in_their_groups() -> None:
    model = net().requires_grad_(False)
    assert every_parameter_once(model, param_groups(model, 0.1, 1e-4))


def test_the_rates_and_their_defaults() -> None:
    groups = {g["name"]: g for g in param_groups(net(), 0.1, 1e-4)}
    rates = {name: (g["lr"], g["weight_decay"]) for name, g in groups.items()}
    assert rates == {"decayed": (0.1, 1e-4), "not_decayed": (0.1, 0), "scales": (0.1 / 100, 0)}


def test_a_tensor_as_rate_is_not_shared_between_groups() -> None:
    groups = param_groups(net(), torch.tensor(0.1), 1e-4, scale_lr_divisor=4)
    rates = [group["lr"] for group in groups]
    assert len({rate.data_ptr() for rate in rates}) == 3
    assert rates[2] == rates[0] / 4


def test_patterns_spare_further_parameters() -> None:
    model = timm.create_model("test_vit")
    groups = found(model, no_decay=["*pos_embed", "cls_token"])
    assert {"pos_embed", "cls_token"} <= groups["not_decayed"]
    assert {"blocks.0.attn.qkv.bias"} < groups["not_decayed"]
    assert "pos_embed" in found(model)["decayed"]
    spared = found(model, no_decay=["*"])
    assert "decayed" not in spared
    assert spared["scales"] == groups["scales"]


# -------------------------------------------------------------------- the paper's rule by shape


def test_the_official_rule_with_its_consequences() -> None:
    model = nn.ModuleDict(
        {
            "depthwise": nn.Conv2d(4, 4, 1, groups=4),
            "row": nn.Linear(4, 1),
            "one": nn.BatchNorm2d(1),
            "bn": nn.BatchNorm2d(4),
            "gated": catalog.make("rbn", 4),
            "bnet": catalog.make("bnet", 4),
        }
    )
    assert found(model, rule="official_shape") == {
        "scales": {
            "depthwise.weight",
            "row.weight",
            "bn.weight",
            "gated.weight",
            "gated.gate_weight",
            "gated.center_weight",
        },
        "not_decayed": {"depthwise.bias", "bn.bias", "gated.bias", "gated.gate_bias", "bnet.bias"},
        "decayed": {"row.bias", "one.weight", "one.bias", "bnet.weight"},
    }


def test_the_rules_agree_on_a_plain_resnet() -> None:
    model = torchvision.models.resnet18()
    assert found(model) == found(model, rule="official_shape")


def test_only_a_reduction_acts_in_the_official_rule() -> None:
    official = param_groups(net(), 0.1, 0, scale_lr_divisor=0.5, rule="official_shape")
    ours = param_groups(net(), 0.1, 0, scale_lr_divisor=0.5)
    assert official[2]["lr"] == 0.1
    assert ours[2]["lr"] == 0.2


# -------------------------------------------------------------------- optimizers


def test_every_optimizer_is_tried_or_named() -> None:
    assert {"SGD", "AdamW", "RMSprop", "Adafactor"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_the_groups(name: str) -> None:
    model = net()
    optimizer = getattr(torch.optim, name)(param_groups(model, 0.1, 1e-4))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    still = {key for key, p in model.named_parameters() if torch.equal(p, before[key])}
    assert still <= {"0.bias"}  # the norm after it takes its effect away
    fresh = net()
    again = getattr(torch.optim, name)(param_groups(fresh, 0.5, 0))
    again.load_state_dict(optimizer.state_dict())
    assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_one_step_of_sgd_is_that_of_the_formula() -> None:
    model = net().double()
    optimizer = torch.optim.SGD(param_groups(model, 0.5, 0.25, scale_lr_divisor=8))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    model(torch.randn(4, 3, 8, 8).double()).square().mean().backward()
    optimizer.step()
    for key, p in model.named_parameters():
        assert p.grad is not None
        rate = 0.5 / 8 if key == "1.weight" else 0.5
        decay = 0.25 if key in ("0.weight", "4.weight") else 0.0
        expected = before[key] - rate * (p.grad + decay * before[key])
        torch.testing.assert_close(p.detach(), expected)


# -------------------------------------------------------------------- schedulers


def ratios(make: Any, steps: int = 12, lr: float | Tensor = 0.1) -> list[float]:
    """The rate of the weights over that of the scales, at each step of a schedule."""
    optimizer = torch.optim.SGD(param_groups(net(), lr, 1e-4))
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        by_name = {group["name"]: float(group["lr"]) for group in optimizer.param_groups}
        assert by_name["decayed"] == by_name["not_decayed"]
        seen.append(by_name["decayed"] / by_name["scales"])
        optimizer.step()
        scheduler.step()
    return seen


KEEP = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR, a rate a group": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=[group["lr"] for group in o.param_groups], total_steps=20
    ),
}


@pytest.mark.parametrize("name", KEEP)
def test_schedulers_keep_the_ratio(name: str) -> None:
    # each step multiplies both rates, which rounds each once or a few times
    assert ratios(KEEP[name]) == pytest.approx([100.0] * 12, rel=1e-12)


def test_schedulers_keep_the_ratio_of_tensors() -> None:
    # float32: a rounding of 6e-8 a step and group
    kept = ratios(KEEP["StepLR"], lr=torch.tensor(0.1))
    assert kept == pytest.approx([100.0] * 12, rel=12 * 2 * 6e-8)


def test_an_absolute_minimum_is_the_documented_exception() -> None:
    """Revisiting-bn's own schedule: every group ends at 1e-8, so the ratio ends at one."""
    seen = ratios(lambda o: lr_scheduler.CosineAnnealingLR(o, 12, eta_min=1e-8), steps=13)
    assert seen[0] == pytest.approx(100)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == pytest.approx(1)
    middle = (1e-8 + (0.1 - 1e-8) / 2) / (1e-8 + (1e-3 - 1e-8) / 2)
    assert seen[6] == pytest.approx(middle, rel=1e-9)


def test_one_rate_for_all_in_one_cycle_is_the_other_exception() -> None:
    seen = ratios(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20))
    assert seen == pytest.approx([1.0] * 12)


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": "modules"}, "Did you mean 'module'"),
        ({"scale_lr_divisor": 0}, "above 0, got 0"),
        ({"scale_lr_divisor": math.nan}, "above 0, got nan"),
        ({"lr": -1}, "lr ≥ 0, got -1"),
        ({"weight_decay": math.inf}, "weight_decay ≥ 0, got inf"),
        ({"no_decay": ["5.weight"]}, "no_decay='5.weight' matches no parameter"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        param_groups(net(), **{"lr": 0.1, "weight_decay": 0.0, **options})


def test_models_that_cannot_be_grouped() -> None:
    with pytest.raises(NothingToDo, match="no parameters"):
        param_groups(nn.ReLU(), 0.1, 0)
    with pytest.raises(ShapeError, match=r"0\.weight is lazy"):
        param_groups(nn.Sequential(nn.LazyConv2d(4, 3)), 0.1, 0)
