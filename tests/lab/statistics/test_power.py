"""How many more seeds would decide: against simulation, published tables and by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from normkit.lab.statistics import interval, more_seeds, two_sided, verdict
from normkit.lab.statistics.paired import _fewest, _power


def of(mean: float, std: float, count: int) -> list[float]:
    """Numbers with just this mean and standard deviation."""
    raw = [random.gauss(0, 1) for _ in range(count)]
    centre, spread = statistics.fmean(raw), statistics.stdev(raw)
    return [mean + std * (each - centre) / spread for each in raw]


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_published_sample_sizes(effect: float, pairs: int) -> None:
    # two-sided paired t-test, 5 %, power 0.8, for Cohen's small, medium and large effects:
    # the numbers that G*Power prints (Faul et al. 2007)
    assert _fewest(lambda n: _power(n, effect, 0.05, "two-sided")) == pairs
    assert more_seeds(of(effect, 1.0, 5), margin=0.0) == pairs - 5


def test_simulated_power_of_a_difference() -> None:
    found = of(0.7, 1.0, 5)
    needed = 5 + (more_seeds(found, margin=0.0) or 0)
    chance = random.Random(1)
    experiments = 2000
    shown = 0
    for _ in range(experiments):
        scores = [chance.gauss(0.7, 1.0) for _ in range(needed)]
        shown += two_sided(scores) <= 0.05
    # at least 0.8, and not by more than one pair adds here (0.03); 4 standard errors of 0.009
    assert 0.8 - 0.036 < shown / experiments < 0.83 + 0.036


def test_simulated_power_of_equivalence() -> None:
    found = of(0.0, 1.0, 5)
    needed = 5 + (more_seeds(found, margin=0.5) or 0)
    chance = random.Random(2)
    experiments = 1000
    shown = sum(
        verdict(*interval([chance.gauss(0, 1.0) for _ in range(needed)]), 0.5) == "equivalent"
        for _ in range(experiments)
    )
    assert 0.8 - 4 * 0.013 < shown / experiments < 0.82 + 4 * 0.013
    assert needed < 60
    assert more_seeds(found, margin=0.0) is None  # nothing to be shown at all


def test_a_stricter_level_needs_more() -> None:
    found = of(0.5, 1.0, 5)
    assert (more_seeds(found, 0.0, alpha=0.01) or 0) > (more_seeds(found, 0.0) or math.inf)


def test_at_least_one_more_and_none_where_it_is_hopeless() -> None:
    assert more_seeds(of(5.0, 1.0, 8), margin=0.0) == 1
    assert more_seeds(of(0.01, 1.0, 8), margin=0.0) is None
    assert more_seeds([0.1], margin=0.5) is None
    assert more_seeds([], margin=0.5) is None


def test_without_spread_signs_are_counted() -> None:
    assert more_seeds([0.1, 0.1], margin=0.0) == 4  # 2·2⁻⁶ < 5 % < 2·2⁻⁵
    assert more_seeds([0.0, 0.0], margin=0.1) == 4
    assert more_seeds([0.0, 0.0], margin=0.0) is None


def test_the_guess_is_as_good_as_it_says() -> None:
    """What decides is not the power at a known effect, but at one that was guessed from 5 seeds."""
    chance = random.Random(11)
    decided = []
    while len(decided) < 400:
        effect = chance.gauss(0, 1)
        seeds = [chance.gauss(effect, 1) for _ in range(5)]
        more = None if is_decided(seeds) else more_seeds(seeds, margin=0.5)
        if more is not None:
            decided.append(is_decided(seeds + [chance.gauss(effect, 1) for _ in range(more)]))
    # what it promises is 4 of 5, of an effect that is itself a guess; of 400 it is known to ±2 %
    assert 0.73 < statistics.fmean(decided) < 0.94


def is_decided(differences: list[float]) -> bool:
    return verdict(*interval(differences), 0.5) != "not shown"
