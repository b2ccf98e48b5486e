"""Measuring a model on data: exact statistics, every layer, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import normkit as nk
from normkit import catalog
from normkit.core.moments import Moments
from normkit.diagnosis import collect, measures
from normkit.errors import NormkitError, NothingToDo, OptionError, ShapeError
from normkit.inspection.statistics import pooled_statistics_of
from normkit.layers.batch import BatchNormalizer

CHANNELS = 8
WITH_BATCH = [
    name
    for name in catalog.names("activation")
    if issubclass(catalog.find(name), BatchNormalizer)  # type: ignore[arg-type]
]


def mlp(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, CHANNELS), *layers)


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    """All that a user could miss: tensors, modes, hooks, attributes, the random state."""
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [module.training for module in model.modules()],
        [
            (len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
            for m in model.modules()
        ],
        torch.get_rng_state(),
    )


def same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    tensors = before[0].keys() == after[0].keys() and all(
        torch.equal(value.nan_to_num(7.0), after[0][name].nan_to_num(7.0))
        for name, value in before[0].items()
    )
    return tensors and before[1:3] == after[1:3] and torch.equal(before[3], after[3])


# ---------------------------------------------------------------- exact statistics


def test_statistics_are_those_of_one_pass_over_everything() -> None:
    """Batches of 3, 17 and 1 weigh as much as their samples."""
    model = nn.Sequential(nn.Conv2d(2, CHANNELS, 3), nn.BatchNorm2d(CHANNELS)).double()
    x = torch.randn(21, 2, 6, 6, dtype=torch.float64) * 4 + 7
    found = collect(model, list(x.split([3, 17, 1])))
    with torch.no_grad():
        data = model[0](x).numpy()
    mean, var = data.mean((0, 2, 3)), data.var((0, 2, 3))
    np.testing.assert_allclose(found.expected["1"].mean[0].numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(found.expected["1"].var[0].numpy(), var, rtol=1e-12)
    assert found.batch_sizes == (3, 17, 1)
    assert found.samples == 21
    assert found.value("1", "esm_mean") == pytest.approx(np.sqrt((mean**2).sum()), rel=1e-12)
    unbiased = data.var((0, 2, 3), ddof=1)  # as the layer would have stored it
    shift = np.sqrt(((1 - np.sqrt(unbiased)) ** 2).sum())
    assert found.value("1", "esm_std") == pytest.approx(shift, rel=1e-12)


def test_float32_data_is_summed_in_float64() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1))
    x = torch.randn(4096, 1) + 1000  # float32 sums of squares would lose the variance
    found = collect(model, list(x.split(100)))
    data = x.numpy().astype(np.float64)
    assert float(found.expected["0"].mean) == pytest.approx(data.mean(), rel=1e-12)
    assert float(found.expected["0"].var) == pytest.approx(data.var(), rel=1e-9)


@pytest.mark.parametrize("name", WITH_BATCH)
def test_a_batch_that_was_learned_exactly_has_no_estimation_shift(name: str) -> None:
    """With momentum 1 the running statistics are those of the batch, as the layer itself takes
    them; what is collected on the same batch has to agree, in the form the layer keeps."""
    layer = made(name)
    x = torch.randn(16, CHANNELS, 6, 6) * 2 + 1
    with torch.no_grad():
        layer.train()(x)
    found = collect(layer.eval(), [x], measures=["esm_mean", "esm_std", "output_error"])
    rounding = 1e-5  # float32, against deviations of 2
    assert found.value("", "esm_mean") == pytest.approx(0, abs=rounding)
    assert found.value("", "esm_std") == pytest.approx(0, abs=rounding)
    assert found.value("", "output_error") == pytest.approx(0, abs=rounding)


def made(name: str) -> nn.Module:
    """A layer that keeps its last batch, and whose centering and gates do something."""
    layer = catalog.make(name, CHANNELS, momentum=1.0)
    with torch.no_grad():
        for part in ("center_weight", "gate_weight"):
            if getattr(layer, part, None) is not None:
                getattr(layer, part).uniform_(-0.5, 0.5)
    return layer


@pytest.mark.parametrize("name", WITH_BATCH)
def test_statistics_can_be_written_back(name: str) -> None:
    reader = pooled_statistics_of(made(name))
    assert reader is not None
    before = reader.read()
    new = Moments(torch.randn_like(before.mean), torch.rand_like(before.var) + 0.5, 1)
    reader.put(new)
    found = reader.read()
    rounding = 1e-5  # of float32, and of a root
    torch.testing.assert_close(found.mean, new.mean, rtol=rounding, atol=rounding)
    torch.testing.assert_close(found.var, new.var, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 16, 20])
def test_groups_that_cut_channels(groups: int) -> None:
    """bgn cuts a sample anywhere: whole channels, strips of them, or uneven pieces."""
    layer = nk.BGN(CHANNELS, groups=groups, momentum=1.0)
    x = torch.randn(4, CHANNELS, 3, 2)
    layer(x)
    found = collect(layer.eval(), [x], measures=["esm_mean", "esm_std"])
    assert found.value("", "esm_mean") == pytest.approx(0, abs=1e-5)
    assert found.value("", "esm_std") == pytest.approx(0, abs=1e-5)


def test_esm_is_zero_after_the_statistics_of_an_exact_pass() -> None:
    model = mlp(nn.BatchNorm1d(CHANNELS), nn.ReLU())
    data = [torch.randn(n, 5) for n in (8, 5)]
    first = collect(model, data)
    assert first.value("1", "esm_mean") > 0.1  # type: ignore[operator]
    reader = pooled_statistics_of(model[1])
    assert reader is not None
    reader.put(reader.stored(first.expected["1"]))
    again = collect(model, data)
    rounding = 1e-6  # of the float32 buffers, eight channels
    assert again.value("1", "esm_mean") < rounding  # type: ignore[operator]
    assert again.value("1", "esm_std") < rounding  # type: ignore[operator]


def test_progressive_gives_a_layer_only_its_own_shift() -> None:
    """In train mode a full batch gives every norm exact statistics of what is below: the truth."""
    model = mlp(nn.BatchNorm1d(CHANNELS), nn.ReLU(), nn.Linear(CHANNELS, 4), nn.BatchNorm1d(4))
    x = torch.randn(40, 5)
    seen = {}
    model[4].register_forward_pre_hook(lambda _, args: seen.update(upper=args[0].double()))
    truth = copy.deepcopy(model)
    with torch.no_grad():
        truth.train()(x)
    upper = seen["upper"]
    model[1].running_mean.fill_(100.0)
    found = collect(model.eval(), [*x.split(9)], mode="progressive")
    torch.testing.assert_close(found.expected["4"].mean[0], upper.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        found.expected["4"].var[0], upper.var(0, correction=0), atol=1e-5, rtol=1e-5
    )
    lower = found.value("1", "esm_mean")
    assert lower is not None
    assert lower > 100
    eval_mode = collect(model, [*x.split(9)])
    assert eval_mode.value("1", "esm_mean") == pytest.approx(lower, rel=1e-12)
    assert eval_mode.value("4", "esm_mean") != pytest.approx(found.value("4", "esm_mean"), rel=1e-3)


def test_progressive_reports_how_far_it_is() -> None:
    model = mlp(nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 4), nn.BatchNorm1d(4))
    said: list[tuple[int, int]] = []
    collect(model, [torch.randn(6, 5)], mode="progressive", progress=lambda *a: said.append(a))
    assert said == [(0, 2), (1, 2), (2, 2)]


def test_a_layer_that_is_used_twice_sees_all_of_its_inputs() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x) + 3)

    x = torch.randn(10, 5)
    for mode in ("eval", "progressive"):
        model = Twice().eval()
        found = collect(model, [x], mode=mode)
        inputs = torch.cat([x, model.norm(x) + 3]).double().detach()
        if mode == "eval":
            torch.testing.assert_close(found.expected["norm"].mean[0], inputs.mean(0))
        assert found.calls == {"norm": 2}


# ---------------------------------------------------------------- the other measures


def test_dead_channels_behind_one_relu_for_several_norms() -> None:
    """torchvision's blocks call one ReLU after each norm and after the sum."""
    model = torchvision.models.resnet18(num_classes=2).eval()
    block = model.layer2[0]
    for bn, dead in ((block.bn1, 3), (block.bn2, 5), (block.downsample[1], 7)):
        nn.init.constant_(bn.bias[:dead], -1e4)
    found = collect(model, [torch.randn(4, 3, 32, 32)], measures=["dead"])
    assert found.channels["layer2.0.bn1"]["dead"][:3].all()
    assert not found.channels["layer2.0.bn1"]["dead"].all()
    # the sum is dead where either branch pulls it down
    sum_dead = found.channels["layer2.0.bn2"]["dead"]
    assert sum_dead[:7].all()
    assert not sum_dead.all()
    assert 0 < found.by_layer("dead")["layer2.0.bn1"] < 1


