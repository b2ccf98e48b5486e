"""Statistics that merge, how sure they are, and the fingerprint of data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from normkit.calibration.fingerprint import Fingerprint, of_state
from normkit.calibration.measuring import StandardErrors
from normkit.core.moments import Moments
from normkit.errors import OptionError
from normkit.inspection.statistics import MergedMoments


def table(x: Tensor) -> Moments:
    """The moments of each image of x (N, C, L)."""
    return Moments(x.mean(2), x.var(2, correction=0), x.shape[2])


def of(x: Tensor) -> MergedMoments:
    return MergedMoments.of(table(x))


def test_parts_of_any_size_merge_to_the_whole() -> None:
    x = 3 + 2 * torch.randn(40, 5, 7, dtype=torch.float64)
    merged = of(x[:1])
    for part in (x[1:4], x[4:30], x[30:]):
        merged = merged.merged(of(part))
    values = x.movedim(1, 0).flatten(1).numpy()
    assert merged.count.tolist() == [280] * 5
    np.testing.assert_allclose(merged.mean.numpy(), values.mean(1), rtol=1e-13)
    np.testing.assert_allclose(merged.var.numpy(), values.var(1), rtol=1e-13)
    np.testing.assert_allclose(merged.unbiased().numpy(), values.var(1, ddof=1), rtol=1e-13)


def test_merging_does_not_cancel() -> None:
    """E[x²] − E[x]² of these numbers is wrong in the first digit, even in float64."""
    x = 1e8 + torch.randn(64, 1, 4, dtype=torch.float64)
    merged = of(x[:10]).merged(of(x[10:]))
    exact = (x - 1e8).var(correction=0).item()
    assert merged.var.item() == pytest.approx(exact, rel=1e-7)
    naive = (x.square().mean() - x.mean().square()).item()
    assert abs(naive - exact) > 0.1 * exact


def test_merging_is_the_same_in_any_order() -> None:
    a, b, c = (of(s + torch.randn(n, 3, 4)) for s, n in ((0, 3), (5, 20), (-2, 7)))
    one, other = a.merged(b).merged(c), c.merged(a.merged(b))
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.m2, other.m2, rtol=1e-12, atol=1e-12)


def test_statistics_of_different_layers_do_not_merge() -> None:
    with pytest.raises(OptionError, match="3 and of 4"):
        of(torch.randn(2, 3, 4)).merged(of(torch.randn(2, 4, 4)))


def images(n: int) -> Tensor:
    """Images whose pixels are alike: own brightness and contrast, a little noise, two channels."""
    scale = torch.rand(n, 2, 1, dtype=torch.float64) + 0.5
    shift = torch.randn(n, 2, 1, dtype=torch.float64)
    return 2 + shift + scale * torch.randn(n, 2, 9, dtype=torch.float64)


def test_standard_errors_are_the_spread_of_repeated_estimates() -> None:
    repeats, n = 400, 50
    estimates, errors = [], []
    for _ in range(repeats):
        found, sure = None, StandardErrors()
        for batch in images(n).split(16):  # batches do not matter
            part = of(batch)
            found = part if found is None else found.merged(part)
            sure.add(table(batch))
        assert found is not None
        estimates.append(torch.stack([found.mean, found.var]))
        errors.append(torch.stack(sure.of(found)))
    true = torch.stack(estimates).std(0)
    # a spread from 400 repeats is itself sure to 1/√800 = 3.5 %; four times that, and the bias of
    # a standard error from 50 images, which is below 2 %
    ratio = torch.stack(errors).mean(0) / true
    assert ((ratio > 0.84) & (ratio < 1.16)).all(), ratio


def test_pixels_are_no_independent_observations() -> None:
    """Counted by pixels, the error of these means would come out three times too small."""
    x = images(200)
    sure = StandardErrors()
    sure.add(table(x))
    by_image = sure.of(of(x))[0]
    by_pixel = (of(x).var / of(x).count).sqrt()
    assert (by_image > 2 * by_pixel).all()


def test_images_of_different_size_count_by_their_size() -> None:
    small, large = images(30), torch.cat([images(30)] * 4, 2)
    sure = StandardErrors()
    sure.add(table(small))
    sure.add(table(large))
    both = of(small).merged(of(large))
    w = torch.tensor([9.0] * 30 + [36.0] * 30, dtype=torch.float64)[:, None]
    m = torch.cat([small.mean(2), large.mean(2)])
    expected = ((w * (m - both.mean)).square().sum(0) * 60 / 59).sqrt() / w.sum()
    torch.testing.assert_close(sure.of(both)[0], expected, rtol=1e-9, atol=0)
    v = torch.cat([small.var(2, correction=0), large.var(2, correction=0)])
    own = v + (m - both.mean).square()  # what each image contributes to the variance
    expected = ((w * (own - both.var)).square().sum(0) * 60 / 59).sqrt() / w.sum()
    torch.testing.assert_close(sure.of(both)[1], expected, rtol=1e-9, atol=0)


def test_one_image_is_no_evidence() -> None:
    sure = StandardErrors()
    sure.add(table(images(1)))
    assert torch.isinf(sure.of(of(images(1)))[0]).all()


def test_a_dead_channel_is_sure() -> None:
    x = images(40)
    x[:, 1] = 0
    sure = StandardErrors()
    sure.add(table(x))
    relative = sure.relative(of(x), eps=1e-5)
    assert relative[1] == 0
    assert relative[0] > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.bool])
def test_a_fingerprint_is_of_the_samples_whatever_their_order(dtype: torch.dtype) -> None:
    x = (torch.randn(12, 3, 5) * 50).to(dtype)
    one, other, less = Fingerprint(), Fingerprint(), Fingerprint()
    one.add((x, torch.arange(12)))
    for part in x[torch.randperm(12)].split(5):
        other.add(part)
    less.add(x[:11])
    assert one.images == other.images == 12
    assert str(one) == str(other) != str(less)


def test_a_fingerprint_sees_a_single_bit_and_the_place_of_values() -> None:
    x = torch.randn(2, 8)
    prints = set()
    for change in (lambda t: t, lambda t: t.roll(1, 1), lambda t: t + 0.0 * t, lambda t: -t):
        one = Fingerprint()
        one.add(change(x.clone()))
        prints.add(str(one))
    flipped = x.clone()
    flipped.view(torch.int32)[1, 3] ^= 1
    one = Fingerprint()
    one.add(flipped)
    prints.add(str(one))
    assert len(prints) == 4  # adding zeros is no change


def test_the_print_of_a_state_depends_on_names_and_values() -> None:
    a, b = torch.randn(3), torch.randn(3)
    prints = {
        of_state([("a", a), ("b", b)]),
        of_state([("b", b), ("a", a)]),  # the same
        of_state([("a", b), ("b", a)]),
        of_state([("a", a)]),
    }
    assert len(prints) == 3
