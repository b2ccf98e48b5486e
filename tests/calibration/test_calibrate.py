"""calibrate: the statistics of the data, whatever the layer, the loader and the way there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import cases
import normkit as nk
import subjects
from normkit.calibration import calibrate
from normkit.errors import NonFiniteWarning, NothingToDo, OptionError, ShapeError
from normkit.layers.batch import BatchNormalizer

STATISTICS = ("running_mean", "running_var", "running_std", "running_second_moment")
TRACKED = [
    case
    for case in cases.every()
    if isinstance(layer := cases.build(case), BatchNormalizer) and layer.running_mean is not None
]


def kept(layer: nn.Module) -> dict[str, Tensor]:
    return {k: b.double() for k, b in layer.named_buffers() if k in STATISTICS}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], rel: float = 1e-6) -> None:
    """Within ``rel`` of each number; of the deviation for means that are smaller than that."""
    assert found.keys() == expected.keys() != set()
    for name, value in found.items():
        scale = expected[name].abs()
        if name == "running_mean":
            second = {k: v for k, v in expected.items() if k != name}
            (key, spread), *_ = second.items()
            spread = spread - expected[name].square() if "moment" in key else spread
            scale = torch.maximum(scale, spread if key == "running_std" else spread.sqrt())
        assert ((value - expected[name]).abs() <= rel * scale).all(), name


def population(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The layer's own statistics of x as a single training batch that replaces what it has."""
    one: Any = copy.deepcopy(layer).train()
    one.num_batches_tracked.zero_()
    if one.momentum is not None:
        one.momentum = 1.0
    one.virtual_batch = None  # the population is no run of samples
    if hasattr(one, "tau"):
        one.tau = -2.0  # the batch, always
    if getattr(one, "micro", False):
        one.set_update_rate(1.0)
    for _ in range(2):  # micro bcn takes the variance about the mean of the forward before
        one(x)
    return kept(one)


# ---------------------------------------------------------------- every layer


@pytest.mark.parametrize("case", TRACKED, ids=cases.label)
def test_every_layer_gets_the_statistics_of_the_whole_set(
    case: tuple[str, dict[str, object]],
) -> None:
    layer = cases.build(case)
    x = cases.inputs(n=24)
    expected = population(layer, x)
    before = kept(layer)
    done = calibrate(nn.Sequential(layer), list(x.split([9, 1, 12, 2])))
    assert_near(kept(layer), expected, 1e-10)
    done.undo()
    assert all(torch.equal(before[k], v) for k, v in kept(layer).items())


@pytest.mark.parametrize("shape", [(30, 8), (30, 8, 5), (30, 8, 3, 3, 2)], ids=str)
@pytest.mark.parametrize("name", ["bn", "bgn", "rbn", "gbgn", "batch_renorm"])
def test_every_rank(name: str, shape: tuple[int, ...]) -> None:
    layer = cases.build((name, {}))
    x = 1 + torch.randn(shape, dtype=torch.float64)
    expected = population(layer, x)
    calibrate(layer, list(x.split(7)))  # the layer is the model
    assert_near(kept(layer), expected, 1e-10)


def test_sn_with_unbiased_variances() -> None:
    layer = cases.build(("sn", {"unbiased": True}))
    x = cases.inputs(n=12)
    expected = population(layer, x)
    calibrate(layer, list(x.split(5)))
    assert_near(kept(layer), expected, 1e-10)


def test_uneven_groups_and_images_of_two_sizes() -> None:
    """bgn cuts images of another size at other places; its groups then have other counts."""
    layer: Any = cases.build(("bgn", {"groups": 5}))
    small, large = cases.inputs(n=4, size=(3, 3)), cases.inputs(n=6, size=(5, 4))
    calibrate(layer, [small, large])
    first = torch.stack(_groups(small)), torch.stack(_groups(large))
    n = [torch.tensor([g.numel() for g in _raw(x)], dtype=torch.float64) for x in (small, large)]
    mean = (n[0] * first[0][:, 0] + n[1] * first[1][:, 0]) / (n[0] + n[1])
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-12, atol=1e-12)


def _raw(x: Tensor) -> list[Tensor]:
    """The values of each of 5 groups: value d is in group ⌊d·5/D⌋."""
    flat = x.flatten(1)
    group = torch.arange(flat.shape[1]) * 5 // flat.shape[1]
    return [flat[:, group == g] for g in range(5)]


