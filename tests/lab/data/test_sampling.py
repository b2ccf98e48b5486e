"""Every class gives the same share, nothing is lost, and the seed alone decides which samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normkit.errors import OptionError
from normkit.lab.data import load
from normkit.lab.data.sampling import split, stratified
from normkit.lab.experiment import Data


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any),
    share=st.floats(0, 1),
    seed=st.integers(0, 3),
)
def test_stratified(sizes: list[int], share: float, seed: int) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels))]
    count = int(share * len(labels))
    chosen, others = stratified(labels, count, seed)
    assert len(chosen) == count
    assert sorted([*chosen.tolist(), *others.tolist()]) == list(range(len(labels)))
    given_ = torch.bincount(labels[chosen], minlength=len(sizes)).tolist()
    for size, got in zip(sizes, given_, strict=True):
        assert abs(got - size * count / len(labels)) < 1


def test_the_seed_decides() -> None:
    labels = torch.arange(1000) % 10
    first, again, other = (stratified(labels, 100, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_extra_samples_do_not_go_to_the_first_classes() -> None:
    labels = torch.arange(100) % 10
    extras = torch.zeros(10)
    for seed in range(50):
        extras += torch.bincount(labels[stratified(labels, 12, seed)[0]], minlength=10) - 1
    # 100 extras among 10 classes; a fixed choice would give some class 50 and others none
    assert extras.min() > 0
    assert extras.max() < 25


def test_ten_percent_of_every_class() -> None:
    """The split of revisiting BN: 10 %, class by class, of seed 0."""
    sets = load(Data("synthetic:1x4x4x5x1000", validation=0.1))
    whole = torch.bincount(load(Data("synthetic:1x4x4x5x1000")).train.labels)
    aside = torch.bincount(sets.validation.labels)
    assert len(sets.train) == 900
    assert ((aside - whole / 10).abs() < 1).all()


@pytest.mark.parametrize("count", [32, 128, 256, 512, 1024])
def test_low_data_subsets(count: int) -> None:
    sets = load(Data("digits", subset=count))
    assert len(sets.train) == count
    sizes = torch.bincount(load(Data("digits")).train.labels)
    found = torch.bincount(sets.train.labels, minlength=10)
    assert ((found - sizes * count / sizes.sum()).abs() < 1).all()


def test_validation_does_not_depend_on_the_subset() -> None:
    small = load(Data("digits", validation=0.2, subset=32))
    full = load(Data("digits", validation=0.2))
    assert torch.equal(small.validation.images, full.validation.images)
    train, aside = split(torch.arange(100) % 4, Data("here", validation=0.2, subset=40))
    assert aside is not None
    assert not set(train.tolist()) & set(aside.tolist())


def test_train_on_the_test_set() -> None:
    """Estimation shift, figure 2: training and test set are one."""
    sets = load(Data("digits", train="test"))
    assert torch.equal(sets.train.images, sets.test.images)
    assert torch.equal(sets.train.scale, load(Data("digits", train="test")).test.scale)
    assert len(load(Data("digits", train="test", subset=32)).train) == 32


def test_impossible_splits() -> None:
    with pytest.raises(OptionError, match=r"validation=0.0001 of 1437 samples of digits is 0"):
        load(Data("digits", validation=0.0001))
    with pytest.raises(OptionError, match=r"has 1150 samples .* beside the validation set"):
        load(Data("digits", validation=0.2, subset=1200))