@pytest.mark.parametrize(
    ("act", "limit"), [(nn.Sigmoid(), 50.0), (nn.Hardtanh(-2, 2), 50.0), (nn.ReLU6(), 50.0)]
)
def test_saturated_channels(act: nn.Module, limit: float) -> None:
    model = mlp(nn.BatchNorm1d(CHANNELS), act).eval()
    with torch.no_grad():
        model[1].bias[0], model[1].bias[1] = limit, -limit
    found = collect(model, [torch.randn(9, 5)], measures=["saturated"])
    assert found.channels["1"]["saturated"].tolist() == [True, True, *[False] * 6]
    assert found.value("1", "saturated") == 2 / CHANNELS


def test_an_activation_inside_the_norm() -> None:
    model = timm.create_model("mobilenetv3_small_050", num_classes=3).eval()
    with torch.no_grad():
        model.bn1.bias[:4] = -1e4
    found = collect(model, [torch.randn(2, 3, 32, 32)])
    assert found.channels["bn1"]["dead"][:4].all()
    assert set(found.paths) == {site.path for site in nk.survey(model)}


def test_outliers_are_counted_after_standardization() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2)).eval()
    x = torch.tensor([[0.0, 6.5], [-7.0, 0.0], [1.0, 1.0], [5.9, -5.9]])
    found = collect(model, [x[:1], x[1:]], measures=["beyond_6"])
    assert found.value("0", "beyond_6") == pytest.approx(2 / 8)


