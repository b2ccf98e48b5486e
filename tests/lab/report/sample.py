"""Experiments with made-up results: what a sweep leaves behind, without training anything."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scipy import stats

from normkit.lab.experiment import (
    Cell,
    Data,
    Experiment,
    Model,
    ModelStep,
    Published,
    Setting,
    Train,
    Variant,
    Watch,
)
from normkit.lab.results import DIVERGED, DONE, Comparison, Epoch, Result

BATCHES = {"train.worker_batch": (2, 64)}
NAMES = ("bn", "bcn", "gn", "ubn", "bgn")
ENVIRONMENT = {
    "normkit": "0.1.0",
    "torch": "2.15.0",
    "python": "3.11.2",
    "device": "CPU, 2 threads",
    "backend": "torch",
}


def experiment(
    names: Sequence[str] = NAMES,
    grid: Mapping[str, Sequence[Any]] = BATCHES,
    seeds: int = 5,
    epochs: int = 12,
    **more: Any,
) -> Experiment:
    cells: list[Cell] = [
        tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
    ]
    variants = [
        Variant(name, _setting(name, cell, epochs), cell) for cell in cells for name in names
    ]
    given: dict[str, Any] = {
        "name": "small-batches",
        "title": "Normalizers at small batches",
        "question": "Does another normalizer beat bn when a worker has few samples?",
        "source": "BGN, table 1",
        "scale": "desk",
        "difference": "digits and a small network instead of ImageNet and ResNet-50.",
        "baseline": names[0],
        **more,
    }
    return Experiment(variants=tuple(variants), seeds=tuple(range(1, seeds + 1)), **given)


def _setting(name: str, cell: Cell, epochs: int) -> Setting:
    options = {"groups": 8} if name in ("gn", "bcn", "bgn") else {}
    train: dict[str, Any] = {"epochs": epochs, "lr": 0.05, "batch": 64}
    model, data = "native:small_cnn", "digits"
    for path, value in cell:
        if path == "model.name":
            model = value
        elif path == "data.name":
            data = value
        elif path.startswith("train."):
            train[path.removeprefix("train.")] = value
    return Setting(
        Data(data),
        Model(model),
        (ModelStep("norm", name, options=options),),
        Train(**train),
        Watch(("condensation", "esm")),
    )


def published(made: Experiment, names: Sequence[str] = ("bn", "gn", "bgn")) -> Experiment:
    values = {"bn": 0.653, "gn": 0.727, "bgn": 0.754}
    found = tuple(
        Published(n, values.get(n, 0.7), cell, 0.002, "top-1 on ImageNet, 120 epochs")
        for cell in made.cells()
        for n in names
    )
    return replace(made, published=found)


def results(
    made: Experiment,
    *,
    final: Mapping[str, float] | None = None,
    diverged: Sequence[tuple[str, int]] = (),
    left_out: Sequence[tuple[str, int]] = (),
    environment: Mapping[str, str] = ENVIRONMENT,
) -> dict[str, Result]:
    """Results of all runs but those that are left out, named by variant and seed."""
    found: dict[str, Result] = {}
    for variant in made.variants:
        for run in variant.runs(made.seeds):
            if (variant.name, run.seed) in left_out:
                continue
            shift = (final or {}).get(variant.name)
            ends = (variant.name, run.seed) in diverged
            found[run.id] = _result(variant, run.id, run.seed, shift, ends, environment)
    return found


def _result(
    variant: Variant,
    run: str,
    seed: int,
    final: float | None,
    diverged: bool,
    environment: Mapping[str, str],
) -> Result:
    chance = random.Random(f"{variant.name} {variant.cell} {seed}")
    shared = random.Random(f"{variant.cell} {seed}").gauss(0, 0.006)  # what pairing takes away
    small = dict(variant.cell).get("train.worker_batch") == 2
    usual = {"bn": 0.905, "bcn": 0.957, "gn": 0.943, "ubn": 0.921, "bgn": 0.938}
    top = usual.get(variant.name, 0.93) if small else {"gn": 0.951}.get(variant.name, 0.9635)
    top = (final if final is not None else top) + shared + chance.gauss(0, 0.004)
    count = variant.setting.train.epochs
    last = max(count // 3, 1) if diverged else count
    pace = {"ubn": 0.31, "bgn": 0.24, "bcn": 0.26}.get(variant.name, 0.2)
    slow = count / 5
    epochs = []
    for epoch in range(0, last + 1):
        rise = 1 - math.exp(-epoch / slow)
        accuracy = 0.1 + (min(top, 0.999) - 0.1) * rise + chance.gauss(0, 0.004) * (1 - rise)
        layers = [
            0.3 + 0.5 * k * (variant.name == "bn") / 4 + chance.random() / 9 for k in range(9)
        ]
        epochs.append(
            Epoch(
                epoch,
                lr=0.05 * (1 + math.cos(math.pi * epoch / count)) / 2,
                train_loss=None if epoch == 0 else 2.3 * math.exp(-epoch / slow) + 0.02,
                train_accuracy=None if epoch == 0 else min(accuracy + 0.01, 1.0),
                test_loss=2.3 * math.exp(-epoch / slow) + 0.1,
                test_accuracy=accuracy,
                test_top5_accuracy=(1 + accuracy) / 2,
                seconds=pace * epoch,
                measures={"condensation": 0.6 * math.exp(-epoch / 4) + 0.1, "esm_std": layers},
            )
        )
    return Result(
        run=run,
        status=DIVERGED if diverged else DONE,
        selected=() if diverged else (last,),
        epochs=tuple(epochs),
        seconds=pace * last,
        parameters=28_000 + 100 * len(variant.name),
        peak_memory=int(pace * 2e8),
        images_per_second=1400 / pace,
        environment=dict(environment),
        note=f"the loss was not finite in epoch {last + 1}" if diverged else "",
    )


def comparisons(made: Experiment, found: Mapping[str, Result]) -> list[Comparison]:
    """Plain statistics, good enough to show."""
    compared = []
    for variant in made.variants:
        if variant.name != made.baseline:
            base = made.variant(made.baseline, variant.cell)
            compared.append(_compared(made, found, variant, base))
    return compared


def _compared(
    made: Experiment, found: Mapping[str, Result], variant: Variant, base: Variant
) -> Comparison:
    pairs, lost = [], [0, 0]
    for own, other in zip(variant.runs(made.seeds), base.runs(made.seeds), strict=True):
        a, b = found.get(own.id), found.get(other.id)
        lost[0] += a is not None and a.status == DIVERGED
        lost[1] += b is not None and b.status == DIVERGED
        if a is not None and b is not None:
            x, y = a.score(made.metric), b.score(made.metric)
            if x is not None and y is not None:
                pairs.append((x, y))
    nan = math.nan
    sign = 1 if made.higher_is_better else -1
    differences = [sign * (x - y) for x, y in pairs]
    mean = statistics.fmean(differences) if pairs else nan
    enough = len(pairs) > 1
    spread = statistics.stdev(differences) if enough else nan
    half = stats.t.ppf(0.975, len(pairs) - 1) * spread / math.sqrt(len(pairs)) if enough else nan
    p = float(stats.ttest_1samp(differences, 0, alternative="greater").pvalue) if enough else nan
    verdict = "not shown"
    if enough and abs(mean) + half < made.equivalence:
        verdict = "equivalent"
    elif enough and min(p, 1 - p) < 0.01:
        verdict = "better" if mean > 0 else "worse"
    ours, theirs = [x for x, _ in pairs], [y for _, y in pairs]
    return Comparison(
        variant.name,
        base.name,
        variant.cell,
        len(pairs),
        statistics.fmean(ours) if pairs else nan,
        statistics.stdev(ours) if enough else nan,
        statistics.fmean(theirs) if pairs else nan,
        statistics.stdev(theirs) if enough else nan,
        mean,
        low=mean - half,
        high=mean + half,
        effect=mean / spread if enough else nan,
        p_better=p,
        p_worse=1 - p,
        p_difference=2 * min(p, 1 - p),
        p_difference_holm=min(8 * min(p, 1 - p), 1.0),
        p_sign_flip=p,
        p_equivalent=0.5,
        p_equivalent_holm=nan,
        verdict=verdict,
        more_seeds=12 if verdict == "not shown" and enough else None,
        diverged=lost[0],
        baseline_diverged=lost[1],
        epochs_to_baseline=7.0 if verdict == "better" else None,
        seconds_to_baseline=1.4 if verdict == "better" else None,
    )
