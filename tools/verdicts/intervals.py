"""Intervals of a mean paired difference, for whole tables of simulated experiments at once.

Each method takes samples (experiments, n) and gives the ends (experiments,) of a 95 % interval.
normkit uses the one that docs/verdicts.md chooses; the others are here to be compared with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
Ends = tuple[Array, Array]
LEVEL = 0.95
RESAMPLES = 1999  # of the bootstrap
EXACT = 12  # up to so many seeds all subsets are used: 4,095
SUBSETS = 4095  # beyond, so many random ones
CHUNK = 250  # experiments at a time: memory


def student(samples: Array, generator: np.random.Generator) -> Ends:
    """mean ± t · s/√n."""
    count = samples.shape[1]
    quantile = special.stdtrit(count - 1, (1 + LEVEL) / 2)
    mean = samples.mean(1)
    half = quantile * samples.std(1, ddof=1) / math.sqrt(count)
    return mean - half, mean + half


def bca(samples: Array, generator: np.random.Generator) -> Ends:
    """The bias-corrected and accelerated bootstrap, as in textbooks (Efron 1987)."""
    lows, highs = [], []
    for part in _chunks(samples):
        count = part.shape[1]
        places = generator.integers(0, count, (len(part), RESAMPLES, count))
        means = np.take_along_axis(part[:, None, :], places, axis=2).mean(2)
        means.sort(axis=1)
        centre = part.mean(1, keepdims=True)
        below = (means < centre).mean(1) + (means == centre).mean(1) / 2
        bias = special.ndtri(np.clip(below, 1 / RESAMPLES, 1 - 1 / RESAMPLES))
        residuals = part - centre
        lean = _lean(residuals)
        ends = []
        for z in special.ndtri([(1 - LEVEL) / 2, (1 + LEVEL) / 2]):
            share = special.ndtr(bias + (bias + z) / (1 - lean * (bias + z)))
            place = np.clip(share * (RESAMPLES - 1), 0, RESAMPLES - 1).round().astype(int)
            ends.append(np.take_along_axis(means, place[:, None], axis=1)[:, 0])
        lows.append(ends[0])
        highs.append(ends[1])
    return np.concatenate(lows), np.concatenate(highs)


def smoothed_bca(samples: Array, generator: np.random.Generator) -> Ends:
    """BCa for few seeds: the variance that resampling loses put back, quantiles of Student's t.

    The tails of the bootstrap distribution come from its saddlepoint approximation (Davison and
    Hinkley 1988), the wider quantile from Hesterberg (2015). normkit used it at first.
    """
    count = samples.shape[1]
    mean, std = samples.mean(1), samples.std(1, ddof=1)
    spread = np.where(std > 0, std, 1.0)
    residuals = (samples - mean[:, None]) / spread[:, None]
    quantile = special.stdtrit(count - 1, (1 + LEVEL) / 2) * math.sqrt(count / (count - 1))
    lean = _lean(residuals)
    ends = []
    for z in (-quantile, quantile):
        moved = lean + (lean + z) / (1 - lean * (lean + z))
        ends.append(mean + std * _resampled_mean(residuals, moved, noise=1 / count**2))
    return ends[0], ends[1]


def _lean(residuals: Array) -> Array:
    """The acceleration of a mean: a sixth of its skewness; 0 where nothing varies."""
    squares = (residuals**2).sum(1)
    return (residuals**3).sum(1) / (6 * np.where(squares > 0, squares, 1.0) ** 1.5)


def _resampled_mean(residuals: Array, z: Array, noise: float) -> Array:
    """The values below which resampled means stay with the probability Φ(z), by bisection."""
    sign = np.sign(z)
    high = np.abs(z) * math.sqrt(residuals.shape[1])
    for _ in range(12):
        short = sign * _tail(residuals, sign * high, noise)[0] < np.abs(z)
        high = np.where(short, 2 * high, high)
    low = high * 1e-3
    for _ in range(50):
        middle = (low + high) / 2
        short = sign * _tail(residuals, sign * middle, noise)[0] < np.abs(z)
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return _tail(residuals, sign * high, noise)[1]


def _tail(residuals: Array, tilt: Array, noise: float) -> Ends:
    """How far out a tilt is on a normal scale, and the value that is expected under it."""
    count = residuals.shape[1]
    exponents = tilt[:, None] * residuals / count
    largest = exponents.max(1, keepdims=True)
    weights = np.exp(exponents - largest)
    total = weights.sum(1)
    mean = (weights * residuals).sum(1) / total
    spread = (weights * (residuals - mean[:, None]) ** 2).sum(1) / total
    generating = count * (np.log(total / count) + largest[:, 0]) + tilt**2 * noise / 2
    value = mean + tilt * noise
    root = np.sign(tilt) * np.sqrt(np.maximum(2 * (tilt * value - generating), 1e-300))
    deviation = np.sqrt(spread / count + noise)
    return root + np.log(tilt * deviation / root) / root, value


def permutation(samples: Array, generator: np.random.Generator) -> Ends:
    """The differences that a sign-flip test does not refuse: between means of subsets.

    Each end is the k-th smallest or largest of the means of subsets (Hartigan 1969). With 5 seeds
    or fewer no test of signs reaches 5 %, and the interval is the whole line.
    """
    count = samples.shape[1]
    if count <= EXACT:
        members = np.array(list(itertools.product((0.0, 1.0), repeat=count)))[1:]
    else:
        members = generator.integers(0, 2, (SUBSETS, count)).astype(float)
        members = members[members.sum(1) > 0]
    outside = math.floor((1 - LEVEL) / 2 * (len(members) + 1))
    if outside < 1:
        return np.full(len(samples), -np.inf), np.full(len(samples), np.inf)
    weights = (members / members.sum(1, keepdims=True)).T
    means = (np.sort(part @ weights, axis=1) for part in _chunks(samples))
    low, high = np.concatenate([each[:, [outside - 1, -outside]] for each in means]).T
    return low, high


def _chunks(samples: Array) -> list[Array]:
    return [samples[at : at + CHUNK] for at in range(0, len(samples), CHUNK)]


Method = Callable[[Array, np.random.Generator], Ends]
METHODS: dict[str, Method] = {
    "Student": student,
    "BCa": bca,
    "smoothed BCa": smoothed_bca,
    "permutation": permutation,
}

NOISE, FALL, COLLAPSED, IMAGES = 0.005, 0.8, 0.05, 360
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]


def _collapsing(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    return generator.normal(0, NOISE, shape) - FALL * (generator.random(shape) < COLLAPSED)


def _accuracies(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Of two networks on 360 images that disagree on 6 %: many differences are equal."""
    up, down = 0.029, 0.029
    counts = generator.multinomial(IMAGES, (up, down, 1 - up - down), shape)
    return (counts[..., 0] - counts[..., 1]) / IMAGES


