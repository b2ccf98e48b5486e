"""The page of 10,000 runs: how long it takes, and how large it is.

    PYTHONPATH=tests python -m lab.report.many

Ten variants on a grid of 25 cells, 40 seeds, 30 epochs with two measures each.
"""

from __future__ import annotations

import time

from lab.report import sample
from normkit.lab.report.page import page
from normkit.lab.statistics import compare

NAMES = ("bn", "bcn", "gn", "ubn", "bgn", "ln", "in", "rbn", "sn", "pn")
GRID = {"train.worker_batch": (2, 4, 8, 16, 32), "train.lr": (0.01, 0.03, 0.1, 0.3, 1.0)}


def main() -> None:
    experiment = sample.experiment(names=NAMES, grid=GRID, seeds=40, epochs=30)
    results = sample.results(experiment)
    began, used = time.monotonic(), time.process_time()
    comparisons = compare(experiment, results)
    text = page(experiment, results, comparisons)
    seconds, used = time.monotonic() - began, time.process_time() - used
    size = len(text.encode()) / 1e6
    print(f"{len(results):,} runs: {seconds:.1f} s ({used:.1f} s of CPU), {size:.2f} MB")


if __name__ == "__main__":
    main()