@pytest.mark.parametrize("name", ["gn", "ln", "in", "pn"])
def test_outliers_of_norms_that_keep_nothing(name: str) -> None:
    """|x̂| of the layer's own output without affine map, by its forward."""
    layer = catalog.make(name, CHANNELS, affine=False)
    x = torch.randn(4, CHANNELS, 5, 5)
    x[0, 0] *= 30  # of some norms beyond 6 deviations of the rest, or its peaks are
    found = collect(layer, [x], measures=["beyond_6"])
    assert found.value("", "beyond_6") == pytest.approx(
        float(measures.share_beyond(layer(x))), abs=1e-9
    )


def test_gates_and_frozen_layers() -> None:
    model = nn.Sequential(nk.RBN(4), nk.UBN(4), nk.UBN(4), nk.IEBN(4)).eval()
    with torch.no_grad():
        model[0].gate_bias[:2] = 30.0
        model[1].score.fill_(0.01)
    found = collect(model, [torch.randn(6, 4, 5, 5)])
    assert found.value("0", "gate_saturation") == 0.5
    assert found.by_layer("frozen") == {"1": 1.0, "2": 0.0}
    assert found.frozen_share == 0.5
    assert found.value("1", "score") == pytest.approx(0.01)
    assert collect(nn.Sequential(nk.BN(4)), [torch.randn(6, 4)]).frozen_share is None