def _groups(x: Tensor) -> list[Tensor]:
    return [torch.stack([g.mean(), g.var(correction=0)]) for g in _raw(x)]


TORCH = {
    "batch_1d": (nn.BatchNorm1d(6), (20, 6)),
    "batch_2d": (nn.BatchNorm2d(6, momentum=0.7), (20, 6, 3, 3)),
    "batch_3d": (nn.BatchNorm3d(6, affine=False), (20, 6, 2, 2, 3)),
    "sync": (nn.SyncBatchNorm(6), (20, 6, 3, 3)),
    "timm_act": (timm.layers.BatchNormAct2d(6, act_layer=nn.SiLU), (20, 6, 3, 3)),
    "timm_split": (timm.layers.SplitBatchNorm2d(6), (20, 6, 3, 3)),
    "norm_act": (nk.NormAct(nn.BatchNorm2d(6), "relu"), (20, 6, 3, 3)),
}


@pytest.mark.parametrize("name", TORCH)
def test_batch_norms_of_torch_and_timm(name: str) -> None:
    layer, shape = copy.deepcopy(TORCH[name])
    x = 5 + 0.1 * torch.randn(shape)
    calibrate(nn.Sequential(layer), list(x.split([6, 1, 13])))
    values = x.double().movedim(1, 0).flatten(1)
    found = {k.rpartition(".")[2]: b for k, b in kept(layer).items()} or kept(layer.norm)
    expected = {"running_mean": values.mean(1), "running_var": values.var(1)}
    assert_near({k: found[k] for k in expected}, expected)


def test_evonorm_keeps_a_variance_only() -> None:
    layer = timm.layers.EvoNorm2dB0(6)
    x = 5 + 0.1 * torch.randn(20, 6, 3, 3)
    calibrate(nn.Sequential(layer), list(x.split([6, 1, 13])))
    expected = x.double().movedim(1, 0).flatten(1).var(1)
    torch.testing.assert_close(layer.running_var.double(), expected, rtol=1e-6, atol=0)


