"""A against A: two names for one thing are rarely called better, as rarely as was promised."""

from __future__ import annotations

import random

from scipy import stats

from lab.statistics.made_up import experiment, results
from normkit.lab.results import Comparison
from normkit.lab.statistics import compare


def accuracy(chance: random.Random, luck: float) -> float:
    """Of a network on 360 images; the seed's luck is shared by the variants, as with real seeds."""
    return sum(chance.random() < 0.95 + luck for _ in range(360)) / 360


def compared(chance: random.Random, *names: str, seeds: int) -> list[Comparison]:
    about = experiment("bn", *names, seeds=seeds)
    luck = [chance.uniform(-0.03, 0.03) for _ in range(seeds)]
    scores = {name: [accuracy(chance, each) for each in luck] for name in ("bn", *names)}
    return compare(about, results(about, scores))


def test_one_thousand_single_comparisons() -> None:
    """Each is wrong with 5 %: more than 73 of 1,000 are less than 0.1 % likely."""
    allowed = stats.binom.isf(0.001, 1000, 0.05)
    assert allowed == 73
    chance = random.Random(5)
    found = [each for _ in range(1000) for each in compared(chance, "again", seeds=5)]
    assert len(found) == 1000
    assert 0 < sum(each.verdict == "better" for each in found) <= allowed
    assert 0 < sum(each.verdict == "worse" for each in found) <= allowed


def test_one_thousand_comparisons_in_experiments_of_five() -> None:
    """Holm keeps the chance of any wrong "better" in an experiment at 5 %, far less for each."""
    chance = random.Random(7)
    found = [compared(chance, "a", "b", "c", "d", "e", seeds=8) for _ in range(200)]
    better = sum(each.verdict == "better" for row in found for each in row)
    assert better <= 0.05 * 1000
    wrong = sum(any(each.verdict == "better" for each in row) for row in found)
    assert wrong <= stats.binom.isf(0.001, 200, 0.05)
