"""fold: the same function with fewer layers, or the norm stays; the model is never touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers.conv2d_same import Conv2dSame
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normkit import catalog
from normkit.conversion import fold, freeze, plan_fold, standardize
from normkit.errors import NormkitError, NothingToDo, OptionError
from normkit.layers.norm_act import NormAct

# Folding multiplies each weight by a number that was rounded once, and rounds the product. The
# issue allows 1e-5 of the largest output in float32; in float64 the same holds nine digits deeper.
ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-12}
FOLDED = {
    "bn": [{}, {"form": "a1"}, {"form": "a2"}, {"affine": False}, {"eps": 1e-3}],
    "ghost_bn": [{}],
    "frozen_bn": [{}],
    "shifted_bn": [{"mean_spread": 1.0, "std_spread": 0.5}],
    "batch_renorm": [{}],
    "input_norm": [{}, {"mode": "fixed"}],
    "bgn": [{"groups": 8}, {"groups": 2}, {"groups": 1}],
    "gbgn": [{"groups": 4}],
    "bnet": [{}, {"kernel_size": 1}, {"kernel_size": 5}, {"affine": False}],
}
CASES = [(name, options) for name, variants in FOLDED.items() for options in variants]
FOREIGN: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.BatchNorm2d(8),
    "torch-plain": lambda: nn.BatchNorm2d(8, affine=False, eps=1e-2),
    "sync": lambda: nn.SyncBatchNorm(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "torchvision": lambda: torchvision.ops.FrozenBatchNorm2d(8, eps=1e-3),
    "timm": lambda: timm.layers.BatchNormAct2d(8, act_layer=nn.SiLU),
    "timm-frozen": lambda: timm.layers.FrozenBatchNormAct2d(8),
}


def shaken(model: nn.Module) -> Any:
    """The model in eval mode, with statistics and parameters away from their start."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("var", "std")):
                tensor.uniform_(0.5, 2.0)
            elif name.endswith("second_moment"):
                tensor.uniform_(2.0, 4.0)
            elif tensor.is_floating_point():
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model.eval()


def apart(old: nn.Module, new: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        a, b = old(x), new(x)
    assert a.shape == b.shape
    return float((a - b).abs().max() / a.abs().max())


def check(model: nn.Module, x: Tensor, pairs: dict[str, str]) -> nn.Module:
    """Folds, and the result is the same function; returns it."""
    before = copy.deepcopy(model.state_dict())
    plan = plan_fold(model, x)
    assert {path: pair.layer for path, pair in plan.folded.items()} == pairs
    new = plan.apply()
    assert apart(model, new, x) <= ALLOWED[x.dtype]
    assert plan.difference is not None
    assert plan.difference <= ALLOWED[x.dtype]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not {id(p) for p in new.parameters()} & {id(p) for p in model.parameters()}
    return new


# -------------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_layers_of_the_catalog(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    norm = catalog.make(name, 8, **options)
    model = shaken(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU()).to(dtype))
    new = check(model, torch.randn(2, 3, 9, 9, dtype=dtype), {"1": "0"})
    convolves = name == "bnet" and options.get("kernel_size") != 1 and options.get("affine", True)
    assert type(new[1]) is (nn.Conv2d if convolves else nn.Identity)


@pytest.mark.parametrize("kind", FOREIGN)
def test_norms_of_others(kind: str) -> None:
    model = shaken(nn.Sequential(nn.Conv2d(3, 8, 3), FOREIGN[kind](), nn.Conv2d(8, 4, 1)))
    new = check(model, torch.randn(2, 3, 9, 9), {"1": "0"})
    expected = {"timm": nn.SiLU, "timm-frozen": nn.ReLU}.get(kind, nn.Identity)
    assert type(new[1]) is expected


NOT_FIXED = [
    *[(name, {}) for name in ("gn", "ln", "in", "pn", "gw", "ibn", "sn", "bcn", "rbn", "ubn")],
    ("bgn", {"groups": 16}),
    ("bgn", {"groups": 5}),
    ("gbgn", {"groups": 4, "eval_weight": 0.3}),
    ("bn", {"track_running_stats": False}),
]


@pytest.mark.parametrize(("name", "options"), NOT_FIXED)
def test_what_is_no_fixed_map_stays(name: str, options: dict[str, Any]) -> None:
    norm = catalog.make(name, 8, **options)
    plan = plan_fold(nn.Sequential(nn.Conv2d(3, 8, 3), norm).eval(), torch.randn(2, 3, 9, 9))
    assert list(plan.left) == ["1"]
    with pytest.raises(NothingToDo, match=r"1: it"):
        plan.apply()


