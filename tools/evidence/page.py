"""docs/evidence.md: claim by claim, what was found."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from normkit.lab.experiment import Cell, Experiment, Variant
from normkit.lab.report.words import cell_words
from normkit.lab.results import DONE, Result
from normkit.lab.statistics import UNSTABLE
from tools.evidence.claims import ALL, Claim, experiment_of
from tools.evidence.judge import (
    CONTRADICTED,
    NOT_RUN,
    ClaimRow,
    claim_experiment,
    judge,
    measured,
    scores,
)
from tools.evidence.results import RESULTS, read_results, read_sweeps

# measures in words, and how many digits they have
MEASURES = {
    "condensation": "mean cosine between images, over the epochs",
    "stat_diff": "StatDiff, mean over layers and epochs",
    "esm_std": "ESM of the deviations, mean over batch norms",
    "disturbance": "accuracy lost with errors up to 0.5, points",
    "corruption": "accuracy lost on damaged images, points",
    "corruption_adapted": "accuracy lost on damaged images after adaptation, points",
}
SERIES = ("condensation",)  # one number an epoch, shown epoch by epoch
POINTS = ("disturbance", "corruption", "corruption_adapted")  # measures that are shares
TEXT = """\
Each claim is an experiment of [experiments/claims](../experiments/claims): small networks and few
epochs, so a claim that does not hold here may hold at the papers' scale, and the other way round.
Seeds are paired. Answers come from the lab's verdicts ([how they are reached](verdicts.md)), with
5 % for all rows of a claim together, those not run yet included. *holds*: the interval of the
difference excludes 0 on the side that the paper says; *contradicted*: on the other side; *does not
hold*: the difference is smaller than half a point, or is there where none should be; *not shown*:
too few seeds to tell; *unstable*: runs were lost.

    NORMKIT_DATA=… python -m tools.evidence.train --out FOLDER    train, headline claims first
    make evidence                                this page, from the committed results
    python -m tools.evidence --reports FOLDER    pages with charts, one an experiment"""


def evidence_page(folder: Path = RESULTS) -> str:
    return "\n".join(_lines(Evidence(folder))) + "\n"


class Evidence:
    """The committed results, and the rows of every claim."""

    def __init__(self, folder: Path = RESULTS) -> None:
        files = dict.fromkeys(claim.file for claim in ALL if claim.file)
        self.experiments = {file: experiment_of(file) for file in files}
        self.results = {
            file: read_results(experiment, folder) for file, experiment in self.experiments.items()
        }
        self.sweeps = read_sweeps(folder)
        self.rows = [judge(claim, self.results[claim.file]) if claim.file else [] for claim in ALL]

    def runs(self) -> int:
        """How many were trained; experiments share some."""
        return len({run for results in self.results.values() for run in results})

    def planned(self) -> int:
        runs = (experiment.runs() for experiment in self.experiments.values())
        return len({run.id for each in runs for run in each})

    def total(self, kind: str) -> float:
        """Seconds of all sweeps on a GPU or on a CPU."""
        return sum(each["seconds"] for each in self.sweeps if device_kind(each["device"]) == kind)

    def seconds(self, file: str) -> dict[str, float]:
        """GPU and CPU seconds of an experiment's runs: its share of the time of the sweeps.

        Runs train side by side, so their own seconds are longer than what they cost.
        """
        spent: dict[str, float] = {}
        for result in self.results[file].values():
            kind = device_kind(result.environment.get("device", ""))
            busy = sum(
                each["run_seconds"] for each in self.sweeps if device_kind(each["device"]) == kind
            )
            share = self.total(kind) / busy if busy else 1.0
            spent[kind] = spent.get(kind, 0.0) + share * result.seconds
        return spent


def where(cell: Cell) -> str:
    """A point of the grid in words."""
    warm = {0: "no warm-up", 1: "warm-up"}
    words = [warm.get(value, "") for key, value in cell if key == "train.warmup"]
    rest = cell_words(tuple((key, value) for key, value in cell if key != "train.warmup"))
    return ", ".join(filter(None, [*words, rest])) or "everywhere"


def device_kind(device: str) -> str:
    return "CPU" if device.startswith("CPU") else "GPU"


def _lines(evidence: Evidence) -> Iterator[str]:
    yield "# Evidence: which claims of the five papers hold here"
    yield ""
    yield from _introduction(evidence)
    yield ""
    yield "| | claim | paper | n | answers |"
    yield "|---|---|---|---:|---|"
    for claim, rows in zip(ALL, evidence.rows, strict=True):
        yield _summary(claim, rows)
    yield ""
    yield from _in_short(evidence)
    for letter in dict.fromkeys(claim.letter for claim in ALL):
        mine = [i for i, claim in enumerate(ALL) if claim.letter == letter]
        yield ""
        yield f"## ({letter})"
        for i in mine:
            yield ""
            yield from _section(evidence, ALL[i], evidence.rows[i])
        for file in dict.fromkeys(ALL[i].file for i in mine if ALL[i].file):
            yield from _file_lines(evidence, file)


def _introduction(evidence: Evidence) -> Iterator[str]:
    spent = [f"{evidence.total(kind):.0f} s of a {kind}" for kind in ("GPU", "CPU")]
    devices = sorted({each["device"] for each in evidence.sweeps})
    shared = sum(each["seconds"] for each in evidence.sweeps if each.get("beside"))
    yield (
        f"{evidence.runs()} of {evidence.planned()} planned runs, "
        f"{' and '.join(each for each in spent if not each.startswith('0 '))}"
        f"{f', {shared:.0f} s of them shared with other work' if shared else ''}"
        f"{' (' + '; '.join(devices) + ')' if devices else ''}."
    )
    yield TEXT


def _summary(claim: Claim, rows: Sequence[ClaimRow]) -> str:
    ran = [row for row in rows if row.answer != NOT_RUN]
    n = max((row.pairs for row in ran), default=0)
    said = Counter(row.answer for row in rows)
    words = ", ".join(
        answer if len(rows) == many else f"{answer} {many} of {len(rows)}"
        for answer, many in said.items()
    )
    source = claim.source or experiment_of(claim.file).source
    return f"| {claim.letter} | {claim.text} | {source} | {n or ''} | {words or NOT_RUN} |"


def _in_short(evidence: Evidence) -> Iterator[str]:
    """The answers in sentences, of the claims that were run."""
    yield "## In short"
    for claim, rows in zip(ALL, evidence.rows, strict=True):
        ran = [row for row in rows if row.answer != NOT_RUN]
        if not ran:
            continue
        text = "; ".join(
            f"{_place(claim, row)}: **{row.answer}** ({_gap(claim, row)})" for row in ran
        )
        rest = f"; {len(rows) - len(ran)} of {len(rows)} not run" if len(ran) < len(rows) else ""
        yield f"- ({claim.letter}) {claim.text}: {text}{rest}."
    without = [claim for claim, rows in zip(ALL, evidence.rows, strict=True) if not _ran(rows)]
    if without:
        letters = ", ".join(dict.fromkeys(f"({claim.letter})" for claim in without))
        yield f"- Not run: {len(without)} of {len(ALL)} claims, of {letters}."


def _ran(rows: Sequence[ClaimRow]) -> bool:
    return any(row.answer != NOT_RUN for row in rows)


def _place(claim: Claim, row: ClaimRow) -> str:
    return f"{row.variant}, {where(row.cell)}" if len(claim.expected) > 1 else where(row.cell)


def _gap(claim: Claim, row: ClaimRow) -> str:
    digits = Digits(claim)
    if not row.pairs:
        return f"lost {row.lost} runs, and {row.baseline_lost} of {row.baseline}"
    ours, theirs = (digits.spread(mean, math.nan) for mean in (row.mean, row.baseline_mean))
    return f"{ours} against {theirs}, n {row.pairs}"


def _section(evidence: Evidence, claim: Claim, rows: Sequence[ClaimRow]) -> Iterator[str]:
    first = claim.text[0]
    yield f"**{first.upper() if first.isascii() else first}{claim.text[1:]}.**"
    if not _ran(rows):
        yield "Not run."
        return
    if claim.measure:
        yield f"Compared is a measure: {MEASURES[claim.measure]}; less is better."
    if claim.epoch:
        yield f"Compared is the test set after epoch {claim.epoch}."
    yield ""
    yield "| where | compared | n | ours | with | difference | interval | verdict | the claim |"
    yield "|---|---|---:|---:|---:|---:|---:|---|---|"
    for row in rows:
        yield _row(claim, row)
    if claim.measure in POINTS:
        yield ""
        yield from _left(evidence, claim, rows)
    if claim.measure in SERIES:
        yield ""
        yield from _series(evidence, claim, rows)
    if any(row.answer in (CONTRADICTED, UNSTABLE) for row in rows):
        yield ""
        yield from _why(evidence, claim, rows)
    elif claim.note:
        yield ""
        yield claim.note


def _left(evidence: Evidence, claim: Claim, rows: Sequence[ClaimRow]) -> Iterator[str]:
    """The accuracy that remains: who has less can lose less."""
    experiment, results = claim_experiment(claim), evidence.results[claim.file]
    told = []
    for row in rows:
        means = []
        for name in (row.variant, row.baseline):
            variant = experiment.variant(name, row.cell)
            runs = [results[run.id] for run in variant.runs(experiment.seeds) if run.id in results]
            lost = [(run, measured(run, claim.measure)) for run in runs]
            left = [(run.score(experiment.metric) or 0.0) - x for run, x in lost if x is not None]
            means.append(f"{100 * statistics.fmean(left):.2f}" if left else "–")
        if "–" not in means:
            told.append(f"{means[0]} against {means[1]} ({_place(claim, row)})")
    if told:
        yield f"Accuracy that is left, in percent: {', '.join(told)}."


def _why(evidence: Evidence, claim: Claim, rows: Sequence[ClaimRow]) -> Iterator[str]:
    """What training was like where a claim is contradicted: slower, unstable, or as good?"""
    experiment, results = claim_experiment(claim), evidence.results[claim.file]
    told = []
    for row in rows:
        ours, theirs = (
            _last_loss(experiment.variant(name, row.cell), experiment, results)
            for name in (row.variant, row.baseline)
        )
        if not math.isnan(ours + theirs):
            told.append(f"{ours:.3f} against {theirs:.3f} ({_place(claim, row)})")
    lost = sum(row.lost + row.baseline_lost for row in rows)
    if told:
        yield f"Training loss of the last epoch: {', '.join(told)}; runs lost: {lost}."
    if lost:
        yield f"Lost: {'; '.join(_lost_runs(experiment, results))}."
    if claim.note:
        yield claim.note


def _series(evidence: Evidence, claim: Claim, rows: Sequence[ClaimRow]) -> Iterator[str]:
    experiment, results = claim_experiment(claim), evidence.results[claim.file]
    for row in (row for row in rows if row.answer != NOT_RUN):
        ours, theirs = (
            _by_epoch(claim.measure, experiment.variant(name, row.cell), experiment, results)
            for name in (row.variant, row.baseline)
        )
        yield (
            f"By epoch, from before the first on, {where(row.cell)}: {row.variant} {ours}; "
            f"{row.baseline} {theirs}."
        )


def _lost_runs(experiment: Experiment, results: Mapping[str, Result]) -> Iterator[str]:
    for variant in experiment.variants:
        for run in variant.runs(experiment.seeds):
            outcome = results[run.id].outcome(experiment.metric) if run.id in results else DONE
            if outcome != DONE:
                yield f"{variant.name}, {where(variant.cell)}, seed {run.seed}: {outcome}"


def _by_epoch(
    measure: str, variant: Variant, experiment: Experiment, results: Mapping[str, Result]
) -> str:
    """Means of a measure over the seeds, epoch by epoch."""
    values: dict[int, list[float]] = {}
    for run in variant.runs(experiment.seeds):
        for epoch in results[run.id].epochs if run.id in results else ():
            if (value := epoch.measures.get(measure)) is not None:
                values.setdefault(epoch.epoch, []).append(value)
    return ", ".join(f"{statistics.fmean(each):.3f}" for _, each in sorted(values.items()))


def _last_loss(variant: Variant, experiment: Experiment, results: Mapping[str, Result]) -> float:
    runs = [results[run.id] for run in variant.runs(experiment.seeds) if run.id in results]
    losses = [run.epochs[-1].train_loss for run in runs if run.epochs]
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if known else math.nan


def _row(claim: Claim, row: ClaimRow) -> str:
    digits = Digits(claim)
    lost = ""
    if row.lost or row.baseline_lost:
        lost = f" ({row.lost} lost, {row.baseline_lost} of {row.baseline})"
    interval = f"{digits.signed(row.low)} to {digits.signed(row.high)}"
    verdict = "–" if row.answer == NOT_RUN else f"{row.verdict}{lost}"
    return (
        f"| {where(row.cell)} | {row.variant} against {row.baseline} "
        f"| {row.pairs} | {digits.spread(row.mean, row.std)} "
        f"| {digits.spread(row.baseline_mean, row.baseline_std)} "
        f"| {digits.signed(row.difference)} "
        f"| {'–' if math.isnan(row.low) else interval} "
        f"| {verdict} | {row.answer} |"
    )


class Digits:
    """How the numbers of a claim are written: shares in percent, measures as they are."""

    def __init__(self, claim: Claim | None = None) -> None:
        plain = claim is not None and claim.measure and claim.measure not in POINTS
        self.factor, self.places = (1.0, 3) if plain else (100.0, 2)

    def spread(self, mean: float, std: float) -> str:
        if math.isnan(mean):
            return "–"
        first = f"{self.factor * mean:.{self.places}f}"
        return first if math.isnan(std) else f"{first} ± {self.factor * std:.{self.places}f}"

    def signed(self, value: float) -> str:
        return "–" if math.isnan(value) else f"{self.factor * value:+.{self.places}f}"


def _file_lines(evidence: Evidence, file: str) -> Iterator[str]:
    """Protocol, cost and all scores of an experiment."""
    experiment, results = evidence.experiments[file], evidence.results[file]
    yield ""
    yield f"*[{file}](../experiments/claims/{file}.toml)*, {experiment.source}."
    yield _protocol(experiment)
    if not results:
        yield f"Not run: {len(experiment.runs())} runs."
        return
    spent = evidence.seconds(file)
    cost = " and ".join(f"{seconds:.0f} s of a {kind}" for kind, seconds in sorted(spent.items()))
    yield f"{len(results)} of {len(experiment.runs())} runs, {cost}."
    yield ""
    yield from _score_table(experiment, results)


def _protocol(experiment: Experiment) -> str:
    return experiment.difference.replace("\n", " ")


def _score_table(experiment: Experiment, results: Mapping[str, Result]) -> Iterator[str]:
    cells = experiment.cells()
    names = list(dict.fromkeys(variant.name for variant in experiment.variants))
    yield f"| test {experiment.metric} (%) | " + " | ".join(names) + " |"
    yield "|---|" + "---:|" * len(names)
    digits = Digits()
    for cell in cells:
        fields = []
        for name in names:
            here = [v for v in experiment.variants if (v.name, v.cell) == (name, cell)]
            fields.append(_score(experiment, here[0], results, digits) if here else "")
        yield f"| {where(cell)} | " + " | ".join(fields) + " |"


def _score(
    experiment: Experiment, variant: Variant, results: Mapping[str, Result], digits: Digits
) -> str:
    values, lost = scores(experiment, variant, results)
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    text = digits.spread(statistics.fmean(values), std) if values else ""
    return f"{text} ({lost} of {lost + len(values)} lost)".strip() if lost else text
