"""Of docs/which-normalizer.md how norms mind damaged test images."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from normkit.lab.experiment import Cell, Variant
from normkit.lab.statistics import Decision, decide
from normkit.lab.train.corruption import CORRUPTIONS
from tools.evidence.evidence import Evidence
from tools.evidence.schedule import AGAIN
from tools.evidence.words import Digits, where

DAMAGED = "p-damaged-images"
FEWEST = 2  # runs that have a mean
Measures = Mapping[int, Mapping[str, list[float]]]  # by seed, then by measure: as it is, each kind


def on_damaged_images(evidence: Evidence) -> Iterator[str]:
    """Accuracy on damaged test images, as trained and after adaptation."""
    kinds = list(CORRUPTIONS)
    yield "Test accuracy in percent: of the images as they are, of kinds of damage not seen in"
    yield "training, their mean, and their mean after adaptation to each kind, without labels:"
    yield "`nk.adapt(model, batches, prior=0, guard=False)`. Group norms have nothing to adapt."
    yield ""
    yield f"| | as they are | {' | '.join(kinds)} | mean | mean, adapted | n |"
    yield "|---|---:|" + "---:|" * (len(kinds) + 3)
    few = []
    whole: dict[Cell, dict[str, Measures]] = {}
    for variant in evidence.experiments[DAMAGED].variants:
        seeds = _measures(evidence, variant)
        label = f"{variant.name}, {where(variant.cell)}"
        if len(seeds) < FEWEST:
            few += [label]
            continue
        whole.setdefault(variant.cell, {})[variant.name] = seeds
        plain = [statistics.fmean(each) for each in zip(*_all(seeds, "corruption"), strict=True)]
        both = [_mean_damaged(seeds, each) for each in ("corruption", "corruption_adapted")]
        means = [*plain, *both]
        yield f"| {label} | " + " | ".join(f"{100 * v:.1f}" for v in means) + f" | {len(seeds)} |"
    if few:
        yield ""
        yield f"Left out for fewer than {FEWEST} runs: {'; '.join(few)}."
    for cell, norms in whole.items():
        if len(norms) == len({each.name for each in evidence.experiments[DAMAGED].variants}):
            yield ""
            yield from _best(norms, where(cell), evidence.experiments[DAMAGED].equivalence)
            yield ""
            yield from _contrast(norms, kinds)
    yield ""
    yield f"    {AGAIN} {DAMAGED}"


def _best(norms: Mapping[str, Measures], when: str, margin: float) -> Iterator[str]:
    """The one with the highest mean on damaged images as trained beside each of the others."""
    best = max(norms, key=lambda name: _mean_damaged(norms[name], "corruption"))
    others = [name for name in norms if name != best]
    yield f"Paired, {when}, {best} against the others, in points:"
    yield ""
    yield "| | damaged, mean | images as they are |"
    yield "|---|---|---|"
    columns = []
    for part in (slice(1, None), slice(1)):
        gaps = [_gaps(norms[best], norms[name], part) for name in others]
        columns.append([*zip(gaps, decide(gaps, margin), strict=True)])
    for name, *fields in zip(others, *columns, strict=True):
        yield f"| {name} | " + " | ".join(_compared(*each) for each in fields) + " |"


def _contrast(norms: Mapping[str, Measures], kinds: list[str]) -> Iterator[str]:
    """Of which kind is what xbn has above bn?"""
    gaps = {}
    for place, kind in enumerate(kinds, 1):
        paired = _gaps(norms["xbn"], norms["bn"], slice(place, place + 1))
        gaps[kind] = statistics.fmean(paired)
    most = max(gaps, key=lambda kind: gaps[kind])
    lead = sum(gaps.values())
    if lead > 0:
        yield f"Of what xbn has above bn, {gaps[most] / lead:.0%} is {most} alone."


def _compared(gaps: list[float], decided: Decision) -> str:
    numbers = (statistics.fmean(gaps), decided.low, decided.high)
    mean, low, high = map(Digits().signed, numbers)
    return f"{mean} ({low} to {high}), {decided.verdict}, n {len(gaps)}"


def _measures(evidence: Evidence, variant: Variant) -> Measures:
    experiment, results = evidence.experiments[DAMAGED], evidence.results[DAMAGED]
    runs = {run.seed: results.get(run.id) for run in variant.runs(experiment.seeds)}
    return {seed: run.epochs[-1].measures for seed, run in runs.items() if run and run.epochs}


def _all(seeds: Measures, measure: str) -> list[list[float]]:
    return [each[measure] for each in seeds.values()]


def _mean_damaged(seeds: Measures, measure: str) -> float:
    return statistics.fmean(statistics.fmean(each[1:]) for each in _all(seeds, measure))


def _gaps(ours: Measures, theirs: Measures, part: slice) -> list[float]:
    """Paired differences of accuracy, as trained, over this part of the kinds."""
    own, other = (
        {seed: statistics.fmean(each["corruption"][part]) for seed, each in side.items()}
        for side in (ours, theirs)
    )
    return [own[seed] - other[seed] for seed in own if seed in other]
