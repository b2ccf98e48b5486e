"""Of docs/which-normalizer.md what the schedule does: with warm-up and without."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from normkit.lab.experiment import Cell, Variant
from normkit.lab.results import DONE
from normkit.lab.statistics import Decision, decide
from tools.evidence.claims import ALL
from tools.evidence.evidence import Evidence
from tools.evidence.judge import NOT_RUN, ClaimRow, scores
from tools.evidence.words import WARM, Digits

FILE = "m-worker-batch"
LARGE = "l-resnet18"
SCHEDULES = ("g-ubn", "l-ws-bcn", "a-small-start-scale", "a-resnet18", LARGE)
AGAIN = "python -m tools.evidence.train --results EMPTY --out FOLDER"
NOTHING = "Not measured yet: `python -m tools.evidence.train --out FOLDER {}`."
WORKER = "train.worker_batch"
GAINS = "With against without warm-up"
SMALL, RESNET18, BOTTLENECKS = "ResNet-20", "ResNet-18", "ResNet-29 of bottlenecks"
# networks by experiment
GAINS_IN = {
    FILE: SMALL,
    "l-ws-bcn": SMALL,
    "g-ubn": SMALL,
    "g-rectifications": SMALL,
    "a-small-start-scale": SMALL,
    LARGE: RESNET18,
    "a-resnet18": RESNET18,
    "j-xbn-positions": BOTTLENECKS,
}
OWN_WAY = {"a-small-start-scale": " (a)", "a-resnet18": " (a)"}  # decay and input as in that paper
LABELS = {"bn + affine": "bnet", "bn + normalization": "rbn"}
MICRO = "bcn + ws, micro"  # what bcn + ws is below 128 images a worker


def _lost(evidence: Evidence) -> Iterator[str]:
    """Of the large network, how many runs of each norm were lost, by schedule, if any."""
    experiment = evidence.pooled(LARGE)
    for name in dict.fromkeys(variant.name for variant in experiment.variants):
        told = {}
        for variant in (each for each in experiment.variants if each.name == name):
            values, lost = scores(experiment, variant, evidence.pool)
            if values or lost:
                told[dict(variant.cell)[WARM]] = (lost, lost + len(values))
        if any(lost for lost, _ in told.values()):
            words = {0: "without warm-up", 1: "with an epoch of it"}
            yield f"of {name} " + ", ".join(
                f"{lost} of {many} {words[warm]}" for warm, (lost, many) in sorted(told.items())
            )


def by_schedule(evidence: Evidence) -> Iterator[str]:
    """Differences in accuracy with and without warm-up, as the claims are judged."""
    lines: dict[str, dict[object, ClaimRow]] = {}
    for claim, rows in zip(ALL, evidence.rows, strict=True):
        if claim.file not in SCHEDULES or claim.measure or claim.epoch:
            continue
        for row in rows:
            if row.answer != NOT_RUN:
                network = ", ResNet-18, 8 epochs" if claim.file.endswith("resnet18") else ""
                pair = f"{row.variant} against {row.baseline}{network}"
                lines.setdefault(pair, {})[dict(row.cell)[WARM]] = row
    if not lines:
        yield NOTHING.format(" ".join(SCHEDULES))
        return
    yield "CIFAR-10 with a cosine, learning rate 0.1, a ResNet-20 in 5 epochs unless it says so."
    yield "Test accuracy in percent, the difference in points, the lab's verdict and the number of"
    yield "paired seeds."
    yield ""
    yield "| | without warm-up | an epoch of warm-up |"
    yield "|---|---|---|"
    for pair, cells in lines.items():
        fields = [_compared(cells.get(warm)) for warm in (0, 1)]
        yield f"| {pair} | " + " | ".join(fields) + " |"
    yield ""
    yield f"    {AGAIN} {' '.join(SCHEDULES)}"


def _compared(row: ClaimRow | None) -> str:
    if row is None:
        return "–"
    digits = Digits()
    means = [digits.spread(mean, math.nan) for mean in (row.mean, row.baseline_mean)]
    gap = digits.signed(row.difference)
    lost = ((row.lost, row.variant), (row.baseline_lost, row.baseline))
    told = "".join(f", {many} lost of {name}" for many, name in lost if many)
    return f"{means[0]} against {means[1]}, {gap}, {row.verdict}{told}, n {row.pairs}"


@dataclass(frozen=True)
class Gain:
    """What an epoch of warm-up changed, on paired seeds."""

    norm: str
    network: str
    gaps: tuple[float, ...]
    lost: tuple[tuple[int, int], ...]  # runs, without warm-up and with; of how many


def warmup_gains(evidence: Evidence) -> list[Gain]:
    """Of each norm in each network that was trained both ways; shared runs once."""
    found: dict[tuple[str, str], Gain] = {}
    seen: set[frozenset[str]] = set()
    for file, network in GAINS_IN.items():
        experiment = evidence.pooled(file)
        for variant in experiment.variants:
            cell = dict(variant.cell)
            if cell[WARM] != 1:
                continue
            cold = experiment.variant(variant.name, _without_warmup(variant))
            runs = [
                {run.seed: evidence.pool[run.id] for run in each.runs(experiment.seeds)
                 if run.id in evidence.pool}
                for each in (cold, variant)
            ]  # fmt: skip
            ids = frozenset(result.run for each in runs for result in each.values())
            if ids in seen or not all(runs):
                continue
            seen.add(ids)
            kept = [
                {seed: r.score(experiment.metric) or 0.0 for seed, r in each.items()
                 if r.outcome(experiment.metric) == DONE}
                for each in runs
            ]  # fmt: skip
            gaps = tuple(kept[1][seed] - kept[0][seed] for seed in kept[1] if seed in kept[0])
            lost = tuple((len(a) - len(b), len(a)) for a, b in zip(runs, kept, strict=True))
            norm = _name(file, variant)
            found[norm, network] = Gain(norm, network, gaps, lost)
    return list(found.values())


def _without_warmup(variant: Variant) -> Cell:
    return tuple((key, 0.0 if key == WARM else value) for key, value in variant.cell)


def _name(file: str, variant: Variant) -> str:
    size = dict(variant.cell).get(WORKER, 128)
    if variant.name == "bcn + ws" and size != 128:
        return MICRO
    name = LABELS.get(variant.name, variant.name) + OWN_WAY.get(file, "")
    return f"{name}, {size:g} a worker" if size != 128 else name


def decided_gains(gains: list[Gain]) -> list[Decision]:
    """Each by itself: a picture of all norms, not a test; lost runs decide nothing."""
    stable = [not any(lost for lost, _ in gain.lost) for gain in gains]
    return decide([gain.gaps for gain in gains], 0.005, corrected=False, stable=stable)


def gains_of_warmup(evidence: Evidence) -> Iterator[str]:
    """A table of norms by networks."""
    gains = warmup_gains(evidence)
    fields = {
        (gain.norm, gain.network): _gain(gain, decision)
        for gain, decision in zip(gains, decided_gains(gains), strict=True)
    }
    networks = list(dict.fromkeys(gain.network for gain in gains))
    epochs = {
        network: evidence.experiments[file].variants[0].setting.train.epochs
        for file, network in GAINS_IN.items()
    }
    by_chance = round(0.05 * len(gains))
    yield "What an epoch of warm-up changes, in points of test accuracy: the paired difference, its"
    yield "95 % interval, the verdict and the number of pairs. Each is decided by itself, not"
    yield f"together as elsewhere: of {len(gains)} without effect {by_chance} would look shown."
    yield "128 images share statistics unless it says so; (a) trains as the paper on γ does, with"
    yield "decay on weights alone and images that a norm centres."
    yield ""
    yield "| | " + " | ".join(f"{each}, {epochs[each]} epochs" for each in networks) + " |"
    yield "|---|" + "---|" * len(networks)
    for norm in dict.fromkeys(gain.norm for gain in gains):
        own = (fields.get((norm, network), "–") for network in networks)
        yield f"| {norm} | " + " | ".join(own) + " |"


def _gain(gain: Gain, decision: Decision) -> str:
    words = {0: "without", 1: "with"}
    lost = [
        f"{lost} of {many} lost {words[warm]}"
        for warm, (lost, many) in enumerate(gain.lost)
        if lost
    ]
    if lost:  # those that are left say little
        return ", ".join(lost)
    if len(gain.gaps) < 2:
        return "–"
    mean, low, high = map(
        Digits().signed, (statistics.fmean(gain.gaps), decision.low, decision.high)
    )
    return f"{mean} ({low} to {high}), {decision.verdict}, n {len(gain.gaps)}"


def advice_on_warmup(evidence: Evidence) -> Iterator[str]:
    """What was lost without it, and what plain batch norm gains by it, most first."""
    lost = "; ".join(_lost(evidence))
    gains = warmup_gains(evidence)
    plain = [
        (gain, decision)
        for gain, decision in zip(gains, decided_gains(gains), strict=True)
        if gain.norm == "bn" and len(gain.gaps) > 1
    ]
    plain.sort(key=lambda each: -statistics.fmean(each[0].gaps))
    told = "; ".join(f"in a {gain.network} {_gain(gain, decision)}" for gain, decision in plain)
    if lost:
        yield "**Warm the learning rate up.** From the first step at 0.1 runs of a ResNet-18 were"
        yield f"lost ([evidence.md](evidence.md#l), l): {lost}."
    if told:
        yield f"What an epoch of it is worth to plain batch norm, in points: {told}"
        yield f"([all norms](#{GAINS.lower().replace(' ', '-')}))."
