"""docs/which-normalizer.md: what to use, drawn from the committed results and benchmarks."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import GpuRun, title
from normkit.lab.experiment import Experiment
from normkit.lab.results import Result
from normkit.lab.statistics import compare
from tools.evidence.claims import ALL
from tools.evidence.judge import CONTRADICTED, NOT_RUN, ClaimRow, scores
from tools.evidence.page import Digits, Evidence, where
from tools.evidence.results import RESULTS

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "docs" / "benchmark-gpu.json"
FILE = "m-worker-batch"
DAMAGED = "p-damaged-images"
SCHEDULES = ("g-ubn", "l-ws-bcn", "a-small-start-scale", "a-resnet18", "l-resnet18")
WORKER, WARM = "train.worker_batch", "train.warmup"
NOTHING = "Not measured yet: `python -m tools.evidence.train --out FOLDER {}`."
# what the tables call them, in code; and in the benchmark, fused
IN_CODE = {
    "bn": ('`nk.convert(model, "bn")`', "bn-fused"),
    "gn": ('`nk.convert(model, "gn")`', "gn-fused"),
    "gn + ws": ('`nk.recipes.micro_batch(model, "gn").apply()`', ""),
    "bgn": ("`nk.recipes.bgn(model, batch_size).apply()`", "bgn"),
    "bcn + ws": ("`nk.recipes.micro_batch(model, micro=False).apply()`", "bcn-fused"),
    "bcn + ws below 128 a worker": (
        "`nk.recipes.micro_batch(model).apply()`, then `nk.follow_learning_rate(model, optimizer)`",
        "",
    ),
    "ubn": ("`nk.recipes.ubn(model).apply()`", "ubn"),
}
PRETRAINED = """\
## For a pretrained network with batch norms, and few images a batch

