"""What first users tripped over: a conversion that goes wrong, or only half the way, says so."""

from __future__ import annotations

import gc
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.conversion import plan_conversion
from normkit.conversion.optimizer import optimizers_of


def net(*norms: nn.Module) -> nn.Sequential:
    """A convolution before each norm."""
    return nn.Sequential(*(m for norm in norms for m in (nn.Conv2d(8, 8, 3, padding=1), norm)))


def warned(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


# ---------------------------------------------------------------- the certificate


def test_outputs_that_are_not_finite_any_more() -> None:
    """resnetv2_50x1_bit, of group norms, gave NaN as ubn, without a word: without running
    statistics nothing held its activations, and convert threw the certificate away."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 1))
    with torch.no_grad():
        model[0].weight.mul_(1e30)
        model[2].weight.mul_(1e30)
    (said,) = warned(lambda: nk.convert(model, "bn"))
    assert "The output in eval mode is not finite any more." in said
    (certificate,) = nk.certificates(model)
    assert not certificate.finite
    assert "not finite" in str(certificate)
    assert certificate.to_dict()["finite"] is False


def test_the_certificate_stays_with_the_model() -> None:
    model = net(nn.BatchNorm2d(8))
    assert nk.certificates(model) == ()
    assert warned(lambda: nk.convert(model, "rbn")) == []
    plan = plan_conversion(model, "gn")
    plan.apply()
    first, second = nk.certificates(model)
    assert (first.exact, second) == (True, plan.certificate)
    plan.undo()
    assert nk.certificates(model) == (first,)


def test_exactness_that_was_promised() -> None:
    """A model that reads the scale of its norm itself is not what it was, though each layer is."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) * self.norm.weight.mean()

    (said,) = warned(lambda: nk.convert(Reads(), "rbn"))
    assert "Every layer was to be exact, but: The output differs by" in said
    assert warned(lambda: nk.convert(net(nn.BatchNorm2d(8)), "gn")) == []  # nothing was promised


@pytest.mark.parametrize("other", [nn.GroupNorm(4, 8), nk.LN(8), nn.InstanceNorm2d(8, affine=True)])
def test_norms_that_are_no_batch_norms_stay_unless_asked_for(other: nn.Module) -> None:
    """coatnet, maxvit and tiny_vit have a few layer and group norms, which went along, and their
    conversions to ubn were not exact."""
    model = net(nn.BatchNorm2d(8), other, nn.SyncBatchNorm(8), nk.FrozenBN(8), nk.RBN(8)).eval()
    plan = plan_conversion(model, "ubn")
    assert [step.action for step in plan.steps] == ["convert", "keep", *["convert"] * 3]
    assert "not asked for" in plan.steps[1].reason
    plan = plan_conversion(model, "ubn", [f"kind:{nk.survey(model).sites[1].kind}"])
    assert [step.action for step in plan.steps] == ["convert"]
    alone = plan_conversion(net(other), "ubn")  # there is nothing else that could be meant
    assert alone.count() == 1


class Head(nn.Module):
    """Its head expects 16 features, and gets 8."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.fc = nn.Linear(16, 2)
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(x.shape[-1])
        result: Tensor = self.fc(self.features(x).mean((2, 3)))
        return result


def test_a_model_that_cannot_be_run() -> None:
    """Seven larger and larger images were tried on it; then only the certificate that convert
    threw away said "not measured"."""
    model = Head()
    (said,) = warned(lambda: nk.convert(model, "gn"))
    assert "Not measured: no input was given. The model took none of" in said
    assert "mat1 and mat2" in said
    assert len(model.sizes) == 2  # the second says the same, so the size does not matter
    assert warned(lambda: nk.convert(Head(), "gn", example=False)) == []

    class Wrong(Head):
        def forward(self, x: Tensor) -> Tensor:
            self.sizes.append(x.shape[-1])
            raise AttributeError("no size can cure this")

    model = Wrong()
    warned(lambda: nk.convert(model, "gn"))
    assert len(model.sizes) == 1


def test_sizes_are_still_tried_where_they_matter() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 30 * 30, 2)
    )
    assert "(2, 3, 32, 32)" in plan_conversion(model, "gn").apply().probe


@pytest.mark.parametrize("other", [nn.GroupNorm(4, 8), nk.GN(8, groups=4), nk.LN(8), nk.IN(8)])
def test_norms_of_samples_become_batch_norms_that_track(other: nn.Module) -> None:
    """nn.GroupNorm became a batch norm with running statistics, normkit's own GN one without,
    which uses the batch in eval mode too; and ubn, which needs them, refused."""
    model = net(other)
    nk.convert(model, "bn")
    assert model[1].track_running_stats
    assert plan_conversion(net(other), "ubn").count() == 1


# ---------------------------------------------------------------- optimizers


def test_an_optimizer_that_is_not_told() -> None:
    """The gates of ubn never trained: the optimizer was made before, and nobody told it."""
    model = net(nn.BatchNorm2d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert optimizers_of(model) == [optimizer]
    plan = plan_conversion(model, "ubn")
    assert "parameter(s) are new: make the optimizer now" in str(plan)
    (said,) = warned(plan.apply)
    assert "SGD, made for this model, will not train them: give it" in said
    plan.undo()
    assert warned(lambda: nk.convert(model, "ubn", optimizer=optimizer)) == []
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in model.parameters()} == known


def test_no_alarm_for_other_optimizers() -> None:
    gc.collect()
    model, other = net(nn.BatchNorm2d(8)), net(nn.BatchNorm2d(8))
    optimizer = torch.optim.Adam(other.parameters())
    assert warned(lambda: nk.convert(model, "ubn")) == []
    assert warned(lambda: nk.convert(other, "gn", groups=4)) == []  # scale and shift live on
    assert id(other[1].weight) in {id(p) for p in optimizer.param_groups[0]["params"]}


# ---------------------------------------------------------------- broken norms


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:.*quant")
def test_a_quantized_norm_is_left_alone() -> None:
    """An int8 model was converted, and failed in its first forward."""
    quantization = pytest.importorskip("torch.ao.quantization")
    quantized = pytest.importorskip("torch.ao.nn.quantized")
    del quantization
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), quantized.BatchNorm2d(8))
    plan = plan_conversion(model, "gn")
    assert [step.action for step in plan.steps] == ["convert", "skip"]
    assert "quantized" in plan.steps[1].reason
    (said,) = warned(lambda: plan.apply(False))
    assert "Only 1 of 2 norms are converted. 1 are not, such as 2: it is quantized" in said


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("running_var", -1.0, "negative"),
        ("running_var", math.inf, "not finite"),
        ("running_var", -math.inf, "not finite and negative"),
        ("running_mean", math.nan, "not finite"),
        ("weight", math.nan, "not finite"),
        ("bias", math.inf, "not finite"),
    ],
)
def test_tables_that_no_training_leaves(name: str, value: float, word: str) -> None:
    """Negative variances and NaN weights were carried into the new layers without a word."""
    model = net(nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    with torch.no_grad():
        getattr(model[3], name)[2] = value
    plan = plan_conversion(model, "rbn")
    expected = f"3: its {name} is {word} in places. Try normkit.diagnose(model, loader) first."
    assert expected in str(plan).replace("\n! ", " ")
    assert expected in warned(lambda: plan.apply(False))[0]


def test_many_of_them_are_counted() -> None:
    model = net(*(nn.BatchNorm2d(8) for _ in range(6)))
    for norm in model[1::2]:
        norm.running_var.fill_(-1)
    (said,) = warned(lambda: nk.convert(model, "rbn", example=False))
    assert "So it is with 3 more tables." in said


# ---------------------------------------------------------------- only some norms


def test_a_target_that_fits_only_some() -> None:
    """dn wants powers of two, and took 3 of EfficientNet's 49 norms."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6),
        nn.Conv2d(6, 10, 1), nn.BatchNorm2d(10),
    )  # fmt: skip
    plan = plan_conversion(model, "dn")
    assert "! Only 1 of 3 norms are converted. " in str(plan)
    (said,) = warned(lambda: nk.convert(model, "dn"))
    assert "Only 1 of 3 norms are converted." in said
    assert "such as 3" in said


