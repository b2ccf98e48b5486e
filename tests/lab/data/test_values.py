"""Numbers: normalization, sizes, soft labels, and the sets that come with the package."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from normkit.lab.data import load, mix, mixing_weights, soften
from normkit.lab.experiment import Data

NAME = "synthetic:3x6x5x4x500"


@pytest.mark.parametrize("crop", [0, 2])
@pytest.mark.parametrize("kind", ["none", "dataset", "fixed", "halves"])
def test_normalization(kind: str, crop: int) -> None:
    train = load(Data(NAME, normalize=kind, crop=crop)).train
    raw = load(Data(NAME)).train.images.double()
    values = raw / 255
    mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3), correction=0)
    expected = {
        "none": values,
        "dataset": (values - mean.view(3, 1, 1)) / std.view(3, 1, 1),
        "fixed": (raw - 128) / 128,
        "halves": (values - 0.5) / 0.5,
    }[kind]
    images, _ = train.gather(torch.arange(len(train)))
    # a product and a sum of float32 numbers below 16
    assert (images - expected).abs().max() < 16 * 2**-22


def test_statistics_are_those_of_the_whole_training_split() -> None:
    whole = load(Data(NAME)).train
    part = load(Data(NAME, validation=0.3, subset=32))
    assert torch.equal(whole.scale, part.train.scale)
    assert torch.equal(whole.shift, part.validation.shift)
    assert torch.equal(whole.shift, part.test.shift)


def test_a_constant_channel_becomes_zero() -> None:
    from normkit.lab.data.transforms import coefficients

    scale, shift = coefficients("dataset", ((0.5,), (0.0,)), 254)
    assert float(127 * scale + shift) == pytest.approx(0, abs=2**-22)


def test_digits_are_those_of_scikit_learn() -> None:
    sets = load(Data("digits", normalize="none"))
    ours = torch.cat([sets.train.images, sets.test.images]).flatten(1)
    labels = torch.cat([sets.train.labels, sets.test.labels])
    theirs = load_digits()
    found = sorted((*row, label) for row, label in zip(ours.tolist(), labels.tolist(), strict=True))
    expected = zip(theirs.data.astype(int).tolist(), theirs.target.tolist(), strict=True)
    assert found == sorted((*row, label) for row, label in expected)
    assert len(sets.test) == 360
    share = torch.bincount(sets.test.labels) / torch.bincount(labels)
    assert ((share - 360 / 1797).abs() < 1 / 174).all()  # less than one sample of any class
    images, _ = sets.train.gather(torch.arange(len(sets.train)))
    assert (images.min(), images.max()) == (0, 1)


def test_the_test_set_of_digits_is_fixed() -> None:
    sets = [load(Data("digits", split_seed=seed, validation=0.1)) for seed in (0, 1)]
    assert torch.equal(sets[0].test.images, sets[1].test.images)
    assert not torch.equal(sets[0].train.images, sets[1].train.images)
    # which samples they are, as first drawn: another choice would not compare with stored results
    assert int(sets[0].test.images.long().sum()) == 111_704


def test_another_size() -> None:
    sets = load(Data("digits", size=16, normalize="none"))
    assert sets.shape == (1, 16, 16)
    small, _ = load(Data("digits", normalize="none")).train.gather(torch.arange(50))
    large, _ = sets.train.gather(torch.arange(50))
    expected = F.interpolate(small, (16, 16), mode="bilinear", antialias=True)
    assert (large - expected).abs().max() <= 0.5 / 255 + 1e-6  # rounded to bytes
    assert load(Data(NAME, size=8)).train.images.shape[2:] == (8, 8)


def test_synthetic_is_the_same_every_time() -> None:
    first, again = (load(Data(NAME)) for _ in range(2))
    assert torch.equal(first.train.images, again.train.images)
    assert (len(first.train), len(first.test), first.classes) == (500, 100, 4)
    assert first.shape == (3, 6, 5)


def test_synthetic_can_be_learned() -> None:
    sets = load(Data("synthetic:1x8x8x4x400"))
    images, labels = next(sets.train.batches(0))
    centres = torch.stack([images[labels == c].flatten(1).mean(0) for c in range(4)])
    seen, truth = next(sets.test.batches(0))
    guess = torch.cdist(seen.flatten(1), centres).argmin(1)
    assert (guess == truth).float().mean() > 0.9  # chance is a quarter


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_are_those_of_torch(smoothing: float) -> None:
    logits, labels = torch.randn(20, 7, dtype=torch.float64), torch.randint(7, (20,))
    ours = F.cross_entropy(logits, soften(labels, 7, smoothing).double())
    theirs = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)  # shares are float32


def test_mixup() -> None:
    images, labels = torch.randn(6, 3, 4, 4), torch.randint(5, (6,))
    weights = torch.rand(6)
    mixed, soft = mix(images, soften(labels, 5), weights)
    for i, weight in enumerate(weights.tolist()):
        partner = (i - 1) % 6
        expected = weight * images[i] + (1 - weight) * images[partner]
        assert torch.allclose(mixed[i], expected, rtol=0, atol=8 * 2**-23)
        assert float(soft[i].sum()) == pytest.approx(1, abs=2**-22)
        if labels[i] != labels[partner]:
            assert float(soft[i, labels[i]]) == pytest.approx(weight, abs=2**-22)


def test_weights_of_mixup() -> None:
    weights = mixing_weights(0.2, 4000, seed=1, epoch=0)
    assert torch.equal(weights, mixing_weights(0.2, 4000, seed=1, epoch=0))
    assert not torch.equal(weights, mixing_weights(0.2, 4000, seed=1, epoch=1))
    assert weights.min() >= 0
    assert weights.max() <= 1
    # beta(0.2, 0.2): mean 1/2, variance 1/(4·1.4) = 0.179; five standard errors of the mean are
    # 0.033, and of the variance, whose kurtosis is below 3, less than 0.02
    assert abs(float(weights.mean()) - 0.5) < 0.034
    assert abs(float(weights.var()) - 0.1786) < 0.02


def test_weights_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    mixing_weights(0.2, 10, seed=1, epoch=0)
    assert torch.equal(state, torch.get_rng_state())
