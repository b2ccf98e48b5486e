"""Which layers the train/eval gap enters at, on a small model that was really trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import normkit as nk
from normkit.diagnosis import attribute_gap
from normkit.diagnosis.attribution import GapAttribution, share_out
from normkit.diagnosis.observe.passes import Losses
from normkit.errors import NormkitError, NothingToDo, OptionError, ShapeError

WAYS = [
    ("output_error", "prefix"),
    ("esm", "prefix"),
    ("swap", "prefix"),
    ("swap", "to_batch"),
    ("swap", "to_running"),
]
NORMS = ("1", "4", "7", "10")


def untrained(norm: Any = nn.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), norm(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3), norm(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3), norm(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 1), norm(8), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 10)),
    )


@pytest.fixture(scope="module")
def data() -> list[tuple[Tensor, Tensor]]:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    y = torch.tensor(digits.target)[order]
    return list(zip(x[order].split(128), y.split(128), strict=True))[:14]


def trained(data: list[tuple[Tensor, Tensor]], norm: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = untrained(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for lr in (0.1, 0.1, 0.01, 0.001):  # at the end slow enough for running averages to follow
        for group in optimizer.param_groups:
            group["lr"] = lr
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


@pytest.fixture(scope="module")
def by_torch(data: list[tuple[Tensor, Tensor]]) -> nn.Sequential:
    return trained(data, nn.BatchNorm2d)


@pytest.fixture(scope="module")
def by_normkit(data: list[tuple[Tensor, Tensor]]) -> nn.Sequential:
    return trained(data, nk.BN)


@pytest.fixture(params=["torch", "normkit"])
def healthy(request: pytest.FixtureRequest) -> nn.Sequential:
    source: nn.Sequential = request.getfixturevalue(f"by_{request.param}")
    return copy.deepcopy(source)


def poison(model: nn.Sequential, path: str) -> None:
    norm: Any = model.get_submodule(path)
    norm.running_var *= 400
    norm.running_mean += 2


@pytest.mark.parametrize(("method", "swap"), WAYS)
@pytest.mark.parametrize("path", NORMS)
def test_one_poisoned_layer_is_found(
    healthy: nn.Sequential, data: Any, path: str, method: str, swap: str
) -> None:
    poison(healthy, path)
    found = attribute_gap(healthy, data[:6], method=method, swap=swap)
    assert found.is_gap
    assert found.worst == path
    # "to_running" alone may be hidden by the norms above, so only its rank is certain
    assert swap == "to_running" or found.shares[path] > 0.7
    assert path in str(found)


def test_output_error_has_no_unit_and_estimation_shift_has(
    by_torch: nn.Sequential, data: Any
) -> None:
    """The same function with inputs of the first norm 255 times as large."""
    model = copy.deepcopy(by_torch)
    with torch.no_grad():
        model[10].running_var /= 100
        before = {m: attribute_gap(model, data[:4], method=m) for m in ("output_error", "esm")}
        for tensor in (model[0].weight, model[0].bias, model[1].running_mean):
            tensor *= 255
        model[1].running_var *= 255**2
    after = {m: attribute_gap(model, data[:4], method=m) for m in ("output_error", "esm")}
    for path in NORMS:
        share = before["output_error"].shares[path]
        assert after["output_error"].shares[path] == pytest.approx(share, abs=0.01)
    assert before["esm"].worst == after["output_error"].worst == "10"
    assert after["esm"].worst == "1"


def test_the_shares_of_a_prefix_add_up(by_torch: nn.Sequential, data: Any) -> None:
    model = copy.deepcopy(by_torch)
    poison(model, "1")
    poison(model, "7")
    found = attribute_gap(model, data[:4], method="swap")
    assert sum(found.shares.values()) == pytest.approx(1.0, abs=1e-9)
    assert sum(found.contributions.values()) == pytest.approx(found.gap, abs=1e-9)
    assert set(list(found.shares)[:2]) == {"1", "7"}


def test_the_losses_are_those_of_the_two_modes(by_torch: nn.Sequential, data: Any) -> None:
    """Measured here by hand: eval mode, and eval mode with the norms alone in train mode."""
    model = copy.deepcopy(by_torch)
    batches = [*data[:3], (data[3][0][:17], data[3][1][:17])]
    found = attribute_gap(model, batches)
    losses = {False: 0.0, True: 0.0}
    for mode in losses:
        for x, y in batches:
            twin = copy.deepcopy(by_torch).eval()
            for path in NORMS:
                twin.get_submodule(path).train(mode)
            with torch.no_grad():
                losses[mode] += float(F.cross_entropy(twin(x), y, reduction="sum"))
    count = sum(len(y) for _, y in batches)
    assert found.eval_loss == pytest.approx(losses[False] / count, rel=1e-5)
    assert found.train_loss == pytest.approx(losses[True] / count, rel=1e-5)
    assert found.gap == pytest.approx(found.eval_loss - found.train_loss, abs=1e-9)


def test_exact_statistics_leave_no_gap(by_torch: nn.Sequential, data: Any) -> None:
    model = copy.deepcopy(by_torch)
    for path in NORMS:
        norm: Any = model.get_submodule(path)
        norm.momentum = 1.0
        norm.training = True
    one = data[:1]
    with torch.no_grad():
        model(one[0][0])  # the statistics of the one batch there is
    found = attribute_gap(model, one)
    # the running variance is the unbiased one: n/(n-1) with n ≥ 128 in the smallest layer
    assert abs(found.gap) < 0.05
    assert all(math.isfinite(share) for share in found.shares.values())


def test_a_healthy_model_is_said_to_be_healthy(healthy: nn.Sequential, data: Any) -> None:
    found = attribute_gap(healthy, data)
    assert abs(found.gap) < 0.1 * found.train_loss
    assert not found.is_gap or "enters at" in str(found)


@pytest.mark.parametrize(("method", "swap"), WAYS)
def test_statistics_that_are_no_numbers(
    by_torch: nn.Sequential, data: Any, method: str, swap: str
) -> None:
    model = copy.deepcopy(by_torch)
    model[4].running_var.fill_(math.nan)
    found = attribute_gap(model, data[:2], method=method, swap=swap)
    assert found.eval_loss == math.inf
    assert math.isfinite(found.train_loss)
    assert found.worst == "4"
    assert found.shares["4"] == pytest.approx(1.0)
    assert model[4].running_var.isnan().all()


@pytest.mark.parametrize(("method", "swap"), WAYS)
def test_the_model_is_restored_bit_for_bit(
    by_normkit: nn.Sequential, data: Any, method: str, swap: str
) -> None:
    model = copy.deepcopy(by_normkit)
    model.train()
    model[4].eval()
    before = copy.deepcopy(model.state_dict())
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    attribute_gap(model, data[:2], method=method, swap=swap)
    assert_same(model, before, modes)
    assert torch.equal(random, torch.get_rng_state())

    calls = 0

    def failing(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError("no loss today")
        return F.cross_entropy(output, target)

    with pytest.raises(ArithmeticError):
        attribute_gap(model, data[:2], failing, method=method, swap=swap)
    assert_same(model, before, modes)


def assert_same(model: nn.Module, before: dict[str, Tensor], modes: list[bool]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_warning_of_the_layer_is_kept_for_the_training(data: Any) -> None:
    model = nn.Sequential(nk.BN(1), nn.Flatten(), nn.Linear(64, 10))
    x, y = data[0]
    attribute_gap(model, [(x * math.inf, y)])
    assert not model[0]._warned
    assert int(model[0].nonfinite_batches) == 0


def test_the_loss_can_be_anything(by_torch: nn.Sequential, data: Any) -> None:
    def error_rate(output: Tensor, target: Tensor) -> float:
        return float((output.argmax(1) != target).float().mean())

    found = attribute_gap(by_torch, data[:2], error_rate)
    assert 0 <= found.eval_loss <= 1
    seen: list[Any] = []

    def of_batch(output: Tensor, batch: Any) -> Tensor:
        seen.append(batch)
        return output.square().mean()

    attribute_gap(by_torch, [{"input": data[0][0]}], of_batch)
    assert set(seen[0]) == {"input"}


def test_progress_and_passes(by_torch: nn.Sequential, data: Any) -> None:
    said: list[tuple[int, int]] = []
    attribute_gap(by_torch, data[:1], method="swap", progress=lambda *a: said.append(a))
    assert said == [(k, 5) for k in range(6)]
    said.clear()
    attribute_gap(by_torch, data[:1], progress=lambda *a: said.append(a))
    assert said == [(0, 2), (1, 2), (2, 2)]


def test_a_generator_is_enough_and_is_read_no_further(by_torch: nn.Sequential, data: Any) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield data[0]

    found = attribute_gap(by_torch, endless(), method="swap", max_batches=2)
    assert found.batch.sizes == (128, 128)


def test_bad_input(by_torch: nn.Sequential, data: Any) -> None:
    x, y = data[0]
    cases: list[tuple[nn.Module, Any, dict[str, Any], type[NormkitError], str]] = [
        (by_torch, [], {}, NothingToDo, "no batches"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data, {}, NothingToDo, "no norms"),
        (nn.Sequential(nn.GroupNorm(1, 1), nn.Flatten()), data, {}, NothingToDo, "no gap"),
        (nn.DataParallel(by_torch), data, {}, OptionError, "model.module"),
        (by_torch, [(x[:, :, :5], y)], {}, ShapeError, "fails on"),
        (by_torch, [x], {}, OptionError, "no target"),
        (by_torch, [(x, y[:5])], {}, ShapeError, "Cross-entropy"),
        (by_torch, [(x[:1, :, :7, :7], y[:1])], {}, ShapeError, "batch 1"),
        (by_torch, data, {"method": "guess"}, OptionError, "Unknown method"),
        (by_torch, data, {"swap": "all"}, OptionError, "Unknown swap"),
        (by_torch, data, {"loss": lambda o, t: o}, ShapeError, "one number"),
    ]
    before = copy.deepcopy(by_torch.state_dict())
    modes = [m.training for m in by_torch.modules()]
    for model, batches, options, error, message in cases:
        with pytest.raises(error, match=message):
            attribute_gap(model, batches, **options)
        assert_same(by_torch, before, modes)


# ---------------------------------------------------------------- sharing out


def test_losses_are_weighted_by_samples() -> None:
    losses = Losses((1.0, 4.0), (3, 1))
    assert losses.mean == 7 / 4
    assert Losses((2.0, 2.0, 2.0), (1, 2, 3)).standard_error == 0.0
    equal = Losses((1.0, 2.0, 3.0), (5, 5, 5))
    assert equal.standard_error == pytest.approx(1 / math.sqrt(3))  # std 1 over the root of 3
    assert math.isnan(Losses((1.0,), (1,)).standard_error)


def test_infinite_losses_are_compared() -> None:
    worse, better = Losses((math.nan, 1.0), (1, 1)), Losses((math.inf, 0.5), (1, 1))
    assert (worse - better).values == (0.0, 0.5)
    assert share_out({"a": math.inf, "b": 1.0}, math.inf) == {"a": 1.0, "b": 0.0}
    assert share_out({"a": 0.0}, 0.0) == {"a": 0.0}


def test_the_text_names_the_largest_first() -> None:
    flat = Losses((0.0, 0.0), (1, 1)), Losses((2.0, 2.1), (1, 1))
    shares = {f"bn{k}": k / 28 for k in range(8)}
    said = str(GapAttribution(*flat, shares, shares, "output_error"))
    assert said.index("bn7") < said.index("bn6")
    assert "25% of the gap enters at bn7" in said
    assert "at 3 others" in said


def test_small_shares_and_single_batches_in_words() -> None:
    found = GapAttribution(
        Losses((1.0,), (8,)),
        Losses((2.0,), (8,)),
        {"a": 1.001, "b": -0.001},
        {"a": 1.0, "b": 0.0},
        "swap",
    )
    said = str(found)
    assert "(1 batch, 8 samples)" in said
    assert "  0% of the gap enters at b" in said
    assert "-0%" not in said
