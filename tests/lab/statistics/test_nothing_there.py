"""A against A: two names for one thing are rarely called better, as rarely as was promised."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from lab.statistics.made_up import experiment, results
from normkit.lab.results import Comparison
from normkit.lab.statistics import compare, decide
from tools.verdicts.null_experiments import DRAWS, simulate


def accuracy(chance: random.Random, luck: float) -> float:
    """Of a network on 360 images; the seed's luck is shared by the variants, as with real seeds."""
    return sum(chance.random() < 0.95 + luck for _ in range(360)) / 360


def compared(chance: random.Random, *names: str, seeds: int) -> list[Comparison]:
    about = experiment("bn", *names, seeds=seeds)
    luck = [chance.uniform(-0.03, 0.03) for _ in range(seeds)]
    scores = {name: [accuracy(chance, each) for each in luck] for name in ("bn", *names)}
    return compare(about, results(about, scores))


WRONG = ("better", "worse")


def test_hundreds_of_single_comparisons() -> None:
    """Each side was tested at 5 %, in the direction seen: one in ten was wrong.

    More than 48 of 600 are less than 0.1 % likely where 5 % are allowed, and 94 % likely where it
    is one in ten.
    """
    allowed = stats.binom.isf(0.001, 600, 0.05)
    assert allowed == 48
    chance = random.Random(5)
    found = [each for _ in range(600) for each in compared(chance, "again", seeds=5)]
    assert len(found) == 600
    assert 12 < sum(each.verdict in WRONG for each in found) <= allowed
    assert {each.verdict for each in found} >= set(WRONG)


def test_experiments_of_five() -> None:
    """Holm keeps the chance of any wrong verdict in an experiment at 5 %, far less for each."""
    chance = random.Random(7)
    found = [compared(chance, "a", "b", "c", "d", "e", seeds=8) for _ in range(100)]
    wrong = sum(any(each.verdict in WRONG for each in row) for row in found)
    assert wrong <= stats.binom.isf(0.001, 100, 0.05)


def test_what_is_read_from_an_interval_is_the_verdict() -> None:
    """Half of the wrong verdicts stood beside an interval that contained 0."""
    chance = random.Random(11)
    for _ in range(100):
        for each in compared(chance, "a", "b", "c", seeds=4):
            assert (each.verdict == "better") == (each.low > 0)
            assert (each.verdict == "worse") == (each.high < 0)
            assert (each.verdict == "equivalent") == (-0.005 < each.low <= 0 <= each.high < 0.005)
            assert (each.p_difference_holm <= 0.05) == (each.verdict in WRONG)


@pytest.mark.parametrize("runs", DRAWS)
def test_the_table_of_the_docs_in_small(runs: str) -> None:
    """docs/verdicts.md has 1,000 experiments in each of 27 rows; these are 150 in three."""
    wrong = covering = intervals = 0
    for seeds, variants in ((3, 1), (5, 3), (15, 8)):
        rates = simulate(DRAWS[runs], seeds, variants, experiments=150)
        wrong += rates.wrong
        covering, intervals = covering + rates.covering, intervals + rates.intervals
    assert wrong <= stats.binom.isf(0.001, 450, 0.05)
    assert covering / intervals > 0.93
    assert (runs == "5 % collapsed") == (rates.unstable > 0)


def test_a_difference_that_matters_is_rarely_called_equivalent() -> None:
    """True differences of just the margin: more than 35 of 400 are less than 0.1 % likely."""
    chance = random.Random(13)
    wrong = 0
    for _ in range(400):
        family = [[chance.gauss(0.005, 0.002) for _ in range(6)] for _ in range(3)]
        wrong += any(each.verdict == "equivalent" for each in decide(family, margin=0.005))
    assert wrong <= stats.binom.isf(0.001, 400, 0.05)