@pytest.mark.parametrize("drop", [False, True])
def test_fused_activations_and_drop_layers_stay(drop: bool) -> None:
    fused = timm.layers.BatchNormAct2d(8, drop_layer=nn.Dropout if drop else None)
    model = shaken(nn.Sequential(nn.Conv2d(3, 8, 3), fused))
    new = check(model, torch.randn(2, 3, 9, 9), {"1": "0"})
    kinds = [type(m) for m in new[1]] if drop else [type(new[1])]
    assert kinds == ([nn.Dropout, nn.ReLU] if drop else [nn.ReLU])


@pytest.mark.parametrize("norm", [lambda: catalog.make("bn", 8), lambda: nn.BatchNorm2d(8)])
def test_norm_act_goes_on_adding_its_residual(norm: Callable[[], nn.Module]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)
            self.norm = NormAct(norm(), "relu")

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x), x)

    new = check(shaken(Block()), torch.randn(2, 8, 5, 5), {"norm": "conv"})
    assert type(new.norm.norm) is nn.Identity


def test_frozen_norms_fold_in_a_model_that_trains() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    )
    shaken(model).train()
    freeze(model, where="1")
    plan = plan_fold(model, torch.randn(2, 3, 9, 9))
    assert list(plan.folded) == ["1"]
    assert plan.left == {"3": "it is in training mode: try model.eval()"}
    assert type(plan.apply()[3]) is nn.BatchNorm2d


# -------------------------------------------------------------------- layers