def test_instance_norm_averages_what_images_have() -> None:
    layer = nn.InstanceNorm2d(6, track_running_stats=True, momentum=1.0)
    x = 5 + torch.randn(20, 6, 3, 3)
    one = copy.deepcopy(layer).train()
    one(x)
    calibrate(layer, list(x.split([6, 1, 13])))
    torch.testing.assert_close(layer.running_mean, one.running_mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(layer.running_var, one.running_var, rtol=1e-5, atol=0)


# ---------------------------------------------------------------- whole models


def inputs_of_norms(model: nn.Module, x: Tensor) -> dict[str, list[Tensor]]:
    """What each batch norm gets in eval mode, all calls, for the whole set at once."""
    found: dict[str, list[Tensor]] = {}
    hooks = []
    for path, module in model.named_modules():
        if isinstance(getattr(module, "running_mean", None), Tensor):

            def hook(_: nn.Module, args: Any, path: str = path) -> None:
                found.setdefault(path, []).append(args[0].double())

            hooks.append(module.register_forward_pre_hook(hook))
    subjects.output(model, x)
    for handle in hooks:
        handle.remove()
    return found


def exact(inputs: list[Tensor]) -> dict[str, Tensor]:
    values = torch.cat([x.movedim(1, 0).flatten(1) for x in inputs], 1)
    return {"running_mean": values.mean(1), "running_var": values.var(1)}


class Plain(nn.Module):
    """Ten norms deep, with a shortcut, dropout and fused activations; each norm runs once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False),
                timm.layers.BatchNormAct2d(8) if i % 2 else nn.BatchNorm2d(8),
                nn.Dropout(0.5),
            )
            for i in range(10)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        for layer in self.layers[1:]:
            y = torch.relu(layer(y)) + 0.5 * y
        return y.mean((2, 3))


def loader(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(part, torch.zeros(len(part))) for part in x.split([30, 1, 2, 17])]


@pytest.mark.parametrize("together", [False, True])
def test_progressive_agrees_with_itself_to_1e_6(together: bool) -> None:
    """The target: within 1e-6 of one float64 pass over the whole set, as the model now is."""
    model, x = subjects.trained(Plain()), 1 + 2 * torch.randn(50, 3, 9, 9)
    done = calibrate(model.train(), loader(x), together=together)
    for path, inputs in inputs_of_norms(model, x).items():
        assert_near(kept(model.get_submodule(path)), exact(inputs))
    assert (done.images, done.batches, len(done.layers)) == (50, 4, 10)


def test_layerwise_is_of_the_inputs_with_the_old_statistics() -> None:
    model, x = subjects.trained(Plain()), 1 + 2 * torch.randn(50, 3, 9, 9)
    inputs = inputs_of_norms(model, x)
    calibrate(model, loader(x), mode="layerwise")
    for path, got in inputs.items():
        assert_near(kept(model.get_submodule(path)), exact(got))
    # … which is not what the norms get now: the reason for the progressive mode
    again = exact(inputs_of_norms(model, x)["layers.9.1"])
    first = model.get_submodule("layers.9.1").running_mean
    assert ((first - again["running_mean"]).abs() > 0.1 * again["running_var"].sqrt()).any()


def test_a_layer_that_runs_twice_gets_both_inputs() -> None:
    model, x = subjects.trained(subjects.Net()), torch.randn(20, 3, 8, 8)
    inputs = inputs_of_norms(model, x)
    assert len(inputs["shared"]) == 2
    calibrate(model, list(x.split(7)), mode="layerwise")
    assert_near(kept(model.get_submodule("shared")), exact(inputs["shared"]))
    result = calibrate(model, list(x.split(7)))  # progressive: it depends on itself
    assert result.statistics["shared"].count[0] == 2 * result.statistics["bn"].count[0]
    assert result.unsettled == ()
    for path, got in inputs_of_norms(model, x).items():
        # it stops when a pass moves it by less than 1e-6; the next would move it less than that
        assert_near(kept(model.get_submodule(path)), exact(got), 2e-6)


def test_a_layer_that_feeds_itself_and_never_settles_is_said() -> None:
    class Chaotic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + 1e3 * torch.sin(1e3 * self.norm(x)))

    done = calibrate(Chaotic(), torch.randn(40, 1))
    assert done.unsettled == ("norm",)
    assert "keep moving" in str(done)


def test_large_offsets_in_float32() -> None:
    """A naive sum of squares in float32 loses everything at this offset."""
    layer = nn.BatchNorm2d(4)
    x = 3000 + torch.randn(64, 4, 5, 5)
    calibrate(layer, list(x.split(10)))
    assert_near(kept(layer), exact([x.double()]))


def test_half_precision_and_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nk.BN(8), nn.ReLU()).to(torch.bfloat16)
    x = torch.randn(12, 3, 8, 8, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    calibrate(model, list(x.split(5)))
    (inputs,) = inputs_of_norms(model, x)["1"]
    assert_near(kept(model[1]), exact([inputs]))


def test_autocast_of_the_caller_does_not_narrow_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    x = torch.randn(12, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        calibrate(model, list(x.split(5)))
        (inputs,) = inputs_of_norms(model, x)["1"]
    assert_near(kept(model[1]), exact([inputs]))


# ---------------------------------------------------------------- against torch's own


def test_update_bn_weighs_batches_equally_and_averages_variances() -> None:
    """users.md, fact 4: a batch of 10 counts as much as one of 1000 in update_bn."""
    truth = torch.cat([torch.randn(1000, 1), 10 + 1e-3 * torch.randn(10, 1)])
    batches = list(truth.split([1000, 10]))
    ours, theirs = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    calibrate(ours, batches)
    update_bn(batches, theirs)
    mean, var = truth.double().mean().item(), truth.double().var().item()
    assert ours.running_mean.item() == pytest.approx(mean, rel=1e-5)
    assert ours.running_var.item() == pytest.approx(var, rel=1e-6)
    assert theirs.running_mean.item() == pytest.approx(5.0, abs=0.1)  # truth: 0.1
    assert theirs.running_var.item() < 0.6 * var


def test_update_bn_keeps_dropout_on() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(2))
    x = 1 + 0.01 * torch.randn(500, 2)
    theirs = copy.deepcopy(model)
    update_bn([x], theirs)
    calibrate(model, [x])
    assert model[1].running_var.max() < 2e-4  # 0.01² and nothing else
    assert theirs[1].running_var.min() > 1.0


class Broken(Exception):
    pass


def breaking(x: Tensor, after: int = 2) -> Iterator[Tensor]:
    yield from x.split(8)[:after]
    raise Broken


@pytest.mark.parametrize("options", [{}, {"mode": "layerwise"}, {"together": True}], ids=str)
def test_a_failing_loader_leaves_the_model_bit_for_bit(options: dict[str, Any]) -> None:
    class Loader:
        """Fails the second time it is gone through, when some norms have new statistics."""

        times = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.times += 1
            first = self.times > 2 or options
            return breaking(x) if first else iter(x.split(8))

    model, x = subjects.trained(subjects.Net()).train(), torch.randn(24, 3, 8, 8)
    before, state = subjects.portrait(model), torch.get_rng_state()
    with pytest.raises(Broken):
        calibrate(model, Loader(), **options)
    assert subjects.portrait(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    # torch's own leaves momentum None, statistics reset and the model in training mode
    model.eval()
    with pytest.raises(Broken):
        update_bn(breaking(x), model)
    assert model.training
    assert model.shared.momentum is None


# ---------------------------------------------------------------- what stays, and what counts


def test_nothing_but_statistics_changes() -> None:
    model = subjects.trained(subjects.Net()).train()
    model.bn.eval()
    x = torch.randn(16, 3, 8, 8)
    before, state = subjects.portrait(model), torch.get_rng_state()
    done = calibrate(model, [x])
    after = subjects.portrait(model)
    changed = {k for k, v in after["values"].items() if before["values"][k] != v}
    assert changed == {f"{p}.running_{w}" for p in subjects.PATHS for w in ("mean", "var")}
    assert {k: after[k] for k in after if k != "values"} == {
        k: before[k] for k in before if k != "values"
    }
    assert torch.equal(torch.get_rng_state(), state)
    assert model.shared.momentum == 0.3
    done.undo()
    assert subjects.portrait(model) == before


def test_the_counter_says_that_there_are_statistics_and_is_never_lowered() -> None:
    new, old = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    old.num_batches_tracked.fill_(1000)
    for layer in (new, old):
        calibrate(layer, list(torch.randn(50, 3).split(10)))
    assert (new.num_batches_tracked.item(), old.num_batches_tracked.item()) == (5, 1000)


def test_a_cumulative_average_goes_on_from_exact_statistics() -> None:
    layer, x = nn.BatchNorm1d(3, momentum=None), torch.randn(60, 3)
    calibrate(layer, list(x[:50].split(10)))
    layer.train()(x[50:])
    torch.testing.assert_close(layer.running_mean, x.mean(0), rtol=1e-5, atol=1e-6)


def test_frozen_norms_stay_unless_told_otherwise() -> None:
    from normkit.conversion import freeze

    model = nn.Sequential(nn.BatchNorm1d(3), nk.FrozenBN(3), nn.BatchNorm1d(3))
    freeze(model, "statistics", where="2")
    x = 2 + torch.randn(40, 3)
    done = calibrate(model, x)
    assert set(done.left) == {"1", "2"}
    assert "frozen" in str(done)
    assert model[1].running_mean.abs().max() == model[2].running_mean.abs().max() == 0
    done.undo()
    done = calibrate(model, x, frozen=True, mode="layerwise")
    assert done.left == {}
    assert model[1].running_mean.min() > 1.5
    assert model[2].running_mean.min() > 1.5


def test_where_chooses() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    calibrate(model, 2 + torch.randn(40, 3), where="1")
    assert model[0].running_mean.abs().max() == 0
    assert model[1].running_mean.min() > 1


def test_a_norm_that_no_batch_reaches_is_named() -> None:
    model = subjects.trained(Plain())
    model.unused = nn.BatchNorm2d(4)  # type: ignore[assignment]
    for options in ({}, {"mode": "layerwise"}, {"together": True}):
        done = calibrate(model, loader(torch.randn(50, 3, 8, 8)), **options)  # type: ignore[arg-type]
        assert done.left == {"unused": "no batch reached it"}


@pytest.mark.parametrize("options", [{}, {"mode": "layerwise"}], ids=str)
def test_a_batch_that_is_not_finite_is_left_out(options: dict[str, Any]) -> None:
    layer, x = nn.BatchNorm1d(3), torch.randn(30, 3)
    bad = torch.full((5, 3), torch.inf)
    with pytest.warns(NonFiniteWarning, match="1 batch"):
        calibrate(layer, [x[:20], bad, x[20:]], **options)
    assert_near(kept(layer), exact([x.double()]))


def test_float16_statistics_that_overflow_are_an_error() -> None:
    layer = nn.BatchNorm1d(2).half()
    before = subjects.portrait(layer)
    with pytest.raises(OptionError, match=r"not finite in torch\.float16"):
        calibrate(layer, torch.randn(40, 2).half() * 1000)
    assert subjects.portrait(layer) == before


# ---------------------------------------------------------------- when to stop


def brightness(n: int) -> Tensor:
    """Images of one brightness each: all pixels alike, so that n images are n observations."""
    return torch.randn(n, 1, 1, 1).expand(n, 1, 6, 6).clone()


def test_it_stops_when_every_channel_is_sure_and_says_after_how_many() -> None:
    """The variance of n normal values is sure to √(2/n): 10 % needs about 200 images."""
    layer = nn.BatchNorm2d(1)
    done = calibrate(layer, list(brightness(2000).split(10)), until=0.1)
    assert done.sure
    assert 120 <= done.images <= 320
    assert done.layers[0].error is not None
    assert 0.08 < done.layers[0].error <= 0.1
    assert f"met after {done.images} images" in str(done)


def test_a_bound_that_is_not_met_is_said_with_the_channels() -> None:
    layer = nn.BatchNorm2d(2)
    x = torch.cat([brightness(100), 0.5 * torch.ones(100, 1, 6, 6)], 1)
    done = calibrate(layer, list(x.split(10)), until=0.01)
    assert (done.sure, done.images) == (False, 100)
    assert "not met" in str(done)
    assert done.uncertain(0.01) == {"": [0]}


def test_a_few_images_that_agree_by_chance_do_not_end_it() -> None:
    done = calibrate(nn.BatchNorm2d(1), list(torch.ones(90, 1, 2, 2).split(10)), until=0.5)
    assert done.images == 30


def test_rows_of_one_image_are_one_observation() -> None:
    """Frames of a video as rows of the batch: 40 videos of 8 equal frames are 40 observations."""

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.flatten(0, 1))

    x = torch.randn(40, 1, 1).expand(40, 8, 1)
    done = calibrate(Frames(), x.clone())
    assert done.layers[0].error == pytest.approx((2 / 40) ** 0.5, rel=0.5)


def test_images_caps_and_a_short_loader_is_fine() -> None:
    layer, x = nn.BatchNorm1d(3), torch.randn(50, 3)
    assert calibrate(layer, list(x.split(10)), images=25).images == 30
    assert calibrate(layer, list(x.split(10)), images=10**9).images == 50
    assert calibrate(layer, iter(x.split(10)), images=25).images == 30


# ---------------------------------------------------------------- metric


@pytest.mark.parametrize("higher", [True, False])
def test_a_metric_that_becomes_worse_brings_the_old_statistics_back(higher: bool) -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5)).train(), 7 + torch.randn(40, 1)
    seen = []

    def metric(model: nn.Module) -> float:
        seen.append(model.training)
        return model[0].running_mean.item() * (-1 if higher else 1)  # type: ignore[index, operator]

    before = subjects.portrait(model)
    done = calibrate(model, x, metric=metric, higher_is_better=higher)
    assert subjects.portrait(model) == before
    assert not done.kept
    assert "metric became worse" in str(done)
    assert seen == [False, False]  # in eval mode, both times
    better = calibrate(model, x, metric=metric, higher_is_better=not higher)
    assert better.kept
    assert better.metric is not None
    assert abs(better.metric[1]) == pytest.approx(7, abs=1)


def test_a_metric_that_fails_or_is_no_number() -> None:
    layer = nn.BatchNorm1d(1)
    before = subjects.portrait(layer)
    values: Iterator[Any] = iter([1.0, float("nan"), 1.0, "high"])
    done = calibrate(layer, torch.randn(40, 1), metric=lambda _: next(values))
    assert "not a number" in done.why_not
    with pytest.raises(OptionError, match="metric"):
        calibrate(layer, torch.randn(40, 1), metric=lambda _: next(values))
    with pytest.raises(StopIteration):
        calibrate(layer, torch.randn(40, 1), metric=lambda _: next(values))
    assert subjects.portrait(layer) == before


# ---------------------------------------------------------------- batches


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.norm(x * scale)


def test_batches_may_be_tensors_pairs_mappings_or_anything_with_a_forward() -> None:
    x, two = 2 + torch.randn(40, 3), torch.tensor(2.0)
    found = []
    for batch, forward in (
        ({"x": x, "scale": two}, None),
        (((x, two), torch.zeros(40)), None),
        ([{"x": x, "scale": two}, torch.zeros(40)], None),
        ({"image": x}, lambda model, batch: model(batch["image"], two)),
    ):
        model = TwoInputs()
        calibrate(model, [batch], forward=forward)
        found.append(model.norm.running_mean)
    assert all(torch.equal(one, found[0]) for one in found)
    assert found[0].min() > 3


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "empty": (nn.BatchNorm1d(3), [], NothingToDo, "no batches"),
    "used_up": (nn.BatchNorm1d(3), iter([]), NothingToDo, "no batches"),
    "no_loader": (nn.BatchNorm1d(3), 5, OptionError, "DataLoader"),
    "wrong_shape": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        [torch.randn(2, 3, 8, 8), torch.randn(2, 1, 8, 8)],
        ShapeError,
        r"batch 2, \(2, 1, 8, 8\)",
    ),
    "wrong_shape_ours": (nk.BN(3), [torch.randn(4, 5)], ShapeError, r"\(4, 5\).*N, 3"),
    "no_norms": (nn.Linear(3, 3), [torch.randn(4, 3)], NothingToDo, "no normalization"),
    "no_statistics": (nn.Sequential(nk.GN(8)), [torch.randn(4, 8)], NothingToDo, "keep none"),
    "one_value": (nn.BatchNorm1d(3), [torch.randn(1, 3)], ShapeError, "single value"),
    "wrapped": (
        nn.DataParallel(nn.Sequential(nn.BatchNorm1d(3))),
        [torch.randn(4, 3)],
        OptionError,
        "model.module",
    ),
    "lazy": (nn.Sequential(nn.LazyBatchNorm1d()), [torch.randn(4, 3)], ShapeError, "lazy"),
    "meta": (nn.BatchNorm1d(3, device="meta"), [torch.randn(4, 3)], OptionError, "meta"),
    "no_model": ("resnet", [torch.randn(4, 3)], OptionError, "nn.Module"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained_and_the_model_untouched(name: str) -> None:
    model, batches, kind, said = BAD[name]
    before = subjects.portrait(model) if isinstance(model, nn.Module) and name != "lazy" else None
    for options in ({}, {"mode": "layerwise"}, {"together": True}):
        with pytest.raises(kind, match=said):
            calibrate(model, batches, **options)
    if before is not None:
        assert subjects.portrait(model) == before


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "progresive"},
        {"until": 0.0},
        {"until": float("nan")},
        {"images": 0},
        {"together": True, "mode": "layerwise"},
        {"together": True, "until": 0.1},
        {"where": "layer9"},
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any]) -> None:
    layer = nn.BatchNorm1d(3)
    with pytest.raises((OptionError, NothingToDo)):
        calibrate(layer, torch.randn(40, 3), **options)
    assert layer.running_mean.abs().max() == 0


def test_the_result_prints_and_goes_into_json() -> None:
    import json

    model = subjects.trained(Plain())
    done = calibrate(model, loader(torch.randn(50, 3, 8, 8)), until=1e-9, note="for the test")
    text = str(done)
    assert "10 norms calibrated from 50 images in 4 batches, progressive" in text
    assert all(f"layers.{i}.1" in text for i in range(10))
    facts = json.loads(json.dumps(done.to_dict()))
    assert facts["layers"][0]["values"] == 50 * 64
    assert done.statistics.sources[0].note == "for the test"
    done.undo()
    assert "old statistics are back" in str(done)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"mode": "layerwise"}, {"together": True}], ids=str)
def test_on_a_gpu_with_batches_from_the_host(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nk.BGN(8, groups=5))
    x = 1 + torch.randn(50, 3, 9, 9)
    host = copy.deepcopy(model)
    calibrate(host, list(x.split(16)), **options)
    done = calibrate(model.cuda(), list(x.split(16)), **options)
    for a, b in zip(model.cpu().buffers(), host.buffers(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)  # TF32 apart
    assert done.statistics["1"].mean.device.type == "cpu"


def test_a_model_that_was_compiled_in_place_and_has_run() -> None:
    """Compiled code did not run the hooks: no batch seemed to reach a norm."""
    batches = [torch.randn(16, 4) + 3 for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    plain = copy.deepcopy(model)
    nk.calibrate(plain, batches)
    model.compile(backend="eager")
    with torch.no_grad():
        model(batches[0])
        nk.calibrate(model, batches)
    assert torch.equal(model[1].running_mean, plain[1].running_mean)
    assert model._compiled_call_impl is not None


def test_an_instance_norm_without_positions_is_named() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True))
    with pytest.raises(ShapeError, match="0: an instance norm expects more than one position"):
        calibrate(model, torch.randn(4, 3, 1))
