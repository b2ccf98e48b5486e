"""docs/evidence.md: claim by claim, what was found."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from normkit.lab.experiment import Experiment, Variant
from normkit.lab.results import Result
from normkit.lab.statistics import UNSTABLE
from tools.evidence.asides import (
    SERIES,
    by_epoch,
    by_layer,
    first_steps,
    losses_of_pairs,
    lost_runs,
    training_accuracies,
)
from tools.evidence.claims import ALL, OUR_OWN, Claim, experiment_of
from tools.evidence.evidence import Evidence
from tools.evidence.judge import (
    CONTRADICTED,
    NOT_RUN,
    ClaimRow,
    scores,
)
from tools.evidence.minute import in_a_minute
from tools.evidence.missing import missing_stages
from tools.evidence.provenance import provenance
from tools.evidence.results import RESULTS
from tools.evidence.words import (
    MEASURES,
    Digits,
    answer_in_words,
    differences_in_words,
    not_run_in_words,
    pairs_in_words,
    where,
)

INTRODUCTION = """\
Small networks and few epochs, on real data and with paired seeds: mostly a ResNet-20 on CIFAR-10 in
five epochs, on one GPU. What is contradicted here may hold at the papers' scale, and the other way
round. With and without an epoch of warm-up, where there is a schedule."""
TEXT = """\
Each row of a claim compares two networks over the seeds that were trained of both.

- *holds*: the interval of the difference excludes 0 on the side that the claim says
- *contradicted*: on the other side
- *does not hold*: the difference is smaller than half a point, or is there where none should be
- *not shown*: too few seeds to tell; the mean *leans towards* what the claim says or *against* it
- *not shown, no difference found*: the claim is that there is none, and none was found, but the
  seeds do not exclude one of half a point either
- *better, not shown whether slightly* (or worse): a difference is shown, but not whether it is
  smaller than half a point
- *unstable*: runs diverged or collapsed. That something is worse also holds where runs of it were
  lost and none of the other side ((o) at spread 4)

Training losses and accuracies are means over an epoch while the network trains, on images that are
flipped and cropped.

Answers are the lab's verdicts ([what they promise](verdicts.md)): two-sided paired t-tests, with
5 % for all planned rows of a claim together, those not run yet included (Holm); intervals are as
wide as that takes. Claims are not corrected together. How many seeds an experiment has was fixed
before it was trained: a row with fewer is a look in between, for which nothing is corrected. Where
means of one network differ from table to table, they are over different seeds, or of other runs
((k) and (p) have their own)."""
COMMANDS = """\
    python -m tools.evidence.train --plan        what is missing, and about how long it takes
    NORMKIT_DATA=… python -m tools.evidence.train --out FOLDER    train it, into one small file
    python -m tools.evidence --take FOLDER/runs.jsonl    into experiments/claims/results; pages
    make evidence                                this page, from the committed results
    python -m tools.evidence --reports FOLDER [NAME …]    pages with charts, one an experiment

