"""Made-up results of the experiments on claims."""

from __future__ import annotations

import random

from normkit.lab.results import DONE, Epoch, Result
from tools.evidence.claims import ALL, Claim, experiment_of


def made_up(
    file: str, better: dict[str, float], *, seeds: int = 5, collapsed: str = ""
) -> dict[str, Result]:
    """Results in which variants are better than 80 % by so much, with a spread of 0.002."""
    experiment = experiment_of(file)
    results = {}
    for variant in experiment.variants:
        for run in variant.runs(experiment.seeds[:seeds]):
            noise = random.Random(f"{variant.name} {run.seed}").uniform(-0.002, 0.002)
            score = 0.8 + better.get(variant.name, 0.0) + noise
            if variant.name == collapsed and run.seed == 1:
                score = 0.1
            measures = {"condensation": 0.9 - score, "stat_diff": [1 - score, None, 1 - score]}
            epochs = tuple(
                Epoch(i, test_accuracy=score, test_loss=0.5, test_one_class=0.2, measures=measures)
                for i in range(1, 6)
            )
            results[run.id] = Result(
                run.id, DONE, (5,), epochs, 2.0, 10, classes=10, test_samples=10_000
            )
    return results


def claim_of(text: str) -> Claim:
    [claim] = [claim for claim in ALL if claim.text == text]
    return claim