@pytest.mark.parametrize("name", ["rbn", "iebn", "ubn"])
def test_gates_are_those_of_the_layer(name: str) -> None:
    """Read off the layer's output: y = γ·s·x̂ with γ = 1, β = 0 and the running statistics known."""

    from normkit.inspection.statistics import channel_moments

    options = {"affine_conv": False} if name == "ubn" else {}
    layer = catalog.make(name, 4, **options).eval()
    with torch.no_grad():
        for part in ("gate_weight", "gate_bias", "center_weight"):
            if getattr(layer, part, None) is not None:
                getattr(layer, part).normal_()
    x = torch.randn(6, 4, 5, 5)
    center = getattr(layer, "center_weight", None)
    means = x.mean((2, 3), keepdim=True)
    moved = x if center is None else x + center.reshape(1, -1, 1, 1) * means
    hat = moved / np.sqrt(1 + layer.eps)  # running mean 0 and variance 1
    expected = (layer(x) / hat).mean((2, 3))
    found = layer.gates(channel_moments(x))
    assert found is not None
    torch.testing.assert_close(found, expected.double().detach(), atol=1e-5, rtol=1e-4)


def test_condensation_of_the_first_batch_and_its_matrix() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6))
    x = torch.randn(40, 6)
    found = collect(model, [x, torch.ones(40, 6)])
    assert found.value("0", "condensation") == pytest.approx(
        float(measures.condensation(x[:32])), abs=1e-7
    )
    torch.testing.assert_close(found.matrices["0"], measures.condensation_matrix(x[:32]))


def test_drift_needs_a_start() -> None:
    model = mlp(nk.NormAct(nk.BN(CHANNELS), "relu"), nn.Linear(CHANNELS, 2), nn.BatchNorm1d(2))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model[1].norm.weight += 3
        model[3].bias -= 2
    data = [torch.randn(8, 5)]
    found = collect(model, data, start=start)
    assert found.by_layer("weight_drift") == {"1": 3.0, "3": 0.0}
    assert found.by_layer("bias_drift") == {"1": 0.0, "3": 2.0}
    assert collect(model, data).by_layer("weight_drift") == {}


def test_group_measures_are_of_norms_with_groups() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.LayerNorm(5))
    x = torch.randn(7, 4, 3, 5)
    found = collect(model, [x], measures=["stat_diff", "gradient_factor", "under_represented"])
    assert set(found.by_layer("stat_diff")) == {"0", "2"}
    data = x.double().numpy()
    mean, std = data.mean((0, 2, 3)).reshape(2, 2), data.std((0, 2, 3)).reshape(2, 2)
    assert found.value("0", "stat_diff") == pytest.approx(
        (mean.std(1) / std.mean(1)).mean(), rel=1e-9
    )
    pooled = data.transpose(1, 0, 2, 3).reshape(2, -1).var(1)
    assert found.value("0", "gradient_factor") == pytest.approx(
        (1 / np.sqrt(pooled + 1e-5)).mean(), rel=1e-6
    )


# ---------------------------------------------------------------- batches and models of all kinds


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.norm(x * scale)


@pytest.mark.parametrize(
    "batch",
    [
        ((torch.ones(4, 3), torch.ones(4, 1)), torch.zeros(4)),
        {"x": torch.ones(4, 3), "scale": torch.ones(4, 1)},
        ({"x": torch.ones(4, 3), "scale": torch.ones(4, 1)}, torch.zeros(4), "more"),
    ],
    ids=["positional", "keywords", "keywords and targets"],
)
def test_forms_of_batches(batch: Any) -> None:
    found = collect(TwoInputs(), [batch])
    assert float(found.expected["norm"].mean.sum()) == 3.0
    assert found.samples == 4


def test_max_batches_and_generators() -> None:
    pulled = []

    def batches() -> Iterator[Tensor]:
        for number in range(10):
            pulled.append(number)
            yield torch.randn(4, 5)

    found = collect(mlp(nn.BatchNorm1d(CHANNELS)), batches(), max_batches=3)
    assert found.batch_sizes == (4, 4, 4)
    assert pulled == [0, 1, 2]