class Detector(nn.Module):
    """A head that sees as many samples as there are proposals."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor, proposals: int = 7) -> Tensor:
        features = self.body(x).mean((2, 3))
        result: Tensor = self.head(features.repeat(proposals, 1)[:-1])
        return result


def test_layers_that_link_samples_in_the_heads_of_a_detector() -> None:
    """dn with batch=2 failed there on the first odd number of proposals, and advised drop_last."""
    model = Detector()
    (said,) = warned(lambda: nk.convert(model, "dn", batch=2))
    assert "head.1 takes a multiple of 2 samples in training, and gets 13 here" in said
    assert 'where="!head.1"' in said
    assert "body.1 takes" not in said
    with pytest.raises(nk.NormkitError, match=r"head\.1.* proposals.*leave the layer out"):
        model.train()(torch.randn(2, 3, 9, 9))
    left = Detector()
    assert warned(lambda: nk.convert(left, "dn", "!head.1", batch=2)) == []
    left.train()(torch.randn(2, 3, 9, 9))


# ---------------------------------------------------------------- options that decide


@pytest.mark.parametrize("name", ["rbn", "iebn", "ubn", "bnet", "bn", "batch_renorm"])
def test_from_norms_without_scale_and_shift(name: str) -> None:
    """Of DARTS' norms, with affine=False, bnet became plain batch norm, its kernel missing; ubn,
    rbn and iebn got a trainable scale and shift, which only have to undo their gates."""
    model = net(nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, affine=False))
    plan = plan_conversion(model, name)
    said = warned(plan.apply)
    assert plan.certificate is not None
    assert plan.certificate.exact
    layer = model[1]
    if name in ("ubn", "bnet"):  # whose kernel is the method
        assert layer.weight.shape == (8, 1, 3, 3)
        assert layer.weight.requires_grad
        assert (
            "2 norm(s) without scale and shift (affine=False), such as 1, get trainable" in said[0]
        )
        assert "gets a trainable scale and shift" in str(plan)
    else:
        assert said == []
        assert layer.weight is None or not layer.weight.requires_grad
        assert layer.bias is None or not layer.bias.requires_grad


def test_scale_and_shift_that_are_asked_for() -> None:
    model = net(nn.BatchNorm2d(8, affine=False))
    assert warned(lambda: nk.convert(model, "rbn", affine=True)) == []
    assert model[1].weight.requires_grad
    model = net(nn.BatchNorm2d(8, affine=False))
    warned(lambda: nk.convert(model, "ubn", affine_conv=False))
    assert not model[1].weight.requires_grad
    assert all(p.requires_grad for name, p in model[1].named_parameters() if "gate" in name)


def test_a_conversion_that_only_renames() -> None:
    """convert(model, "bgn") gave a group for each channel: batch norm under another name."""
    model = net(nn.BatchNorm2d(8))
    plan = plan_conversion(model, "bgn")
    assert "! Without groups= there is a group for each channel, which is batch norm." in str(plan)
    (said,) = warned(plan.apply)
    assert "recipes.bgn(model, batch_size=)" in said
    assert warned(lambda: nk.convert(net(nn.BatchNorm2d(8)), "bgn", groups=4)) == []
    assert warned(lambda: nk.recipes.bgn(net(nn.BatchNorm2d(8)), batch_size=2).apply()) == []


# ---------------------------------------------------------------- names that people type


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("group_norm", "gn"),
        ("GroupNorm", "gn"),
        ("nn.GroupNorm", "gn"),
        ("BatchNorm2d", "bn"),
        ("batchnorm", "bn"),
        ("batch_norm", "bn"),
        ("batch_normalization", "bn"),
        ("layernorm", "ln"),
        ("LayerNorm", "ln"),
        ("ln2d", "pn"),
        ("LayerNorm2d", "pn"),
        ("instance_norm", "in"),
        ("InstanceNorm3d", "in"),
        ("syncbn", "sync_bn"),
        ("SyncBatchNorm", "sync_bn"),
        ("sync_batch_norm", "sync_bn"),
        ("RMSNorm", "rms"),
        ("batch_channel_norm", "bcn"),
        ("FrozenBatchNorm2d", "frozen_bn"),
        ("ghost batch norm", "ghost_bn"),
        ("switchable-norm", "sn"),
        ("GN", "gn"),
    ],
)
def test_names_that_people_type(typed: str, meant: str) -> None:
    """`group_norm` was answered with `input_norm`, the nearest by letters; then with the right
    name, which could as well have been taken."""
    model = net(nn.BatchNorm2d(8))
    assert plan_conversion(model, typed).title == plan_conversion(model, meant).title
    if meant != "sync_bn":
        assert type(nk.make(typed, 8)) is type(nk.make(meant, 8))


def test_a_name_means_one_layer() -> None:
    for name in nk.names():
        others = {t for other in nk.names() if other != name for t in nk.catalog._spoken(other)}
        assert not nk.catalog._spoken(name) & others


def test_names_are_understood_wherever_they_are_typed() -> None:
    assert nk.standardize(net(nn.BatchNorm2d(8)), "weight_standardization") == ["0"]
    with pytest.raises(nk.NormkitError, match=r"standardize\(model, 'ws'\)"):
        nk.convert(net(nn.BatchNorm2d(8)), "WeightStandardization")
    with pytest.raises(nk.NormkitError, match="Did you mean 'bcn'"):
        nk.convert(net(nn.BatchNorm2d(8)), "bcnn")


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("syncbn", 'convert(model, "sync_bn")'),
        ("sync_bn", 'convert(model, "sync_bn")'),
        ("SyncBatchNorm", 'convert(model, "sync_bn")'),
        ("BatchNormAct2d", "Did you mean 'bn'?"),
        ("GroupNormAct", "Did you mean 'gn'?"),
        ("spectral_norm", "torch.nn.utils.parametrizations.spectral_norm"),
        ("nn.SpectralNorm", "torch.nn.utils.parametrizations.spectral_norm"),
    ],
)
def test_names_of_what_is_elsewhere(typed: str, answer: str) -> None:
    """They were answered with a list, with batch_renorm and with input_norm."""
    with pytest.raises(nk.NormkitError, match=re.escape(answer)):
        nk.make(typed, 8)
    if "sync" not in typed.lower():
        with pytest.raises(nk.NormkitError, match=re.escape(answer)):
            nk.convert(net(nn.BatchNorm2d(8)), typed)


# ---------------------------------------------------------------- numbers that are not finite


def broken(table: str, value: float) -> nn.Sequential:
    model = net(nn.BatchNorm2d(8), nn.BatchNorm2d(8)).eval()
    with torch.no_grad():
        getattr(model[3], table)[2] = value
    return model


@pytest.mark.parametrize(
    ("table", "value", "wrong"),
    [("running_var", -1.0, "negative"), ("running_var", math.inf, "not finite"),
     ("weight", math.nan, "not finite")],
)  # fmt: skip
def test_fold_and_from_batch_norm_say_what_is_broken(table: str, value: float, wrong: str) -> None:
    """convert said it; fold and from_batch_norm made NaN of it without a word."""
    model = broken(table, value)
    (said,) = warned(lambda: nk.fold(model))
    assert f"3: its {table} is {wrong} in places" in said
    (said,) = warned(lambda: nk.BN.from_batch_norm(model[3]))
    assert f"BN.from_batch_norm: of BatchNorm2d, its {table} is {wrong} in places" in said
    assert warned(lambda: nk.BN.from_batch_norm(model[1])) == []


@pytest.mark.parametrize("given", [True, False])
def test_a_weight_that_is_nan_ends_the_probing(given: bool) -> None:
    """Seven sizes up to 512 × 512 were tried, and then a better example was asked for."""
    model = net(nn.BatchNorm2d(8), nn.BatchNorm2d(8)).eval()
    with torch.no_grad():
        model[2].weight[:] = math.nan
    runs: list[int] = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    plan = plan_conversion(model, "gn", example=torch.randn(2, 8, 4, 4) if given else None)
    runs.clear()
    (said,) = warned(plan.apply)
    assert len(runs) == 1
    assert "no finite number for" in said
    assert "2.weight is not finite" in said
    assert "example=" not in said
    plan.undo()
    (said,) = warned(lambda: nk.fold(model))
    assert "no finite number to compare: 2.weight is not finite" in said
    (said,) = warned(lambda: nk.convert(model, "gn"))
    assert "2.weight is not finite" in said


def test_a_mask_of_attention_is_not_what_is_broken() -> None:
    model = net(nn.BatchNorm2d(8)).eval()
    model.register_buffer("mask", torch.full((2,), -math.inf))
    assert warned(lambda: nk.fold(model)) == []
    with torch.no_grad():
        model[1].running_mean[:] = math.nan
    (said,) = warned(lambda: nk.fold(model))
    assert "1.running_mean is not finite" in said


# ---------------------------------------------------------------- a bias that was ruled out


@pytest.mark.parametrize(
    "to", ["bn", "ubn", "rbn", "gn", "iebn", "bnet", "batch_renorm", "in", "torch_gn", "sync_bn"]
)
def test_a_norm_without_bias_gets_none_to_train(to: str) -> None:
    """BatchNorm2d(8, bias=False) came out with a trainable bias, without a word."""
    norm = nn.BatchNorm2d(8)
    norm.bias = None  # what bias=False of later versions of torch does
    model = net(norm)
    groups = {"groups": 4} if to in ("gn", "torch_gn") else {}
    plan = plan_conversion(model, to, **groups)
    plan.apply()
    bias = model[1].bias
    assert bias is not None
    assert not bias.requires_grad
    assert not bias.any()
    assert model[1].weight.requires_grad
    assert "bias stay untrained, as it had none" in plan.steps[0].reason
    assert "bias stay untrained" in str(plan)
    model(torch.randn(4, 8, 5, 5)).sum().backward()
    assert bias.grad is None


@pytest.mark.parametrize("to", ["rbn", "iebn"])
def test_a_map_that_only_makes_up_for_a_gate_is_named(to: str) -> None:
    """requires_grad_(True) on the model sets weight and bias training, and no plan said so."""
    plan = plan_conversion(net(nn.BatchNorm2d(8, affine=False)), to)
    assert "weight and bias stay untrained" in plan.steps[0].reason