# differences with the mean 0
DIFFERENCES: dict[str, Draw] = {
    "normal": lambda g, shape: g.standard_normal(shape),
    "accuracies on 360 images": _accuracies,
    "heavy tails (t, 3 degrees)": lambda g, shape: g.standard_t(3, shape),
    "skewed (exponential)": lambda g, shape: g.standard_exponential(shape) - 1,
    "skewed (log-normal, σ = 0.5)": lambda g, shape: g.lognormal(0, 0.5, shape) - math.exp(0.125),
    "5 % collapsed on both sides": lambda g, s: _collapsing(g, s) - _collapsing(g, s),
    "5 % collapsed on one side": (
        lambda g, s: _collapsing(g, s) - g.normal(0, NOISE, s) + FALL * COLLAPSED
    ),
}


def coverage_rows(
    experiments: int, seeds: tuple[int, ...] = (3, 5, 10, 15, 30)
) -> list[tuple[str, ...]]:
    """How often each interval contains the true mean, in percent; its median width in brackets."""
    rows = []
    for place, (name, draw) in enumerate(DIFFERENCES.items()):
        for count in seeds:
            generator = np.random.default_rng([place, count])
            samples = draw(generator, (experiments, count))
            row = [name if count == seeds[0] else "", str(count)]
            usual = None
            for method in METHODS.values():
                low, high = method(samples, generator)
                width = float(np.median(high - low))
                usual = width if usual is None else usual
                covered = float(((low <= 1e-12) & (high >= -1e-12)).mean())
                relative = f" ({width / usual:.2f})" if math.isfinite(width) else " (∞)"
                row.append(f"{100 * covered:.1f}{relative}")
            rows.append(tuple(row))
    return rows
