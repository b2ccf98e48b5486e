"""What stands beside the table of a claim: losses, lost runs, measures by epoch and by layer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from normkit.lab.experiment import Experiment, Variant
from normkit.lab.results import DONE, Result
from tools.evidence.claims import Claim
from tools.evidence.collapse import rows as collapse_rows
from tools.evidence.judge import NOT_RUN, ClaimRow, claim_experiment
from tools.evidence.words import where

SERIES = ("condensation",)  # one number an epoch, shown epoch by epoch


def losses_of_pairs(claim: Claim, row: ClaimRow, results: Mapping[str, Result]) -> str:
    """Did it train more slowly, or as well? Of the pairs that were compared; "": not known."""
    pair = [losses(runs) for runs in _pairs(claim, row, results)]
    return "; ".join(pair) if all(pair) else ""


def training_accuracies(claim: Claim, row: ClaimRow, results: Mapping[str, Result]) -> str:
    """Of the last epoch, in percent: is what is lost lost in training, or on test images?"""
    shown = []
    for runs in _pairs(claim, row, results):
        found = [each for run in runs if (each := run.epochs[-1].train_accuracy) is not None]
        shown += [f"{100 * statistics.fmean(found):.1f}"] if found else []
    return "; ".join(shown) if len(shown) == len(("ours", "theirs")) else ""


def lost_runs(claim: Claim, rows: Sequence[ClaimRow], results: Mapping[str, Result]) -> str:
    """Which runs were lost, and how; "" if none was."""
    if not any(row.lost or row.baseline_lost for row in rows):
        return ""
    return f"Lost: {'; '.join(_lost_runs(claim_experiment(claim), results))}."


def _pairs(
    claim: Claim, row: ClaimRow, results: Mapping[str, Result]
) -> tuple[list[Result], list[Result]]:
    """The runs of both sides that were compared; none where nothing was."""
    if row.answer == NOT_RUN or claim.measure.endswith("_trend"):
        return [], []
    experiment = claim_experiment(claim)
    ours, theirs = (
        _finished(experiment.variant(name, row.cell), experiment, results)
        for name in (row.variant, row.baseline)
    )
    both = [seed for seed in ours if seed in theirs]
    return [ours[seed] for seed in both], [theirs[seed] for seed in both]


def _finished(
    variant: Variant, experiment: Experiment, results: Mapping[str, Result]
) -> dict[int, Result]:
    """By seed, the runs that were not lost."""
    found = {
        run.seed: results[run.id] for run in variant.runs(experiment.seeds) if run.id in results
    }
    return {s: each for s, each in found.items() if each.outcome(experiment.metric) == DONE}


def losses(runs: Sequence[Result]) -> str:
    """Mean training losses, of the first epoch and the last; "" where none is known."""
    known = [[e.train_loss for e in run.epochs if e.train_loss is not None] for run in runs]
    ends = [(each[0], each[-1]) for each in known if each]
    means = [statistics.fmean(each) for each in zip(*ends, strict=True)]
    return " to ".join(f"{each:.3f}" if each < 1000 else f"{each:.1e}" for each in means)


def _lost_runs(experiment: Experiment, results: Mapping[str, Result]) -> Iterator[str]:
    """Of each variant and outcome the seeds, and the losses of these runs."""
    for variant in experiment.variants:
        lost: dict[str, dict[int, Result]] = {}
        for run in variant.runs(experiment.seeds):
            outcome = results[run.id].outcome(experiment.metric) if run.id in results else DONE
            if outcome != DONE:
                lost.setdefault(outcome, {})[run.seed] = results[run.id]
        for outcome, runs in lost.items():
            seeds = f"seed{'s' * (len(runs) > 1)} {', '.join(map(str, runs))}"
            known = losses(list(runs.values()))
            loss = f", training loss {known}" if known else ""
            yield f"{variant.name}, {where(variant.cell)}, {seeds}: {outcome}{loss}"


def by_epoch(
    claim: Claim, rows: Sequence[ClaimRow], results: Mapping[str, Result]
) -> Iterator[str]:
    """A measure of both sides, epoch by epoch, of the pairs that were compared."""
    for row in (row for row in rows if row.answer != NOT_RUN):
        ours, theirs = (_epoch_means(claim.measure, each) for each in _pairs(claim, row, results))
        yield (
            f"By epoch, from before the first on, {where(row.cell)}: {row.variant} {ours}; "
            f"{row.baseline} {theirs}."
        )


def _epoch_means(measure: str, runs: Sequence[Result]) -> str:
    """Means of a measure over the seeds."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for epoch in run.epochs:
            if (value := epoch.measures.get(measure)) is not None:
                values.setdefault(epoch.epoch, []).append(value)
    return ", ".join(f"{statistics.fmean(each):.3f}" for _, each in sorted(values.items()))


def by_layer(
    claim: Claim, rows: Sequence[ClaimRow], results: Mapping[str, Result]
) -> Iterator[str]:
    """Means over the seeds, from the first layer to the last."""
    experiment = claim_experiment(claim)
    measure = claim.measure.removesuffix("_trend")
    for row in rows:
        runs = experiment.variant(row.variant, row.cell).runs(experiment.seeds)
        found = [results[run.id].epochs[-1].measures for run in runs if run.id in results]
        layers = zip(*(each[measure] for each in found if each.get(measure)), strict=True)
        means = ", ".join(f"{statistics.fmean(each):.2g}" for each in layers)
        yield f"By layer, {where(row.cell)}: {means}."


def first_steps(claim: Claim) -> Iterator[str]:
    """Of collapse.py: the same steps by the library's layers and by plain torch."""
    found = [row for row in collapse_rows() if row["of"] == claim.file]
    if not found:
        return
    longest = max(len(row["losses"]) for row in found)
    ends = " | ".join(f"to {10 * (i + 1)}" for i in range(longest))
    yield "Mean training loss in float32, by steps (`python -m tools.evidence.collapse`). The shape"
    yield "counts: values depend on rounding, and so on the device. " + _origin(found)
    yield ""
    yield f"| variant | warm-up | seed | by | {ends} |"
    yield "|---|---|---:|---|" + longest * "---:|"
    for row in found:
        warmup = f"{row['warmup']} steps" if row["warmup"] else "no"
        by = {"layers": "these layers", "torch": "plain torch"}[row["by"]]
        losses = [f"{loss:.2f}" for loss in row["losses"]]
        losses += ["–"] * (longest - len(losses))
        own = " | ".join(losses)
        yield f"| {row['variant']} | {warmup} | {row['seed']} | {by} | {own} |"


def _origin(found: Sequence[Mapping[str, Any]]) -> str:
    """On what rows were measured, and how long it took: it is no part of the total."""
    known = [row for row in found if "environment" in row]
    spent: dict[str, float] = {}
    for row in known:
        place = f"{row['environment']['device']}, torch {row['environment']['torch']}"
        spent[place] = spent.get(place, 0.0) + row["seconds"]
    told = [f"{seconds:.0f} s on {device}" for device, seconds in spent.items()]
    if unknown := len(found) - len(known):
        of = "" if unknown == len(found) else f" of {unknown} rows"
        told += [f"device and seconds{of} were not recorded"]
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}; none of it is in the total above."