LAYERS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, bias=False), nn.BatchNorm1d, (6, 9)),
    "grouped": (lambda: nn.Conv2d(6, 8, 3, groups=2), nn.BatchNorm2d, (6, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d, (8, 9, 9)),
    "reflect": (
        lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d,
        (6, 9, 9),
    ),
    "conv3d": (lambda: nn.Conv3d(6, 8, 2), nn.BatchNorm3d, (6, 4, 4, 4)),
    "transposed1d": (lambda: nn.ConvTranspose1d(6, 8, 3), nn.BatchNorm1d, (6, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 8, 3, 2), nn.BatchNorm2d, (6, 5, 5)),
    "transposed-grouped": (
        lambda: nn.ConvTranspose2d(6, 8, 3, groups=2, bias=False),
        nn.BatchNorm2d,
        (6, 5, 5),
    ),
    "transposed3d": (lambda: nn.ConvTranspose3d(6, 8, 2), nn.BatchNorm3d, (6, 3, 3, 3)),
    "linear": (lambda: nn.Linear(6, 8), nn.BatchNorm1d, (6,)),
    "linear-plain": (lambda: nn.Linear(6, 8, bias=False), nn.BatchNorm1d, (6,)),
    "same": (
        lambda: Conv2dSame(6, 8, 3, stride=2),
        nn.BatchNorm2d,
        (6, 9, 9),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("guessed", [False, True])
def test_every_kind_of_layer(kind: str, guessed: bool) -> None:
    make, norm, size = LAYERS[kind]
    model = shaken(nn.Sequential(make(), norm(8)).double())
    x = torch.randn(3, *size, dtype=torch.float64)
    if not guessed:
        check(model, x, {"1": "0"})
        return
    with pytest.warns(UserWarning, match="could not check the result: example=False"):
        new = fold(model, example=False)
    assert apart(model, new, x) <= ALLOWED[x.dtype]


@pytest.mark.parametrize("dims", [1, 2])
def test_bnet_of_vectors_has_its_centre_only(dims: int) -> None:
    model = shaken(nn.Sequential(nn.Linear(6, 8), catalog.make("bnet", 8, dims=dims)))
    new = check(model, torch.randn(4, 6), {"1": "0"})
    assert type(new[1]) is nn.Identity


def test_memory_format_and_what_is_trained_are_kept() -> None:
    model = shaken(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)))
    model = model.to(memory_format=torch.channels_last).requires_grad_(False)
    new = check(model, torch.randn(2, 3, 9, 9), {"1": "0"})
    assert new[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not any(p.requires_grad for p in new.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_checked_in_float32(dtype: torch.dtype) -> None:
    model = shaken(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).to(dtype)
    plan = plan_fold(model, torch.randn(2, 3, 9, 9).to(dtype))
    new = plan.apply()
    assert {p.dtype for p in new.parameters()} == {dtype}
    assert plan.difference is not None
    assert plan.difference <= ALLOWED[torch.float32]


# -------------------------------------------------------------------- weights


@pytest.mark.parametrize("method", ["ws", "wn", "cwn"])
def test_normalized_weights_become_plain(method: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)
    )
    standardize(model, method)
    x = torch.randn(2, 3, 9, 9)
    new = check(shaken(model), x, {"1": "0"})
    assert not any(map(parametrize.is_parametrized, new.modules()))
    assert type(new[0]) is type(new[2]) is nn.Conv2d
    assert parametrize.is_parametrized(model[0])
    assert list(new.state_dict()) == [
        *("0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias")
    ]


@pytest.mark.parametrize("kind", ["StdConv2d", "ScaledStdConv2d"])
def test_classes_that_standardize_on_their_own(kind: str) -> None:
    conv = getattr(timm.layers, kind)(6, 8, 3, stride=2, padding=1, bias=True)
    model = shaken(nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    new = check(model, torch.randn(2, 6, 9, 9), {"1": "0"})
    assert type(new[0]) is nn.Conv2d


def test_another_parametrization_is_left() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    plan = plan_fold(model, torch.randn(2, 3, 9, 9))
    assert plan.left == {"1": "the weight of Conv2d is computed by a parametrization"}


def test_a_convolution_with_a_forward_of_its_own_is_left() -> None:
    class Doubling(nn.Conv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(x, weight.sign(), bias)

    model = shaken(nn.Sequential(Doubling(3, 8, 3), nn.BatchNorm2d(8)))
    assert plan_fold(model).left == {"1": "Doubling has a forward of its own"}


def test_a_norm_that_computes_something_else_is_left() -> None:
    class Twice(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = shaken(nn.Sequential(nn.Conv2d(3, 8, 3), Twice(8)))
    assert "computes more than the bn" in plan_fold(model).left["1"]


# -------------------------------------------------------------------- what else uses the output


class Uses(nn.Module):
    """A convolution and a norm, with a forward that does something more."""

    def __init__(self, more: Callable[[Uses, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.bn, self.more = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), more

    def forward(self, x: Tensor) -> Any:
        return self.more(self, x)


class Twofold(torch.autograd.Function):
    """Code that torch calls without looking at its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def _after(use: Callable[[Tensor], Any]) -> Callable[[Uses, Tensor], Any]:
    def forward(model: Uses, x: Tensor) -> Any:
        y = model.conv(x)
        z = model.bn(y)
        return z + use(y)

    return forward


def _kept(model: Uses, x: Tensor) -> Tensor:
    model.last = model.conv(x)
    return model.bn(model.last)


def _returned(model: Uses, x: Tensor) -> dict[str, Tensor]:
    y = model.conv(x)
    return {"raw": y, "out": model.bn(y)}


def _in_place(model: Uses, x: Tensor) -> Tensor:
    return model.bn(model.conv(x).relu_())


def _pre_activation(model: Uses, x: Tensor) -> Tensor:
    return model.conv(F.relu(model.bn(x)))


OTHERS: dict[str, Callable[[Uses, Tensor], Any]] = {
    "sum": _after(lambda y: y),
    "view": _after(lambda y: y.flatten(1).mean()),
    "list": _after(lambda y: torch.cat([y, y]).mean()),
    "number": _after(lambda y: y.mean(dim=(0, 1, 2, 3)).item()),
    "numbers": _after(lambda y: sum(y.tolist()[0][0][0])),
    "function": _after(lambda y: Twofold.apply(y)),
    "kept": _kept,
    "returned": _returned,
    "in place": _in_place,
    "again": lambda model, x: model.bn(model.conv(x)) + model.bn(x),
    "twice": lambda model, x: model.bn(model.conv(x)) + model.conv(x),
    "pre-activation": _pre_activation,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_norm_stays_if_its_layer_feeds_anything_else(kind: str) -> None:
    """The order of registration would fold all of these, and be wrong."""
    model = shaken(Uses(OTHERS[kind]))
    plan = plan_fold(model, torch.randn(2, 4, 3, 3))
    assert list(plan.left) == ["bn"]
    assert not plan.folded
    assert list(plan_fold(model, False).folded) == ["bn"]


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda y: y.shape[0],
    "size": lambda y: y.size(1) + y.dim() + y.numel(),
    "type": lambda y: float(y.is_floating_point() and y.dtype is torch.float32),
}


@pytest.mark.parametrize("kind", FORMS)
def test_asking_for_the_form_of_a_tensor_is_no_use_of_it(kind: str) -> None:
    model = shaken(Uses(_after(FORMS[kind])))
    check(model, torch.randn(2, 4, 3, 3), {"bn": "conv"})


def test_a_pair_that_is_called_several_times_is_still_a_pair() -> None:
    model = shaken(Uses(lambda model, x: model.bn(model.conv(x)) + model.bn(model.conv(2 * x))))
    check(model, torch.randn(2, 4, 3, 3), {"bn": "conv"})


def test_one_convolution_with_two_norms_is_left() -> None:
    conv = nn.Conv2d(4, 4, 1)
    model = nn.Sequential(conv, nn.BatchNorm2d(4), conv, nn.BatchNorm2d(4)).eval()
    for example in (torch.randn(2, 4, 3, 3), False):
        assert not plan_fold(model, example).folded


def test_a_shared_norm_is_left() -> None:
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Conv2d(4, 4, 1), norm).eval()
    for example in (torch.randn(2, 4, 3, 3), False):
        assert not plan_fold(model, example).folded


def test_tied_weights_are_left() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)).eval()
    model[2].weight = model[0].weight
    assert "shares its weight" in plan_fold(model).left["1"]


@pytest.mark.parametrize("place", [0, 1])
def test_hooks_that_see_the_output_keep_it(place: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
    model[place].register_forward_hook(lambda *call: None)
    assert "hooks that see its output" in plan_fold(model).left["1"]


def test_a_norm_called_with_a_residual_is_left() -> None:
    model = Uses(lambda model, x: model.bn(model.conv(x), x, "relu"))
    model.bn = catalog.make("bn", 4)
    reason = plan_fold(model.eval(), torch.randn(2, 4, 3, 3)).left["bn"]
    assert "called with more than its input" in reason


# -------------------------------------------------------------------- whole models


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (torchvision.models.resnet18, 0),
        (torchvision.models.mobilenet_v3_small, 0),
        (lambda: torchvision.models.googlenet(init_weights=False), 2),  # of its two side exits
        (lambda: timm.create_model("resnet18"), 0),
        (lambda: timm.create_model("tf_mobilenetv3_small_minimal_100"), 0),
    ],
    ids=["resnet18", "mobilenet", "googlenet", "timm-resnet18", "timm-same"],
)
def test_models(make: Callable[[], nn.Module], left: int) -> None:
    model = make()
    batch_norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for module in batch_norms:
        module.running_mean.normal_(0, 0.3)
        module.running_var.uniform_(0.5, 2.0)
    model.eval()
    plan = plan_fold(model, torch.randn(2, 3, 64, 64))
    assert (len(plan.folded), len(plan.left)) == (len(batch_norms) - left, left)
    new = plan.apply()
    assert apart(model, new, torch.randn(1, 3, 96, 96)) <= ALLOWED[torch.float32]
    assert sum(isinstance(m, nn.BatchNorm2d) for m in new.modules()) == left


def test_an_input_is_found_where_none_is_given() -> None:
    model = shaken(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    plan = plan_fold(model)
    assert plan.seen
    assert "seen with random numbers (2, 3, 64, 64)" in str(plan)
    assert "1 into 0" in str(plan)


def test_on_the_meta_device_the_order_of_registration_decides() -> None:
    with torch.device("meta"):
        model = torchvision.models.resnet18().eval()
    plan = plan_fold(model)
    assert len(plan.folded) == 20
    assert not plan.seen
    with pytest.warns(UserWarning, match="meta device"):
        new = plan.apply()
    assert new.conv1.bias.shape == (64,)


def test_a_folded_model_can_be_folded_no_further() -> None:
    model = shaken(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    with pytest.raises(NothingToDo, match="There are no norms"):
        fold(fold(model))


# -------------------------------------------------------------------- bad input


def test_an_example_the_model_does_not_take() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(RuntimeError) as caught:
        fold(model.eval(), torch.randn(2, 5, 9, 9))
    assert "normkit ran the model on the example" in caught.value.__notes__[0]
    assert type(model[1]) is nn.BatchNorm2d


def test_models_that_train_say_what_to_do() -> None:
    with pytest.raises(NothingToDo, match=r"model\.eval\(\)"):
        fold(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))


def test_wrapped_models_are_refused() -> None:
    with pytest.raises(OptionError, match="OptimizedModule"):
        fold(torch.compile(nn.Conv2d(3, 8, 3), backend="eager"))


def test_a_result_that_differs_is_not_given_out() -> None:
    """A guess that is wrong is found out by the check, if an input comes later."""
    model = shaken(Uses(_pre_activation))
    plan = plan_fold(model, False)
    plan.probe = plan_fold(model, torch.randn(2, 4, 3, 3)).probe
    with pytest.raises(NormkitError, match="differs by"):
        plan.apply()
    assert type(model.bn) is nn.BatchNorm2d


def test_a_model_that_blows_up_last_digits_is_folded() -> None:
    """In float32 it differs by more than rounding usually explains; in float64 it does not."""

    class Touchy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(1e4 * self.norm(self.conv(x)))

    model = Touchy().eval()
    model.norm.running_mean.normal_()
    plan = plan_fold(model, example=torch.randn(2, 3, 9, 9))
    folded = plan.apply()
    assert isinstance(folded.norm, nn.Identity)
    assert plan.difference > 1e-5


def test_a_model_that_cannot_be_copied() -> None:
    """As of timm's LeViT after a forward with gradients."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    model.cache = model[0].weight * 2
    with pytest.raises(NormkitError, match="no_grad"):
        fold(model, example=torch.randn(2, 3, 9, 9))
