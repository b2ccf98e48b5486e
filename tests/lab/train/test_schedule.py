"""Learning rates against torch's schedulers, and against formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler

from normkit.errors import OptionError
from normkit.lab.experiment import Train
from normkit.lab.train.optimizer import rate

STEPS = 7  # of an epoch

Scheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def torch_rates(make: Scheduler, base: float, count: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
    scheduler = make(optimizer)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def ours(train: Train, base: float, per_epoch: bool) -> list[float]:
    steps = range(0, train.epochs * STEPS, STEPS if per_epoch else 1)
    return [rate(train, base, step, STEPS) for step in steps]


@pytest.mark.parametrize("base", [0.1, 0.001])
@pytest.mark.parametrize("floor", [0.0, 1e-8])
def test_cosine_once_an_epoch_is_torch_s(base: float, floor: float) -> None:
    train = Train(epochs=9, schedule="cosine", per="epoch", floor=floor)
    expected = torch_rates(lambda o: lr_scheduler.CosineAnnealingLR(o, 9, floor), base, 9)
    assert ours(train, base, per_epoch=True) == pytest.approx(expected, rel=1e-12)
    # the same within an epoch, whatever the step
    assert len({rate(train, base, 2 * STEPS + i, STEPS) for i in range(STEPS)}) == 1


def test_cosine_with_every_step_is_torch_s_over_all_steps() -> None:
    train = Train(epochs=4, schedule="cosine")
    make = lambda o: lr_scheduler.CosineAnnealingLR(o, 4 * STEPS)  # noqa: E731
    assert ours(train, 0.1, per_epoch=False) == pytest.approx(
        torch_rates(make, 0.1, 4 * STEPS), rel=1e-9
    )


def test_a_slower_group_ends_at_the_same_floor() -> None:
    # revisiting BN: eta_min = 1e-8 for every group, so γ does not end at 1e-10
    train = Train(epochs=180, schedule="cosine", per="step", floor=1e-8)
    end = 180 * STEPS
    for base in (0.1, 0.1 / 100):
        assert rate(train, base, end, STEPS) == pytest.approx(1e-8, rel=1e-9)
    middle = rate(train, 0.001, end // 2, STEPS)
    assert middle == pytest.approx((0.001 + 1e-8) / 2, rel=1e-12)


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_milestones_are_torch_s(per: str) -> None:
    train = Train(epochs=9, schedule="step", milestones=(3, 5), factor=0.2, per=per)
    expected = torch_rates(lambda o: lr_scheduler.MultiStepLR(o, [3, 5], 0.2), 0.1, 9)
    assert ours(train, 0.1, per_epoch=True) == pytest.approx(expected, rel=1e-12)
    assert rate(train, 0.1, 3 * STEPS - 1, STEPS) == 0.1
    assert rate(train, 0.1, 3 * STEPS, STEPS) == pytest.approx(0.02)


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_poly_is_torch_s(per: str) -> None:
    train = Train(epochs=5, schedule="poly", per=per)
    count = 5 * STEPS if per == "step" else 5
    expected = torch_rates(lambda o: lr_scheduler.PolynomialLR(o, count, 0.9), 0.007, count)
    assert ours(train, 0.007, per_epoch=per == "epoch") == pytest.approx(expected, rel=1e-9)


def test_a_warm_up_of_one_epoch_rises_with_every_batch() -> None:
    # lr · i / n in the i-th of n batches, then the milestones, which count from the beginning
    train = Train(epochs=6, schedule="step", per="epoch", milestones=(2,), factor=0.2, warmup=1)
    found = [rate(train, 0.1, step, STEPS) for step in range(3 * STEPS)]
    assert found[:STEPS] == pytest.approx([0.1 * i / STEPS for i in range(STEPS)])
    assert found[STEPS : 2 * STEPS] == [0.1] * STEPS
    assert found[2 * STEPS] == pytest.approx(0.02)


def test_a_warm_up_is_torch_s_linear_one() -> None:
    train = Train(epochs=4, schedule="constant", warmup=2)

    def make(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, i / (2 * STEPS)))

    expected = torch_rates(make, 0.3, 4 * STEPS)
    assert ours(train, 0.3, per_epoch=False) == pytest.approx(expected, rel=1e-12)


def test_constant_is_constant() -> None:
    assert set(ours(Train(epochs=3, schedule="constant"), 0.1, per_epoch=False)) == {0.1}


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="cosine"):
        rate(Train(schedule="cosin"), 0.1, 0, STEPS)


def test_rates_are_never_negative() -> None:
    for schedule in ("cosine", "poly"):
        train = Train(epochs=3, schedule=schedule)
        found = [rate(train, 0.1, step, STEPS) for step in range(3 * STEPS + 1)]
        assert min(found) >= 0
        assert not any(math.isnan(value) for value in found)
