"""docs/evidence.md: claim by claim, what was found."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from normkit.lab.experiment import Experiment, Variant
from normkit.lab.results import Result
from normkit.lab.statistics import UNSTABLE
from tools.evidence.asides import SERIES, by_epoch, by_layer, first_steps, how_training_went
from tools.evidence.claims import ALL, Claim, experiment_of
from tools.evidence.judge import CONTRADICTED, LEFT, NOT_RUN, ClaimRow, all_seeds, judge, scores
from tools.evidence.provenance import provenance
from tools.evidence.results import RESULTS, read_results, read_sweeps
from tools.evidence.words import (
    MEASURES,
    POINTS,
    Digits,
    answer_in_words,
    pairs_in_words,
    place,
    where,
)

TEXT = """\
Each claim is an experiment of [experiments/claims](../experiments/claims): small networks and few
epochs, so a claim that does not hold here may hold at the papers' scale, and the other way round.
Seeds are paired, and a comparison has all seeds that were trained on both sides: where means of
one network differ from table to table, they are over different seeds, or of other runs ((k) and (p)
have their own). Answers come from the lab's verdicts ([how they are reached](verdicts.md)), with
5 % for all planned rows of a claim together, those not run yet included (Holm); claims are not
corrected together. How many seeds an experiment has was fixed before it was trained: a row with
fewer is a look in between, for which nothing is corrected. *holds*: the interval of the
difference excludes 0 on the side that the claim says; *contradicted*: on the other side; *does not
hold*: the difference is smaller than half a point, or is there where none should be; *not shown*:
too few seeds to tell, with the side on which the mean lies; *better, not shown whether slightly*
(or worse): a difference is shown, but not whether it is smaller than half a point; *unstable*: runs
were lost. That something is worse also holds where runs of it were lost and none of the other side
((o) at spread 4).

    NORMKIT_DATA=… python -m tools.evidence.train --out FOLDER    train, headline claims first
    cp FOLDER/*.json experiments/claims/results  what was committed is in these files too
    make evidence                                this page, from the committed results
    python -m tools.evidence --reports FOLDER [NAME …]    pages with charts, one an experiment

Those pages, of 5 MB each, are not committed. They compare all variants of an experiment with its
baseline, decided together: more strictly than here."""


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
        # experiments share runs, some have more seeds of them than others
        self.pool = {run: each for file in files for run, each in self.results[file].items()}
        self.rows = [judge(claim, self.pool) for claim in ALL]
        # who has less accuracy can lose less: of claims about lost accuracy, what is left
        self.left = [
            judge(dataclasses.replace(claim, measure=claim.measure + LEFT), self.pool)
            if claim.measure in POINTS
            else []
            for claim in ALL
        ]

    def pooled(self, file: str) -> Experiment:
        """An experiment with the seeds of the one that has most, as claims are judged."""
        return dataclasses.replace(self.experiments[file], seeds=all_seeds())

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
        """GPU and CPU seconds of an experiment's runs: their share of the time of their sweep.

        Runs train side by side, so their own seconds are longer than what they cost.
        """
        spent: dict[str, float] = {}
        for result in self.results[file].values():
            kind = device_kind(result.environment.get("device", ""))
            number = result.environment.get("sweep")
            sweep = self.sweeps[int(number)] if number and self.sweeps else {}
            share = sweep["seconds"] / sweep["run_seconds"] if sweep else 1.0
            spent[kind] = spent.get(kind, 0.0) + share * result.seconds
        return spent


def device_kind(device: str) -> str:
    return "CPU" if device.startswith("CPU") else "GPU"


def _lines(evidence: Evidence) -> Iterator[str]:
    yield "# Evidence: which claims of the five papers hold here"
    yield ""
    yield from _introduction(evidence)
    yield ""
    yield "![Every difference in accuracy with its interval](evidence.svg)"
    yield ""
    yield "| | claim | paper | n | differences | answer |"
    yield "|---|---|---|---:|---:|---|"
    for claim, rows, left in zip(ALL, evidence.rows, evidence.left, strict=True):
        yield _summary(claim, rows, left)
    told: set[str] = set()
    for letter in dict.fromkeys(claim.letter for claim in ALL):
        mine = [i for i, claim in enumerate(ALL) if claim.letter == letter]
        yield ""
        yield f"## ({letter})"
        for i in mine:
            yield ""
            yield from _section(evidence, i)
        for file in dict.fromkeys(ALL[i].file for i in mine if ALL[i].file not in told):
            yield from _file_lines(evidence, file)
            told.add(file)


def _introduction(evidence: Evidence) -> Iterator[str]:
    spent = [f"{evidence.total(kind):.0f} s of a {kind}" for kind in ("GPU", "CPU")]
    devices = sorted({each["device"] for each in evidence.sweeps})
    shared = sum(each["seconds"] for each in evidence.sweeps if each.get("beside"))
    yield (
        f"{evidence.runs()} of {evidence.planned()} planned runs, "
        f"{' and '.join(each for each in spent if not each.startswith('0 '))}"
        f"{f', {shared:.0f} s of them shared with other work' if shared else ''}"
        f"{' (' + '; '.join(devices) + ')' if devices else ''}. "
        "Experiments share runs: seconds of each are its runs' part of their sweep, and add up to "
        f"more. {provenance(evidence.rows, evidence.pool)}"
    )
    yield TEXT


def _summary(claim: Claim, rows: Sequence[ClaimRow], left: Sequence[ClaimRow]) -> str:
    ran = [row for row in rows if row.answer != NOT_RUN]
    digits = Digits(claim)
    gaps = ", ".join(digits.signed(row.difference) for row in ran)
    source = claim.source or experiment_of(claim.file).source
    words = f"**{answer_in_words(claim, rows)}**"
    if _ran(left):
        words += f"; of accuracy left: **{answer_in_words(claim, left)}**"
    return (
        f"| {claim.letter} | {claim.text} | {source} | {pairs_in_words(rows)} | {gaps} | {words} |"
    )


def _ran(rows: Sequence[ClaimRow]) -> bool:
    return any(row.answer != NOT_RUN for row in rows)


def _section(evidence: Evidence, i: int) -> Iterator[str]:
    claim, rows = ALL[i], evidence.rows[i]
    first = claim.text[0]
    yield f"**{first.upper() if first.isascii() else first}{claim.text[1:]}.**"
    if not _ran(rows):
        yield "Not run."
        return
    if claim.measure:
        yield f"Compared is a measure: {MEASURES[claim.measure]}."
    if claim.epoch:
        yield f"Compared is the test set after epoch {claim.epoch}."
    yield ""
    yield from _table(claim, rows)
    if left := evidence.left[i]:
        yield ""
        yield "The accuracy that is left, in percent: who has less can lose less."
        yield ""
        yield from _table(claim, left)
    if claim.measure in SERIES:
        yield ""
        yield from by_epoch(claim, rows, evidence.pool)
    if claim.measure.endswith("_trend"):
        yield ""
        yield from by_layer(claim, rows, evidence.pool)
    wrong = any(row.answer in (CONTRADICTED, UNSTABLE) for row in rows)
    if claim.note or claim.losses or wrong:
        yield ""
    if claim.losses or wrong:
        yield from how_training_went(claim, rows, evidence.pool)
    if claim.note:
        yield claim.note
    if claim.first_steps:
        yield ""
        yield from first_steps()


def _table(claim: Claim, rows: Sequence[ClaimRow]) -> Iterator[str]:
    """The rows that were run; and which were not."""
    yield "| where | compared | n | ours | with | difference | interval | verdict | the claim |"
    yield "|---|---|---:|---:|---:|---:|---:|---|---|"
    for row in rows:
        if row.answer != NOT_RUN:
            yield _row(claim, row)
    places = [place(claim, row) for row in rows if row.answer == NOT_RUN]
    if places:
        yield ""
        many = f"{len(places)} of {len(rows)} rows"
        yield f"Not run: {'; '.join(places) if len(places) < 4 else many}."


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
        f"| {verdict} | {row.said} |"
    )


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
    yield from _score_table(evidence.pooled(file), evidence.pool)


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
        if any(fields):
            yield f"| {where(cell)} | " + " | ".join(fields) + " |"


def _score(
    experiment: Experiment, variant: Variant, results: Mapping[str, Result], digits: Digits
) -> str:
    values, lost = scores(experiment, variant, results)
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    text = digits.spread(statistics.fmean(values), std) if values else ""
    return f"{text} ({lost} of {lost + len(values)} lost)".strip() if lost else text