Reports, of 5 MB each, are not committed. They compare all variants of an experiment with its
baseline, decided together: more strictly than here."""
NOT_PLANNED = """\
No experiment is planned for: CIFAR-100 as a second data set for (a), (g) and (l); batches of 64 and
256 in (g); 64, 32, 16 and 4 images a worker in (m); 256 and 1,024 images in (i); LN in (n)."""
TOPICS = {
    "a": "Small start scales at a learning rate of 0.1",
    "b": "Small start scales at a learning rate of 0.01",
    "c": "Small start scales alone, slow scales alone",
    "d": "A batch norm in place of input normalization",
    "e": "Other forms of the scale",
    "f": "RBN and IEBN with and without the sample's statistics",
    "g": "UBN",
    "h": "Condensed features",
    "i": "Estimation shift",
    "j": "XBN: which norm of a block, in which blocks",
    "k": "Wrong running statistics",
    "l": "Weight standardization and BCN",
    "m": "Few images a worker",
    "n": "Channels of a group",
    "o": "Distance to singularities",
    "p": "Damaged test images",
}
PAPER = re.compile(r"(?!Our)([^(]+) \(([^)]*\d{4})\)")


def evidence_page(folder: Path = RESULTS) -> str:
    return "\n".join(_lines(Evidence(folder))) + "\n"


def _lines(evidence: Evidence) -> Iterator[str]:
    yield "# Evidence: which claims of the five papers hold here"
    yield ""
    yield INTRODUCTION
    yield f"{evidence.runs()} of {evidence.planned()} planned runs, {_cost(evidence)}."
    yield ""
    yield "## In a minute"
    yield ""
    yield from in_a_minute(evidence)
    yield ""
    yield "## All claims"
    yield ""
    yield "Differences are in points of accuracy, or in the measure that the section names; where"
    yield "one is positive, the first of the two that are compared is better."
    yield ""
    yield "| | claim | paper | n | differences | answer |"
    yield "|---|---|---|---:|---:|---|"
    for claim, rows, left in zip(ALL, evidence.rows, evidence.left, strict=True):
        yield _summary(claim, rows, left)
    yield ""
    yield _papers()
    yield ""
    yield "![Every difference in accuracy with its interval](evidence.svg)"
    yield ""
    yield "## What the answers mean"
    yield ""
    yield TEXT
    yield ""
    yield "## Train more, and make this page"
    yield ""
    yield COMMANDS
    told: set[str] = set()
    for letter in TOPICS:
        mine = [i for i, claim in enumerate(ALL) if claim.letter == letter]
        files = [f for f in dict.fromkeys(ALL[i].file for i in mine) if f not in told]
        told |= {*files}
        yield ""
        yield f'<a id="{letter}"></a>'
        yield ""
        yield f"## ({letter}) {TOPICS[letter]}"
        for file in files:
            yield from _file_lines(evidence, file)
        for i in mine:
            yield ""
            yield from _section(evidence, i)
        for file in files:
            yield from _score_lines(evidence, file)
    yield ""
    yield "## What was not run"
    yield ""
    yield from _missing(evidence)
    yield ""
    yield "## Where the runs are from"
    yield ""
    yield (
        "Experiments share runs: seconds of each are its runs' part of their sweep, and add up to "
        f"more than the total. {provenance(evidence.rows, evidence.pool)}"
    )


def _cost(evidence: Evidence) -> str:
    spent = [f"{evidence.total(kind):.0f} s of a {kind}" for kind in ("GPU", "CPU")]
    devices = sorted({each["device"] for each in evidence.sweeps})
    shared = sum(each["seconds"] for each in evidence.sweeps if each.get("beside"))
    return (
        f"{' and '.join(each for each in spent if not each.startswith('0 '))}"
        f"{f', {shared:.0f} s of them shared with other work' if shared else ''}"
        f"{' (' + '; '.join(devices) + ')' if devices else ''}"
    )


def _summary(claim: Claim, rows: Sequence[ClaimRow], left: Sequence[ClaimRow]) -> str:
    source = re.sub(r" \([^)]*\)", "", claim.source or experiment_of(claim.file).source)
    source = source.replace(OUR_OWN, "our own question")
    words = f"**{answer_in_words(claim, rows)}**"
    if _ran(left):
        words += f"; accuracy left: {answer_in_words(claim, left, whole=False)}"
    return (
        f"| [{claim.letter}](#{claim.letter}) | {claim.text} | {source} | {pairs_in_words(rows)} "
        f"| {differences_in_words(claim, rows)} | {words} |"
    )


def _papers() -> str:
    """The papers in full, once."""
    sources = [experiment_of(claim.file).source for claim in ALL]
    found = {each[1]: each[2] for source in sources if (each := PAPER.match(source))}
    return "; ".join(f"{name}: {authors}" for name, authors in sorted(found.items())) + "."


def _ran(rows: Sequence[ClaimRow]) -> bool:
    return any(row.answer != NOT_RUN for row in rows)


def _section(evidence: Evidence, i: int) -> Iterator[str]:
    claim, rows = ALL[i], evidence.rows[i]
    first = claim.text[0]
    title = f"{first.upper() if first.isascii() else first}{claim.text[1:]}"
    if not _ran(rows):
        yield f"**{title}.** Not run."
        return
    yield f"**{title}**: {answer_in_words(claim, rows, whole=False)}."
    if claim.measure:
        yield f"Compared is a measure: {MEASURES[claim.measure]}."
    if claim.epoch:
        yield f"Compared is the test set after epoch {claim.epoch}."
    yield ""
    wrong = any(row.answer in (CONTRADICTED, UNSTABLE) for row in rows)
    yield from _table(claim, rows, evidence.pool if claim.losses or wrong else {})
    if left := evidence.left[i]:
        yield ""
        yield "The accuracy that is left, in percent: who has less can lose less."
        yield ""
        yield from _table(claim, left, {})
    if missing := not_run_in_words(claim, rows):
        yield ""
        yield f"Not run: {missing}."
    if claim.measure in SERIES:
        yield ""
        yield from by_epoch(claim, rows, evidence.pool)
    if claim.measure.endswith("_trend"):
        yield ""
        yield from by_layer(claim, rows, evidence.pool)
    if lost := lost_runs(claim, rows, evidence.pool):
        yield ""
        yield lost
    if claim.note:
        yield ""
        yield claim.note
    if claim.first_steps:
        yield ""
        yield from first_steps(claim)


def _table(claim: Claim, rows: Sequence[ClaimRow], results: Mapping[str, Result]) -> Iterator[str]:
    """The rows that were run; with the losses of their pairs where there are results to look in."""
    ran = [row for row in rows if row.answer != NOT_RUN]
    beside = {
        "training loss, first to last epoch": losses_of_pairs,
        "training accuracy, last epoch": training_accuracies,
    }
    found = {title: [tell(claim, row, results) for row in ran] for title, tell in beside.items()}
    told = {title: column for title, column in found.items() if any(column)}
    head = "| where | compared | n | the first | the second | difference | interval | answer |"
    yield head + "".join(f" {title} |" for title in told)
    yield "|---|---|---:|---:|---:|---:|---:|---|" + "---|" * len(told)
    for i, row in enumerate(ran):
        yield _row(claim, row) + "".join(f" {column[i] or '–'} |" for column in told.values())


def _row(claim: Claim, row: ClaimRow) -> str:
    digits = Digits(claim)
    lost = ""
    if row.lost or row.baseline_lost:
        lost = f" ({row.lost} lost, {row.baseline_lost} of {row.baseline})"
    interval = f"{digits.signed(row.low)} to {digits.signed(row.high)}"
    return (
        f"| {where(row.cell)} | {row.variant} against {row.baseline} "
        f"| {row.pairs} | {digits.spread(row.mean, row.std)} "
        f"| {digits.spread(row.baseline_mean, row.baseline_std)} "
        f"| {digits.signed(row.difference)} "
        f"| {'–' if math.isnan(row.low) else interval} "
        f"| {row.said}{lost} |"
    )


def _file_lines(evidence: Evidence, file: str) -> Iterator[str]:
    """Protocol and cost of an experiment."""
    experiment, results = evidence.experiments[file], evidence.results[file]
    yield ""
    yield f"*[{file}](../experiments/claims/{file}.toml)*, {experiment.source}."
    yield experiment.difference.replace("\n", " ")
    if not results:
        yield f"Not run: {len(experiment.runs())} runs."
        return
    spent = evidence.seconds(file)
    cost = " and ".join(f"{seconds:.0f} s of a {kind}" for kind, seconds in sorted(spent.items()))
    yield f"{len(results)} of {len(experiment.runs())} runs, {cost}."


def _score_lines(evidence: Evidence, file: str) -> Iterator[str]:
    """All scores of an experiment, unless its claims have shown every one already."""
    if not evidence.results[file]:
        return
    experiment, results = evidence.pooled(file), evidence.pool
    shown: dict[tuple[str, object], int] = {}
    for claim, rows in zip(ALL, evidence.rows, strict=True):
        if claim.file == file and not claim.measure and not claim.epoch:
            for row in rows:
                for name in (row.variant, row.baseline):
                    shown[name, row.cell] = max(shown.get((name, row.cell), 0), row.pairs)
    ran = [
        (each, sum(run.id in results for run in each.runs(experiment.seeds)))
        for each in experiment.variants
    ]
    if all(shown.get((each.name, each.cell), 0) == many for each, many in ran if many):
        return
    yield ""
    yield f"All seeds of {file}:"
    yield ""
    yield from _score_table(experiment, results)


def _score_table(experiment: Experiment, results: Mapping[str, Result]) -> Iterator[str]:
    """Without cells that have the same runs as one before them, and no others."""
    names = list(dict.fromkeys(variant.name for variant in experiment.variants))
    yield f"| test {experiment.metric} (%) | " + " | ".join(names) + " |"
    yield "|---|" + "---:|" * len(names)
    digits = Digits()
    told: set[str] = set()
    for cell in experiment.cells():
        here = {each.name: each for each in experiment.variants if each.cell == cell}
        ran = {
            run.id for each in here.values() for run in each.runs(experiment.seeds)
        } & results.keys()
        if ran <= told:
            continue
        told |= ran
        fields = [
            _score(experiment, here[name], results, digits) if name in here else ""
            for name in names
        ]
        yield f"| {where(cell)} | " + " | ".join(fields) + " |"


def _score(
    experiment: Experiment, variant: Variant, results: Mapping[str, Result], digits: Digits
) -> str:
    values, lost = scores(experiment, variant, results)
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    text = digits.spread(statistics.fmean(values), std) if values else ""
    return f"{text} ({lost} of {lost + len(values)} lost)".strip() if lost else text


def _missing(evidence: Evidence) -> Iterator[str]:
    """What is planned and not there, in the order in which it is trained; what is not planned."""
    stages = missing_stages(evidence.pool, evidence.sweeps)
    if stages:
        yield "In the order in which they are trained next; seconds of a GPU are a guess from the"
        yield "runs like them, rather high (*) where those shared the GPU with other work."
        yield ""
        yield "| experiment | what | runs | seconds |"
        yield "|---|---|---:|---:|"
        for stage in stages:
            seconds = f"{stage.seconds:.0f}{'*' if stage.shared else ''}" if stage.seconds else "–"
            yield f"| {stage.file} | {stage.what} | {len(stage.runs)} | {seconds} |"
        total = sum(stage.seconds for stage in stages)
        yield f"| | | {sum(len(stage.runs) for stage in stages)} | {total:.0f} |"
        yield ""
    yield NOT_PLANNED
