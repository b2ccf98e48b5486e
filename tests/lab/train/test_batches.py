"""Batches and steps of an epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normkit.errors import OptionError
from normkit.lab.experiment import Train
from normkit.lab.train.batches import EpochPlan


def test_the_last_incomplete_batch_is_kept_as_in_revisiting_bn() -> None:
    plan = EpochPlan.of(Train(batch=128), 45_000)
    assert (plan.steps, plan.batches, plan.size(351)) == (352, 352, 72)


def test_a_batch_of_zero_is_the_whole_set() -> None:
    plan = EpochPlan.of(Train(batch=0), 1797)
    assert (plan.batch, plan.steps) == (1797, 1)


def test_a_batch_larger_than_the_set_is_the_set() -> None:
    assert EpochPlan.of(Train(batch=128), 32) == EpochPlan(32, 1, 32, 10)


sizes = st.integers(1, 60)


@given(samples=sizes, batch=st.integers(0, 12), accumulate=st.integers(1, 5), drop=st.booleans())
def test_sizes_add_up(samples: int, batch: int, accumulate: int, drop: bool) -> None:
    train = Train(batch=batch, accumulate=accumulate, drop_last=drop)
    together = (batch or samples) * accumulate
    if drop and together > samples:
        with pytest.raises(OptionError, match="nothing would be trained"):
            EpochPlan.of(train, samples)
        return
    plan = EpochPlan.of(train, samples)
    assert sum(plan.size(i) for i in range(plan.batches)) == plan.samples
    assert plan.samples == (samples // together * together if drop else samples)
    steps = list(plan.in_steps(range(1000)))
    assert [i for step in steps for i in step] == list(range(plan.batches))
    assert len(steps) == plan.steps
    for step in steps:  # every sample of a step counts alike
        each = [plan.share(i) / plan.size(i) for i in step]
        assert sum(plan.share(i) for i in step) == pytest.approx(1)
        assert max(each) == pytest.approx(min(each))
    if drop:
        assert {len(step) for step in steps} == {accumulate}


def test_steps_that_are_done_are_left_out() -> None:
    plan = EpochPlan.of(Train(batch=2, accumulate=2), 11)
    assert list(plan.in_steps(range(6), done=1)) == [[2, 3], [4, 5]]