Freeze them (`nk.recipes.small_batch(model)`): the best choice that was measured at 1 to 8 images a
batch, with a small learning rate. Where batch norm has to go, group norms of one group that are
fitted on 64 images (`nk.recipes.small_batch(model, images)`) came within 0 to 6 points of it at
batch 2, and were 16 to 23 above batch norms that train on, with an older version of the fit.
[The figures, and the command](fitted-conversion.md#what-to-choose).
"""
TEXT = """\
# Which normalizer should I use?

What was measured here, with the commands that measure it again; nothing on this page is edited by
hand (`make evidence`). It is a small network and a short training: take it as a first guess, and
let `normkit lab run` decide on your own data.
"""


def which_page(folder: Path = RESULTS) -> str:
    return "\n".join(_lines(Evidence(folder))) + "\n"


def _lines(evidence: Evidence) -> Iterator[str]:
    yield TEXT
    measured = evidence.results[FILE]
    if measured:
        yield "## In short"
        yield ""
        yield from _in_short(evidence)
        yield ""
    yield "## By the number of images that share statistics"
    yield ""
    if measured:
        yield from _by_worker_batch(evidence)
    else:
        yield NOTHING.format(FILE)
    yield ""
    yield "## By schedule, 128 images a batch"
    yield ""
    yield from _by_schedule(evidence)
    yield ""
    if evidence.results[DAMAGED]:
        yield "## When images differ from those of training"
        yield ""
        yield from _damaged(evidence)
        yield ""
    yield PRETRAINED
    yield "## By speed and memory"
    yield ""
    yield from _speed()
    yield ""
    if mind := _to_mind(evidence):
        yield "## What to mind"
        yield ""
        yield "Where a paper's claim is contradicted here, and why:"
        yield ""
        yield from mind
        yield ""
    yield "## By claim"
    yield ""
    yield "[evidence.md](evidence.md) has each claim of the papers with its numbers."


def _to_mind(evidence: Evidence) -> list[str]:
    return [
        f"- ({claim.letter}) {_full_text(i)}: {claim.note}"
        for i, claim in enumerate(ALL)
        if claim.note and any(row.answer == CONTRADICTED for row in evidence.rows[i])
    ]


def _full_text(i: int) -> str:
    """A claim that goes on from the one before it, with what that says."""
    text = ALL[i].text
    return f"{_full_text(i - 1)}{text[1:]}" if text.startswith("…") else text


def _in_short(evidence: Evidence) -> Iterator[str]:
    """The best of each column of the table with warm-up, what they are in code, what they cost."""
    experiment = evidence.experiments[FILE]
    yield "The highest test accuracies with an epoch of warm-up, in percent; tables below have the"
    yield "rest."
    yield ""
    yield "| images that share statistics | best | second | third | bn |"
    yield "|---:|---|---|---|---|"
    for size in _sizes(experiment):
        means = []
        for name in _names(experiment):
            cell = ((WARM, 1), (WORKER, size))
            values, lost = scores(
                experiment, experiment.variant(name, cell), evidence.results[FILE]
            )
            if values and not lost:
                means.append((statistics.fmean(values), name))
        best = [f"{name} {100 * mean:.1f}" for mean, name in sorted(means, reverse=True)[:3]]
        bn = [f"{100 * mean:.1f}" for mean, name in means if name == "bn"]
        yield f"| {size} | {' | '.join([*best, *['–'] * (3 - len(best))])} | {(bn or ['–'])[0]} |"
    yield ""
    rows, device = _network_rows("resnet18-32")
    yield "In code, each followed by `nk.fuse(model)`; and a step of training with these norms, the"
    yield "weights as they are, beside nn.BatchNorm2d: a ResNet-18 for images of 32 pixels, batch"
    yield f"128, on one {device}."
    yield ""
    yield "| here | in code | speed | memory |"
    yield "|---|---|---:|---:|"
    for name, (code, measured) in IN_CODE.items():
        row = rows.get(measured)
        cost = f"{row['ratio']:.2f} | {row['memory']:.2f}" if row else "– | –"
        yield f"| {name} | {code} | {cost} |"
    yield ""
    yield "    python -m benchmarks.gpu --parts 'network resnet18-32'"


def _network_rows(network: str) -> tuple[dict[str, dict[str, Any]], str]:
    """By variant, those that were measured; and on what."""
    run = GpuRun(BENCHMARK)
    rows = run.rows(f"network {network}")
    return {row["variant"]: row for row in rows if "error" not in row}, run.environment["device"]


def _sizes(experiment: Experiment) -> list[Any]:
    return list(dict.fromkeys(dict(cell)[WORKER] for cell in experiment.cells()))


def _names(experiment: Experiment) -> list[str]:
    return list(dict.fromkeys(variant.name for variant in experiment.variants))


def _by_worker_batch(evidence: Evidence) -> Iterator[str]:
    experiment, results = evidence.experiments[FILE], evidence.results[FILE]
    yield f"{experiment.difference} {len(results)} of {len(experiment.runs())} runs; – is not run."
    yield "Verdicts are decided together for a table, more strictly than claim by claim."
    yield ""
    for warm, words in ((1, "with an epoch of warm-up"), (0, "without warm-up")):
        own = tuple(each for each in experiment.variants if dict(each.cell)[WARM] == warm)
        table = dataclasses.replace(experiment, variants=own)
        if not any(run.id in results for run in table.runs()):
            continue
        yield f"Test accuracy in percent, {words}; beside it the verdict against bn in that column."
        yield ""
        yield from _worker_batch_table(table, results)
        yield ""
    yield f"    python -m tools.evidence.train --out FOLDER {FILE}"


def _worker_batch_table(experiment: Experiment, results: Mapping[str, Result]) -> Iterator[str]:
    verdicts = {
        (each.variant, each.cell): each.verdict
        for each in compare(experiment, results)
        if each.pairs or each.lost or each.baseline_lost
    }
    sizes = _sizes(experiment)
    yield "| | " + " | ".join(f"{size} a worker" for size in sizes) + " |"
    yield "|---|" + "---:|" * len(sizes)
    for name in _names(experiment):
        fields = []
        for variant in (each for each in experiment.variants if each.name == name):
            values, lost = scores(experiment, variant, results)
            std = statistics.stdev(values) if len(values) > 1 else math.nan
            text = Digits().spread(statistics.fmean(values), std) if values else "–"
            verdict = verdicts.get((name, variant.cell), "") if values else ""
            mark = f", {lost} lost" if lost else ""
            fields.append(f"{text}{', ' + verdict if verdict else ''}{mark}")
        if set(fields) != {"–"}:
            yield f"| {name} | " + " | ".join(fields) + " |"


def _by_schedule(evidence: Evidence) -> Iterator[str]:
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
    yield f"    python -m tools.evidence.train --out FOLDER {' '.join(SCHEDULES)}"


def _damaged(evidence: Evidence) -> Iterator[str]:
    """Accuracy on damaged test images, as trained and after adaptation."""
    experiment, results = evidence.experiments[DAMAGED], evidence.results[DAMAGED]
    yield "Test accuracy in percent: of the images as they are, then the mean over six kinds of"
    yield "damage that training has not seen, as trained and after adaptation to each kind, which"
    yield "takes no labels: `nk.adapt(model, batches, prior=0, guard=False)`. Group norms have no"
    yield "statistics to adapt."
    yield ""
    yield "| | images as they are | damaged | damaged, adapted | n |"
    yield "|---|---:|---:|---:|---:|"
    for variant in experiment.variants:
        runs = [results[run.id] for run in variant.runs(experiment.seeds) if run.id in results]
        last = [run.epochs[-1].measures for run in runs if run.epochs]
        if not last:
            continue
        plain, adapted = (
            [statistics.fmean(each[name][1:]) for each in last]
            for name in ("corruption", "corruption_adapted")
        )
        clean = [each["corruption"][0] for each in last]
        fields = " | ".join(
            f"{100 * statistics.fmean(each):.1f}" for each in (clean, plain, adapted)
        )
        yield f"| {variant.name}, {where(variant.cell)} | {fields} | {len(last)} |"
    yield ""
    yield f"    python -m tools.evidence.train --out FOLDER {DAMAGED}"


def _compared(row: ClaimRow | None) -> str:
    if row is None:
        return "–"
    digits = Digits()
    means = [digits.spread(mean, math.nan) for mean in (row.mean, row.baseline_mean)]
    gap = digits.signed(row.difference)
    return f"{means[0]} against {means[1]}, {gap}, {row.verdict}, n {row.pairs}"


def _speed() -> Iterator[str]:
    rows, device = _network_rows("resnet50-256")
    yield f"A training step of a ResNet-50, batch 256, bfloat16, on one {device}"
    yield "([how, and all layers](benchmark-gpu.md))."
    yield ""
    yield "| norm | images/s | times nn.BatchNorm2d | peak GiB |"
    yield "|---|---:|---:|---:|"
    for name, row in rows.items():
        rate, ratio, peak = (row[key] for key in ("images_per_second", "ratio", "gib"))
        yield f"| {title(name)} | {rate:.0f} | {ratio:.2f} | {peak:.1f} |"
    yield ""
    yield 'Short of memory: `nk.fuse(model, save="inputs")` keeps the inputs of norms alone and'
    yield "makes the rest again in backward."
    yield ""
    yield "    python -m benchmarks.gpu --parts 'network resnet50-256'"
