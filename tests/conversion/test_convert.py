"""convert: every target, in place, and models of every make."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.conversion import convert, plan_conversion
from normkit.errors import NothingToDo, OptionError, UnknownName
from normkit.layers.norm_act import NormAct
from subjects import (
    EXACT,
    PATHS,
    TARGETS,
    BatchNormAct2d,
    ConvNorm,
    Net,
    images,
    output,
    portrait,
    relative,
    trained,
)

# these need more than one position, which the norm after the linear layer has not
SKIP_FLAT = dict.fromkeys(("in", "ibn", "gw"), "!flat")


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_trains_on(target: str) -> None:
    model = trained(Net())
    where = SKIP_FLAT.get(target)
    plan = plan_conversion(model, target, where)
    certificate = plan.apply(images())
    assert certificate.converted + plan.count("keep") == len(PATHS) - (where is not None)
    assert plan.count("keep") == (3 if target == "torch_bn" else 0)  # plain ones are that already
    assert certificate.probed
    loss = model.train()(images(8)).square().sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert bool(torch.isfinite(loss))


@pytest.mark.parametrize("target", [*EXACT, "torch_bn", "sync_bn"])
def test_exact_targets_are_exact(target: str) -> None:
    model = trained(Net())
    x = images()
    before = output(model, x)
    plan = plan_conversion(model, target)
    assert plan.exact
    certificate = plan.apply(x)
    assert certificate.exact
    assert relative(before, output(model, x)) <= 1e-5
    assert certificate.difference == pytest.approx(relative(before, output(model, x)), abs=1e-7)


@pytest.mark.parametrize("target", ["gn", "bcn", "ln", "torch_gn"])
def test_other_targets_are_not_called_exact(target: str) -> None:
    model = trained(Net())
    x = images()
    before = output(model, x)
    plan = plan_conversion(model, target)
    assert not plan.exact
    certificate = plan.apply(x)
    assert not certificate.exact
    assert certificate.difference == pytest.approx(relative(before, output(model, x)), rel=1e-4)
    assert certificate.difference > 0.01


def test_in_place_at_every_path() -> None:
    model = trained(Net())
    assert convert(model, "bcn", example=images(), groups=4) is model
    assert model.shared is model.again
    assert repr(model.shared) == "BCN(16, groups=4, momentum=0.3, eps=0.001)"
    assert list(dict(model.named_children())) == [
        "stem", "conv", "bn", "twice", "shared", "linear", "flat", "head"
    ]  # fmt: skip
    assert isinstance(model.stem[1], nk.BCN)
    assert type(model.stem).__name__ == "ConvNorm"


def test_activation_and_drop_layer_live_on() -> None:
    model = trained(Net())
    act, drop = model.bn.act, model.bn.drop
    convert(model, "gn", "bn", example=images())
    assert isinstance(model.bn, NormAct)
    assert model.bn.act is act
    assert model.bn.drop is drop
    x = torch.randn(2, 16, 5, 5)
    assert torch.allclose(model.eval().bn(x), nn.functional.silu(model.bn.norm(x)))


def test_the_mode_of_each_layer_is_kept() -> None:
    model = trained(Net()).train()
    model.stem.eval()
    model.bn.drop.eval()
    before = [m.training for m in (model.stem[1], model.bn, model.bn.drop, model.shared)]
    for target in ("bn", "gn", "frozen_bn"):
        changed = convert(copy.deepcopy(model), target, example=images())
        after = [m.training for m in (changed.stem[1], changed.bn, changed.bn.drop, changed.shared)]
        assert after == before == [False, True, False, True]


def test_what_is_trained_is_kept() -> None:
    model = trained(Net())
    model.shared.bias.requires_grad_(False)
    model.flat.requires_grad_(False)
    convert(model, "rbn", example=images())
    assert model.shared.weight.requires_grad
    assert model.shared.gate_weight.requires_grad
    assert not model.shared.bias.requires_grad
    assert not any(p.requires_grad for p in model.flat.parameters())


def test_a_frozen_form_survives_train() -> None:
    model = trained(Net())
    x = images()
    convert(model, "frozen_bn", example=x)
    frozen = {k: v.clone() for k, v in model.flat.state_dict().items()}
    y = model.train().flat(torch.randn(4, 8))
    model(images(8)).sum().backward()
    assert y.requires_grad is False
    assert all(torch.equal(v, frozen[k]) for k, v in model.flat.state_dict().items())


@pytest.mark.parametrize("target", TARGETS)
def test_twice_is_once(target: str) -> None:
    model = trained(Net())
    where = SKIP_FLAT.get(target)
    convert(model, target, where, example=images())
    before = portrait(model)
    plan = plan_conversion(model, target, where)
    assert {step.action for step in plan.steps} == {"keep"}
    convert(model, target, where, example=images())  # without a warning
    assert portrait(model) == before


def test_other_options_convert_again() -> None:
    model = trained(Net())
    convert(model, "gn", example=images(), groups=4)
    assert plan_conversion(model, "gn", groups=4).count("keep") == len(PATHS)
    assert plan_conversion(model, "gn", groups=2).count() == len(PATHS)
    policy = {"groups": 12, "group_policy": "gcd"}
    convert(model, "gn", example=images(), **policy)
    assert plan_conversion(model, "gn", **policy).count("keep") == len(PATHS)


@pytest.mark.parametrize("to", [nk.BCN, nn.GroupNorm, nn.BatchNorm2d, nn.SyncBatchNorm])
def test_targets_by_class(to: type) -> None:
    model = convert(trained(Net()), to, "shared", example=images())
    assert type(model.shared) is to


def test_ranks_find_their_class() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 1), nk.BN(4), nn.Flatten(2), nn.Conv1d(4, 4, 1), nk.BN(4))
    convert(model, "torch_bn", example=torch.randn(2, 2, 3, 3, 3))
    assert [type(model[i]) for i in (1, 4)] == [nn.BatchNorm3d, nn.BatchNorm1d]
    convert(model, "bnet", example=torch.randn(2, 2, 3, 3, 3))
    assert [model[i].dims for i in (1, 4)] == [3, 1]


def test_placement_by_where() -> None:
    model = trained(Net())
    convert(model, "gn", ["stem.*", "flat"], example=images())
    assert isinstance(model.stem[1], nk.GN)
    assert isinstance(model.flat, nk.GN)
    assert type(model.shared) is nn.BatchNorm2d
    convert(model, "bn", lambda site: site.shared, example=images())
    assert isinstance(model.shared, nk.BN)
    assert isinstance(model.bn, BatchNormAct2d)


# -------------------------------------------------------------------- devices, types, formats


@pytest.mark.parametrize("target", TARGETS)
def test_meta_device(target: str) -> None:
    with torch.device("meta"):
        model = Net()
    plan = plan_conversion(model, target)
    certificate = plan.apply()
    assert certificate.converted + plan.count("keep") == len(PATHS)
    assert not certificate.probed
    assert not certificate.exact
    assert "meta" in str(certificate)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if target in EXACT:
        assert plan.exact
    plan.undo()
    assert isinstance(model.bn, BatchNormAct2d)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("target", ["bn", "ubn", "bcn", "frozen_bn", "torch_gn"])
def test_number_types(target: str, dtype: torch.dtype) -> None:
    model = trained(Net()).to(dtype)
    x = images().to(dtype)
    plan = plan_conversion(model, target)
    certificate = plan.apply(x)
    assert certificate.dtype == str(dtype).removeprefix("torch.")
    assert certificate.layers_exact == plan.exact
    assert model(x).dtype == dtype
    assert all(p.dtype == dtype for p in model.parameters())


def test_channels_last_stays() -> None:
    model = trained(Net()).to(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last)
    certificate = plan_conversion(model, "bn").apply(x)
    assert certificate.exact
    assert model.stem(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("target", [*EXACT, "gn", "bcn", "sync_bn"])
def test_on_a_gpu(target: str) -> None:
    model = trained(Net()).cuda()
    plan = plan_conversion(model, target)
    certificate = plan.apply(images().cuda())
    assert certificate.exact == plan.exact
    assert all(t.is_cuda for t in (*model.parameters(), *model.buffers()))
    plan.undo()
    assert isinstance(model.bn, BatchNormAct2d)


def test_a_norm_without_tensors_takes_the_type_of_its_neighbours() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8)).double()
    convert(model, "bn", example=torch.randn(2, 3, 9, 9).double())
    assert model[1].running_mean.dtype == torch.float64


@pytest.mark.gpu
def test_fast_products_of_a_gpu_do_not_blur_the_measure() -> None:
    conv = torch.backends.cudnn.conv
    before, choices = conv.fp32_precision, torch.backends.cudnn.benchmark
    conv.fp32_precision = "tf32"
    try:
        model = nn.Sequential(*(ConvNorm(8 if i else 3, 8) for i in range(20))).cuda()
        assert plan_conversion(trained(model), "rbn").apply(images().cuda()).exact
        assert conv.fp32_precision == "tf32"
        assert torch.backends.cudnn.benchmark == choices
    finally:
        conv.fp32_precision = before


def test_defaults_of_the_process_do_not_matter() -> None:
    model = trained(Net())
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"), torch.inference_mode():
        certificate = plan_conversion(model, "ubn", example=None).apply()
    assert certificate.exact
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.train()(images(8).float()).sum().backward()
    assert not any(p.is_meta or p.grad is None for p in model.parameters())


def test_lazy_layers_wait() -> None:
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.BatchNorm2d(8), nn.LazyBatchNorm2d())
    plan = plan_conversion(model, "gn")
    assert [step.action for step in plan.steps] == ["convert", "skip"]
    with pytest.warns(UserWarning, match="Only 1 of 2 norms are converted"):
        assert "lazy layers" in plan.apply().verdict
    model(images())
    assert plan_conversion(model, "gn").count() == 1


# -------------------------------------------------------------------- copies and checkpoints


def test_converted_models_are_copied_and_pickled() -> None:
    model = trained(Net())
    x = images()
    convert(model, "bcn", example=x)
    expected = output(model, x)
    assert torch.equal(output(copy.deepcopy(model), x), expected)
    assert torch.equal(output(pickle.loads(pickle.dumps(model)), x), expected)


def test_old_checkpoints_load_into_the_converted_model() -> None:
    model, other = trained(Net()), trained(Net())
    x = images()
    expected = output(other, x)
    convert(model, "bn", example=x)
    model.load_state_dict(other.state_dict())
    assert relative(expected, output(model, x)) <= 1e-5


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("ubm",), {}, UnknownName, "no target 'ubm'. Did you mean 'ubn'"),
        (("torch_b",), {}, UnknownName, "Did you mean 'torch_bn'"),
        (("GNN",), {}, UnknownName, "Did you mean 'gn'"),
        (("ws",), {}, UnknownName, "normkit.standardize"),
        ((nn.Conv2d,), {}, UnknownName, "Conv2d is no layer"),
        ((7,), {}, UnknownName, "no target 7"),
        (("gn",), {"group": 4}, OptionError, "no option 'group'. Did you mean 'groups'"),
        (("bn",), {"dtype": torch.float16}, OptionError, "no option 'dtype'"),
        (("sync_bn",), {"groups": 4}, OptionError, "no option 'groups'"),
        (("gn",), {"groups": 3}, OptionError, r"groups=3 does not .* stem\.1"),
        (("gn", "layer9.*"), {}, NothingToDo, r"layer9"),
        (("bn",), {"example": torch.randn(2, 5, 8, 8)}, OptionError, "fails on the given input"),
        (("bn",), {"optimizer": 3}, OptionError, "Optimizer"),
    ],
)
def test_errors_leave_the_model_alone(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = trained(Net())
    before = portrait(model)
    with pytest.raises(error, match=words):
        convert(model, *arguments, **options)
    assert portrait(model) == before


def test_zero_layers_warn() -> None:
    tokens = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    with pytest.warns(UserWarning, match=r"no layer is converted. 1 skipped: .* last axis") as seen:
        convert(tokens, "gn", example=torch.randn(2, 4))
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="no norms"):
        convert(nn.Sequential(nn.Linear(4, 8)), "gn")


def test_a_model_that_is_a_norm_cannot_be_replaced() -> None:
    with pytest.raises(OptionError, match=r"nn.Sequential\(model\)"):
        convert(nn.BatchNorm2d(4), "gn")
    wrapped = convert(nn.Sequential(nn.BatchNorm2d(4)), "gn")
    assert isinstance(wrapped[0], nk.GN)


def test_models_that_were_compiled_or_exported_are_refused() -> None:
    model = trained(Net())
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager")
    exported = torch.export.export(copy.deepcopy(model).eval(), (images(),))
    scripted = torch.jit.trace(nn.Sequential(nn.BatchNorm2d(3)).eval(), images())
    for refused, words in (
        (compiled, r"model\._orig_mod"),
        (in_place, r"before calling compile\(\)"),
        (exported, "torch.export"),
        (exported.module(), "export"),
        (scripted, "TorchScript"),
        (nn.DataParallel(model), r"model\.module"),
    ):
        with pytest.raises(OptionError, match=words):
            convert(refused, "bn")


def test_traced_models_are_converted() -> None:
    model = torch.fx.symbolic_trace(trained(ConvNorm(3, 8)).eval())
    assert isinstance(model, torch.fx.GraphModule)
    certificate = plan_conversion(model, "bn").apply(images())
    assert certificate.exact
    assert isinstance(model.get_submodule("1"), nk.BN)


class Held(nn.Module):
    """Calls its norm from a list, where nobody can replace it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.layers = [self.norm]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def test_a_norm_that_is_also_held_elsewhere_is_found_out() -> None:
    model = Held()
    before = portrait(model)
    with pytest.raises(OptionError, match=r"norm: .* no submodule"):
        convert(model, "gn", example=images())
    assert portrait(model) == before


def test_a_norm_that_a_list_holds_too_is_told_of() -> None:
    """Without an example nothing else would say that the old layer is still called."""

    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.steps = [self.conv, self.norm]

        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x = step(x)
            return x

    plan = plan_conversion(nn.Sequential(Listing()), "gn", example=False)
    assert "0.norm in 0.steps" in str(plan)
    assert "0.norm in 0.steps" in plan.apply().note
    assert "in 0.steps" in str(nk.recipes.ubn(nn.Sequential(Listing()), example=False))
