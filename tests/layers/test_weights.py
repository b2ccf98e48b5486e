"""ws, wn and cwn: known answers from NumPy loops, the identities of the papers, and the edges."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from normkit.errors import DeviceError, DtypeError, NothingToDo, OptionError, ShapeError
from normkit.layers.cwn import CWN
from normkit.layers.weight import WeightNormalizer
from normkit.layers.wn import WN
from normkit.layers.ws import WS

F64 = {"rtol": 1e-12, "atol": 1e-12}
KINDS = (WS, WN, CWN)
SHAPES = [(6, 4, 3, 3), (5, 7), (3, 2, 5), (4, 3, 2, 2, 2), (8, 1, 3, 3), (2, 2, 1, 1)]


def filters(weight: Tensor) -> list[np.ndarray]:
    return [np.asarray(f.detach().double()).ravel() for f in weight]


def stacked(rows: list[np.ndarray], like: Tensor) -> Tensor:
    return torch.from_numpy(np.stack(rows)).reshape(like.shape)


def random_weight(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * 0.1 + 0.05).to(dtype)


# -------------------------------------------------------------------- known answers

WS_ANSWERS = {
    "paper": lambda w: (w - w.mean()) / math.sqrt(((w - w.mean()) ** 2).sum() / w.size + 1e-5),
    "ws": lambda w: (w - w.mean()) / (math.sqrt(((w - w.mean()) ** 2).sum() / (w.size - 1)) + 1e-5),
    "bcn": lambda w: (w - w.mean()) / math.sqrt(((w - w.mean()) ** 2).sum() / (w.size - 1) + 1e-5),
    "timm": lambda w: (w - w.mean()) / math.sqrt(((w - w.mean()) ** 2).sum() / w.size + 1e-6),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", WS_ANSWERS)
def test_ws_of_each_variant(variant: str, shape: tuple[int, ...]) -> None:
    weight = random_weight(*shape)
    expected = stacked([WS_ANSWERS[variant](w) for w in filters(weight)], weight)
    torch.testing.assert_close(WS(shape[0], variant=variant)(weight), expected, **F64)


def test_options_override_the_variant() -> None:
    """The TensorFlow snippet of the authors: biased, eps outside, 1e-5; and another eps."""
    weight = random_weight(6, 4, 3, 3)
    rows = [(w - w.mean()) / (w.std() + 1e-3) for w in filters(weight)]
    layer = WS(6, variant="ws", unbiased=False, eps=1e-3)
    torch.testing.assert_close(layer(weight), stacked(rows, weight), **F64)
    layer = WS(6, variant="paper", eps_outside=True, eps=1e-3)
    torch.testing.assert_close(layer(weight), stacked(rows, weight), **F64)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"scale": False}, lambda w: w - w.mean()),
        ({"center": False}, lambda w: w / np.sqrt(w.var() + 1e-5)),
        ({"center": False, "rms": True}, lambda w: w / np.sqrt((w**2).mean() + 1e-5)),
        (
            {"center": False, "rms": True, "variant": "ws"},
            lambda w: w / (np.sqrt((w**2).mean()) + 1e-5),
        ),
    ],
    ids=["mean", "std", "rms", "rms-ws"],
)
def test_ws_single_components(options: dict[str, Any], answer: Any) -> None:
    weight = random_weight(6, 4, 3, 3)
    expected = stacked([answer(w) for w in filters(weight)], weight)
    torch.testing.assert_close(WS(6, **options)(weight), expected, **F64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cwn(shape: tuple[int, ...]) -> None:
    weight = random_weight(*shape)
    gains = np.linspace(0.5, 2.0, shape[0])
    layer = CWN(shape[0], dtype=torch.float64)
    assert layer.gain is not None
    with torch.no_grad():
        layer.gain.copy_(torch.from_numpy(gains))
    rows = [
        g * (w - w.mean()) / (np.linalg.norm(w - w.mean()) + 1e-5)
        for g, w in zip(gains, filters(weight), strict=True)
    ]
    torch.testing.assert_close(layer(weight), stacked(rows, weight), **F64)


def test_cwn_starts_at_the_square_root_of_two_and_can_be_fixed() -> None:
    weight = random_weight(6, 4, 3, 3)
    free, fixed = CWN(6, dtype=torch.float64), CWN(6, learn_scale=False)
    assert [name for name, _ in free.named_parameters()] == ["gain"]
    assert list(fixed.parameters()) == []
    rows = [
        math.sqrt(2) * (w - w.mean()) / (np.linalg.norm(w - w.mean()) + 1e-5)
        for w in filters(weight)
    ]
    for layer in (free, fixed):
        torch.testing.assert_close(layer(weight), stacked(rows, weight), **F64)


@pytest.mark.parametrize("shape", [*SHAPES, (4, 1, 1, 1)], ids=str)
def test_wn(shape: tuple[int, ...]) -> None:
    v, g = random_weight(*shape), random_weight(shape[0], *[1] * (len(shape) - 1))
    rows = [
        gain * w / np.linalg.norm(w)
        for gain, w in zip(g.flatten().tolist(), filters(v), strict=True)
    ]
    torch.testing.assert_close(WN(shape[0])(g, v), stacked(rows, v), **F64)


# -------------------------------------------------------------------- other implementations


def test_the_timm_variant_is_batch_norm_over_the_weight() -> None:
    weight = random_weight(8, 3, 5, 5)
    flat = weight.reshape(1, 8, -1)
    expected = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
    actual = WS(8, variant="timm")(weight)
    torch.testing.assert_close(actual, expected.reshape_as(weight), **F64)


@pytest.mark.parametrize("build", [lambda: nn.Conv2d(3, 6, 3), lambda: nn.Linear(5, 6)])
def test_wn_is_weight_norm_of_torch(build: Any) -> None:
    module = build().double()
    ours, theirs = copy.deepcopy(module), parametrizations.weight_norm(copy.deepcopy(module))
    WN.attach(ours)
    torch.testing.assert_close(ours.weight, module.weight, **F64)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(torch.rand_like(p) + 0.5)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours.weight, theirs.weight, **F64)
    upstream = torch.randn_like(module.weight)
    (ours.weight * upstream).sum().backward()
    (theirs.weight * upstream).sum().backward()
    for key in ("original0", "original1"):
        a, b = (getattr(m.parametrizations.weight, key).grad for m in (ours, theirs))
        torch.testing.assert_close(a, b, **F64)


# -------------------------------------------------------------------- identities


def test_ws_gives_mean_zero_and_a_variance_just_below_one() -> None:
    weight, eps = random_weight(16, 8, 3, 3), 1e-3
    standard = WS(16, eps=eps)(weight).flatten(1)
    var = weight.flatten(1).var(1, correction=0)
    torch.testing.assert_close(standard.mean(1), torch.zeros(16).double(), **F64)
    torch.testing.assert_close(standard.var(1, correction=0), 1 / (1 + eps / var), **F64)


def test_cwn_of_length_sqrt_fan_in_is_ws() -> None:
    weight = random_weight(6, 4, 3, 3)
    cwn = CWN(6, scale=math.sqrt(36), learn_scale=False, eps=0.0)
    torch.testing.assert_close(cwn(weight), WS(6, eps=0.0)(weight), **F64)


def test_the_gradient_falls_into_three_parts() -> None:
    """ws-bcn, fig. 4: what eq. 14 removes, what eq. 15 removes, and what remains."""
    weight = random_weight(7, 4, 3, 3).requires_grad_()
    standard = WS(7, eps=0.0)(weight)
    g = torch.randn_like(standard)
    (grad,) = torch.autograd.grad(standard, weight, g)
    w_hat, g, raw = standard.detach().flatten(1), g.flatten(1), weight.detach().flatten(1)
    along = (w_hat * g).sum(1).square() / 36
    mean = g.sum(1).square() / 36
    rest = raw.var(1, correction=0) * grad.flatten(1).square().sum(1)
    torch.testing.assert_close(along + mean + rest, g.square().sum(1), **F64)


def test_a_norm_cancels_the_scale() -> None:
    """Division alone does nothing that a norm per channel with eps 0 would notice."""
    conv, x = nn.Conv2d(3, 6, 3, bias=False).double(), torch.randn(2, 3, 8, 8).double()
    expected = F.group_norm(conv(x), 6, eps=0.0)
    WS.attach(conv, center=False)
    torch.testing.assert_close(F.group_norm(conv(x), 6, eps=0.0), expected, rtol=1e-10, atol=1e-10)


# -------------------------------------------------------------------- gradients

OPTIONS: list[tuple[type[WeightNormalizer], dict[str, Any]]] = [
    *((WS, {"variant": variant}) for variant in WS_ANSWERS),
    (WS, {"scale": False}),
    (WS, {"center": False}),
    (WS, {"center": False, "rms": True}),
    (CWN, {}),
    (CWN, {"learn_scale": False}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_gradcheck(kind: type[WeightNormalizer], options: dict[str, Any]) -> None:
    weight = random_weight(3, 2, 2, 2).requires_grad_()
    layer = kind(3, dtype=torch.float64, **options)

    def compute(weight: Tensor, *parameters: Tensor) -> Tensor:
        names = [name for name, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), weight)

    inputs = (weight, *(p.detach().clone().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


def test_gradcheck_wn() -> None:
    g = random_weight(3, 1, 1, 1).requires_grad_()
    v = random_weight(3, 2, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(WN(3), (g, v))


# -------------------------------------------------------------------- edges


@pytest.mark.parametrize("variant", WS_ANSWERS)
@pytest.mark.parametrize("value", [0.0, 0.1])
def test_a_constant_filter_becomes_zero_with_a_finite_gradient(variant: str, value: float) -> None:
    weight = random_weight(3, 4, 3, 3)
    weight[1] = value
    weight.requires_grad_()
    standard = WS(3, variant=variant)(weight)
    (standard * torch.randn_like(standard)).sum().backward()
    # the mean of equal numbers may be off by a rounding error, which eps ≥ 1e-6 divides
    torch.testing.assert_close(standard[1], torch.zeros_like(standard[1]), rtol=0, atol=1e-10)
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_a_constant_filter_under_cwn() -> None:
    weight = torch.zeros(2, 4, 3, 3).requires_grad_()
    out = CWN(2)(weight)
    (out * torch.randn_like(out)).sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("variant", WS_ANSWERS)
def test_a_filter_of_one_weight_is_left_alone(variant: str) -> None:
    weight = random_weight(4, 1, 1, 1)
    assert torch.equal(WS(4, variant=variant)(weight), weight)


def test_a_filter_of_one_weight_taken_literally() -> None:
    weight = random_weight(4, 1, 1, 1)
    literal = WS(4, skip_fan_in_one=False)(weight)
    assert torch.equal(literal, torch.zeros_like(weight))
    with pytest.raises(ShapeError, match="skip_fan_in_one=True"):
        WS(4, variant="bcn", skip_fan_in_one=False)(weight)
    with pytest.raises(ShapeError, match="Try wn"):
        CWN(4)(weight)


@pytest.mark.parametrize(
    ("kind", "options", "value", "remedy"),
    [
        (WN, {}, 0.0, "ws or cwn"),
        (WS, {"eps": 0.0}, 0.1, "eps=1e-5"),
        (WS, {"eps": 0.0, "center": False, "rms": True}, 0.0, "eps=1e-5"),
        (CWN, {"eps": 0.0}, 0.1, "eps=1e-5"),
    ],
)
def test_division_by_zero_is_an_error_before_it_is_nan(
    kind: type[WeightNormalizer], options: dict[str, Any], value: float, remedy: str
) -> None:
    conv = nn.Conv2d(3, 4, 3)
    with torch.no_grad():
        conv.weight[2] = value
    with pytest.raises(OptionError, match=rf"output channels \[2\].*{remedy}"):
        kind.attach(conv, **options)
    assert type(conv) is nn.Conv2d
    assert isinstance(conv.weight, nn.Parameter)


def test_grouped_and_depthwise_convolutions_standardize_each_filter() -> None:
    for conv in (nn.Conv2d(8, 4, 3, groups=4), nn.Conv2d(6, 6, 3, groups=6)):
        conv.double()
        expected = stacked([WS_ANSWERS["paper"](w) for w in filters(conv.weight)], conv.weight)
        WS.attach(conv)
        torch.testing.assert_close(conv.weight, expected, **F64)


@pytest.mark.parametrize("kind", KINDS)
def test_transposed_convolutions_are_refused(kind: type[WeightNormalizer]) -> None:
    conv = nn.ConvTranspose2d(4, 4, 3)
    with pytest.raises(ShapeError, match="first axis"):
        kind.attach(conv)
    assert type(conv) is nn.ConvTranspose2d


def test_wrong_weights_are_refused_in_words() -> None:
    with pytest.raises(ShapeError, match=r"expects a weight \(4, in, \*kernel\), got \(5, 3\)"):
        WS(4)(torch.randn(5, 3))
    with pytest.raises(ShapeError, match=r"got \(4,\)"):
        WS(4)(torch.randn(4))
    with pytest.raises(DtypeError, match=r"torch\.int64"):
        WS(4)(torch.ones(4, 3, dtype=torch.int64))
    with pytest.raises(DeviceError, match=r"CWN\.attach"):
        CWN(4)(torch.empty(4, 3, device="meta"))
    with pytest.raises(ShapeError, match="one batch"):
        WS.attach(nn.LazyConv2d(4, 3))
    with pytest.raises(OptionError, match="plain parameter 'weight'"):
        WS.attach(nn.ReLU())
    twice = WS.attach(nn.Conv2d(3, 4, 3))
    with pytest.raises(OptionError, match="remove it first"):
        WN.attach(twice)
    with pytest.raises(NothingToDo):
        WS.fold(nn.Conv2d(3, 4, 3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"variant": "papers"}, "Did you mean 'paper'"),
        ({"eps": -1.0}, "eps ≥ 0"),
        ({"eps": math.nan}, "eps ≥ 0"),
        ({"center": False, "scale": False}, "nothing"),
        ({"rms": True}, "rms=True only"),
        ({"rms": True, "center": False, "scale": False}, "nothing"),
    ],
)
def test_impossible_options_of_ws(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        WS(4, **options)


def test_impossible_options_of_the_others() -> None:
    with pytest.raises(OptionError, match="finite scale"):
        CWN(4, scale=math.inf)
    with pytest.raises(OptionError, match="positive integer"):
        WN(0)


# -------------------------------------------------------------------- types and memory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_weights_are_computed_in_float32(
    kind: type[WeightNormalizer], dtype: torch.dtype
) -> None:
    weight = random_weight(4, 64, 3, 3, dtype=dtype)
    layer = kind(4)
    originals = layer.right_inverse(weight)
    narrow = originals if isinstance(originals, tuple) else (originals,)
    result = layer(*narrow)
    assert result.dtype is dtype
    assert torch.equal(result, layer(*(t.float() for t in narrow)).to(dtype))


def test_autocast_does_not_narrow_the_statistics() -> None:
    conv = WS.attach(nn.Conv2d(3, 4, 3))
    plain = conv.weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(conv.weight, plain)
        assert conv(torch.randn(1, 3, 5, 5)).dtype is torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_channels_last_weights_stay_so(kind: type[WeightNormalizer]) -> None:
    conv = nn.Conv2d(4, 6, 3).double()
    expected = kind.attach(copy.deepcopy(conv)).weight
    conv = kind.attach(conv.to(memory_format=torch.channels_last))
    torch.testing.assert_close(conv.weight, expected, **F64)
    assert kind.fold(conv).weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_goes_round(kind: type[WeightNormalizer]) -> None:
    source, target = (kind.attach(nn.Conv2d(3, 4, 3)) for _ in range(2))
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(1.5)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    assert not torch.equal(source.weight, target.weight)
    target.load_state_dict(torch.load(file))
    assert torch.equal(source.weight, target.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_deepcopy_and_pickle(kind: type[WeightNormalizer]) -> None:
    conv = kind.attach(nn.Conv2d(3, 4, 3))
    twin = copy.deepcopy(conv)
    assert torch.equal(twin.weight, conv.weight)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in conv.parameters()}
    assert repr(pickle.loads(pickle.dumps(kind(4)))) == repr(kind(4))
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(conv)
    kind.fold(twin)
    assert torch.equal(pickle.loads(pickle.dumps(twin)).weight, conv.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_one_graph(kind: type[WeightNormalizer]) -> None:
    conv = kind.attach(nn.Conv2d(3, 4, 3).double())
    x = torch.randn(2, 3, 6, 6).double()

    def gradients(function: Any) -> tuple[Tensor, list[Tensor]]:
        y = function(x)
        return y, list(torch.autograd.grad(y.square().sum(), list(conv.parameters())))

    torch._dynamo.reset()
    expected = gradients(conv)
    actual = gradients(torch.compile(conv, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(actual, expected, **F64)


# -------------------------------------------------------------------- attaching and folding


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [nn.Conv1d(3, 4, 3), nn.Conv3d(3, 4, 2), nn.Linear(3, 4)])
def test_fold_keeps_the_function_and_the_order_of_parameters(
    kind: type[WeightNormalizer], module: nn.Module
) -> None:
    module = copy.deepcopy(module)
    names, its_class = [name for name, _ in module.named_parameters()], type(module)
    kind.attach(module)
    weight = module.weight.detach().clone()
    module.weight.sum().backward()
    assert kind.fold(module) is module
    assert type(module) is its_class
    assert torch.equal(module.weight, weight)
    assert [name for name, _ in module.named_parameters()] == names
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.requires_grad
    assert module.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_stay_frozen(kind: type[WeightNormalizer]) -> None:
    conv = kind.attach(nn.Conv2d(3, 4, 3).requires_grad_(False))
    assert not any(p.requires_grad for p in conv.parameters())
    kind.fold(conv)
    assert isinstance(conv.weight, nn.Parameter)
    assert not conv.weight.requires_grad


def test_fold_without_gradients_keeps_weights_trainable() -> None:
    conv = WN.attach(nn.Conv2d(3, 4, 3))
    with torch.no_grad():
        WN.fold(conv)
    assert conv.weight.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_folding_a_copy_leaves_the_original_alone(kind: type[WeightNormalizer]) -> None:
    """torch's deepcopy keeps both in one class, from which removal takes the weight's property:
    folding the averaged copy of a model left the model in training without any weight."""
    conv = kind.attach(nn.Conv2d(3, 4, 3))
    twin = copy.deepcopy(conv)
    weight = kind.fold(twin).weight
    assert torch.equal(conv.weight, weight)
    assert parametrize.is_parametrized(conv, "weight")
    assert torch.equal(kind.fold(conv).weight, weight)


def test_fold_does_not_make_a_foreign_parametrization_final() -> None:
    conv = WS.attach(nn.Conv2d(3, 4, 3))
    parametrize.register_parametrization(conv, "weight", nn.Identity())
    with pytest.raises(OptionError, match="Identity"):
        WS.fold(conv)
    assert parametrize.is_parametrized(conv, "weight")


def test_ws_and_cwn_train_the_very_parameter_of_the_module() -> None:
    """An optimizer that was made before keeps working."""
    for kind in (WS, CWN):
        conv = nn.Conv2d(3, 4, 3)
        raw = conv.weight
        kind.attach(conv)
        assert conv.parametrizations.weight.original is raw
        conv(torch.randn(1, 3, 5, 5)).square().sum().backward()
        assert raw.grad is not None
        assert kind.fold(conv).weight is raw


@pytest.mark.parametrize("kind", KINDS)
def test_assigning_a_weight_reaches_what_is_trained(kind: type[WeightNormalizer]) -> None:
    conv, new = kind.attach(nn.Conv2d(3, 4, 3).double()), random_weight(4, 3, 3, 3)
    twin = nn.Conv2d(3, 4, 3).double()
    twin.weight = nn.Parameter(new.clone())
    conv.weight = new
    torch.testing.assert_close(conv.weight, kind.attach(twin).weight, **F64)


def test_options_and_repr_say_what_is_special() -> None:
    assert {"variant", "eps", "rms", "device"} <= WS.options().keys()
    assert {"learn_scale", "scale", "eps", "dtype"} <= CWN.options().keys()
    assert WN.options().keys() == {"device", "dtype"}
    assert repr(WS(4, variant="timm", unbiased=True)) == "WS(4, variant='timm', unbiased=True)"
    assert repr(CWN(4)) == "CWN(4)"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: type[WeightNormalizer]) -> None:
    conv = nn.Conv2d(3, 4, 3).double()
    expected = kind.attach(copy.deepcopy(conv)).weight
    conv = kind.attach(conv.cuda())
    torch.testing.assert_close(conv.weight.cpu(), expected, **F64)