def test_transformers_and_norms_over_pixels() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=2)
    found = collect(model, [torch.randn(2, 3, 32, 32)])
    assert found.inputs["blocks.0.norm1"].mean.shape == (1, 192)
    assert found.value("blocks.0.norm1", "esm_mean") is None


def test_where_and_measures_choose() -> None:
    model = mlp(nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 2), nn.BatchNorm1d(2))
    found = collect(model, [torch.randn(4, 5)], where="3", measures=["esm_std"])
    assert [(r.path, r.measure) for r in found] == [("3", "esm_std")]
    assert found.to_rows()[0]["path"] == "3"
    assert "1 norms" in repr(found)


# ---------------------------------------------------------------- nothing has happened


@pytest.mark.parametrize("mode", ["eval", "progressive"])
def test_the_model_is_untouched(mode: str) -> None:
    model = nn.Sequential(
        *(nn.Linear(5, 8), nk.UBN(8, preset="authors"), nn.Dropout(0.5)),
        *(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
    )
    model[4].eval()
    before = snapshot(model)
    collect(model, [torch.randn(6, 5, generator=torch.Generator())], mode=mode)
    assert same(before, snapshot(model))


def break_down() -> Iterator[Tensor]:
    yield torch.randn(6, 5, generator=torch.Generator())
    raise OSError("the disk is gone")


@pytest.mark.parametrize("mode", ["eval", "progressive"])
def test_a_loader_that_fails_leaves_the_model_as_it_was(mode: str) -> None:
    model = mlp(nn.BatchNorm1d(CHANNELS), nn.ReLU())
    before = snapshot(model)

    class Failing:
        def __iter__(self) -> Iterator[Tensor]:
            return break_down()

    with pytest.raises(OSError, match="disk"):
        collect(model, Failing(), mode=mode)
    assert same(before, snapshot(model))


BAD: dict[str, tuple[Callable[[], Any], Any, type[NormkitError], str]] = {
    "empty loader": (lambda: mlp(nn.BatchNorm1d(8)), [], NothingToDo, "no batches"),
    "no norms": (lambda: mlp(nn.ReLU()), [torch.ones(2, 5)], NothingToDo, "no norms"),
    "wrapped": (
        lambda: nn.DataParallel(mlp(nn.BatchNorm1d(8))),
        [torch.ones(2, 5)],
        OptionError,
        "model.module",
    ),
    "wrong shape": (
        lambda: mlp(nn.BatchNorm1d(8)),
        [torch.ones(2, 6)],
        ShapeError,
        r"batch 1, \(2, 6\): .*Batches are expected as",
    ),
    "wrong later": (
        lambda: mlp(nn.BatchNorm1d(8)),
        [torch.ones(2, 5), torch.ones(2, 6)],
        ShapeError,
        "batch 2",
    ),
    "a single tensor": (
        lambda: mlp(nn.BatchNorm1d(8)),
        torch.ones(2, 5),
        OptionError,
        r"Try \[batch\]",
    ),
    "empty tuple": (lambda: mlp(nn.BatchNorm1d(8)), [()], ShapeError, "empty tuple"),
    "lazy": (lambda: nn.Sequential(nn.LazyBatchNorm1d()), [torch.ones(2, 5)], ShapeError, "lazy"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    make, batches, error, message = BAD[case]
    model = make()
    before = None if case == "lazy" else snapshot(model)
    with pytest.raises(error, match=message):
        collect(model, batches)
    assert before is None or same(before, snapshot(model))


def test_bad_options() -> None:
    model, data = mlp(nn.BatchNorm1d(CHANNELS)), [torch.randn(4, 5)]
    for options, message in (
        ({"measures": ["esm_men"]}, "esm_mean"),
        ({"mode": "train"}, "Unknown mode"),
        ({"max_batches": 0}, "at least 1"),
        ({"where": "layer9"}, "fits none"),
    ):
        with pytest.raises(NormkitError, match=message):
            collect(model, data, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="iterator"):
        collect(model, iter(data), mode="progressive")
