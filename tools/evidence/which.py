"""docs/which-normalizer.md: what to use, drawn from the committed results and benchmarks."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from normkit.lab.experiment import Experiment
from normkit.lab.statistics import compare
from tools.evidence.claims import ALL
from tools.evidence.judge import NOT_RUN, ClaimRow, scores
from tools.evidence.page import Digits, Evidence
from tools.evidence.results import RESULTS

BENCHMARK = Path(__file__).parents[2] / "docs" / "benchmark-gpu.json"
FILE = "m-worker-batch"
SCHEDULES = ("g-ubn", "l-ws-bcn", "a-small-start-scale")
WORKER, WARM = "train.worker_batch", "train.warmup"
NOTHING = "Not measured yet: `python -m tools.evidence.train --out FOLDER {}`."
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
    yield "## By the number of images that share statistics"
    yield ""
    experiment, results = evidence.experiments[FILE], evidence.results[FILE]
    if results:
        yield from _by_worker_batch(evidence, experiment)
    else:
        yield NOTHING.format(FILE)
    yield ""
    yield "## By schedule, 128 images a batch"
    yield ""
    yield from _by_schedule(evidence)
    yield ""
    yield PRETRAINED
    yield "## By speed and memory"
    yield ""
    yield from _speed()
    yield ""
    yield "## By claim"
    yield ""
    yield "[evidence.md](evidence.md) has each claim of the papers with its numbers."


def _by_worker_batch(evidence: Evidence, experiment: Experiment) -> Iterator[str]:
    results = evidence.results[FILE]
    sizes = list(dict.fromkeys(dict(cell)[WORKER] for cell in experiment.cells()))
    names = list(dict.fromkeys(variant.name for variant in experiment.variants))
    verdicts = {
        (each.variant, each.cell): each.verdict
        for each in compare(experiment, results)
        if each.pairs or each.lost or each.baseline_lost
    }
    yield f"{experiment.difference} {len(results)} of {len(experiment.runs())} runs; – is not run."
    yield "Verdicts are decided together for both tables, more strictly than claim by claim."
    yield ""
    for warm, words in ((1, "with an epoch of warm-up"), (0, "without warm-up")):
        yield f"Test accuracy in percent, {words}; beside it the verdict against bn in that column."
        yield ""
        yield "| | " + " | ".join(f"{size} a worker" for size in sizes) + " |"
        yield "|---|" + "---:|" * len(sizes)
        for name in names:
            fields = []
            for size in sizes:
                cell = ((WARM, warm), (WORKER, size))
                values, lost = scores(experiment, experiment.variant(name, cell), results)
                std = statistics.stdev(values) if len(values) > 1 else math.nan
                text = Digits().spread(statistics.fmean(values), std) if values else "–"
                verdict = verdicts.get((name, cell), "") if values else ""
                mark = f", {lost} lost" if lost else ""
                fields.append(f"{text}{', ' + verdict if verdict else ''}{mark}")
            yield f"| {name} | " + " | ".join(fields) + " |"
        yield ""
    yield f"    python -m tools.evidence.train --out FOLDER {FILE}"


def _by_schedule(evidence: Evidence) -> Iterator[str]:
    """Differences in accuracy with and without warm-up, as the claims are judged."""
    lines: dict[tuple[str, str], dict[object, ClaimRow]] = {}
    for claim, rows in zip(ALL, evidence.rows, strict=True):
        if claim.file not in SCHEDULES or claim.measure or claim.epoch:
            continue
        for row in rows:
            if row.answer != NOT_RUN:
                pair = lines.setdefault((row.variant, row.baseline), {})
                pair[dict(row.cell)[WARM]] = row
    if not lines:
        yield NOTHING.format(" ".join(SCHEDULES))
        return
    yield "A ResNet-20, 5 epochs of CIFAR-10 with a cosine, learning rate 0.1: test accuracy in"
    yield "percent, the difference in points, the lab's verdict and the number of paired seeds."
    yield ""
    yield "| | without warm-up | an epoch of warm-up |"
    yield "|---|---|---|"
    for (variant, baseline), cells in lines.items():
        fields = [_compared(cells.get(warm)) for warm in (0, 1)]
        yield f"| {variant} against {baseline} | " + " | ".join(fields) + " |"
    yield ""
    yield f"    python -m tools.evidence.train --out FOLDER {' '.join(SCHEDULES)}"


def _compared(row: ClaimRow | None) -> str:
    if row is None:
        return "–"
    digits = Digits()
    means = [digits.spread(mean, math.nan) for mean in (row.mean, row.baseline_mean)]
    gap = digits.signed(row.difference)
    return f"{means[0]} against {means[1]}, {gap}, {row.verdict}, n {row.pairs}"


def _speed() -> Iterator[str]:
    document = json.loads(BENCHMARK.read_text(encoding="utf-8"))["networks"]
    rows = {row["network"]: row for row in document["networks"]}
    base, device = rows["nn.BatchNorm2d"], document["environment"]["device"]
    yield (f"A training step of a ResNet-50, batch 256, bfloat16, on one {device}")
    yield "([how, and all layers](benchmark-gpu.md))."
    yield ""
    yield "| norm | images/s | times nn.BatchNorm2d | peak GiB |"
    yield "|---|---:|---:|---:|"
    for name, row in rows.items():
        rate = row["images_per_second"]
        ratio, peak = rate / base["images_per_second"], row["peak_bytes"] / 2**30
        yield f"| {name} | {rate:.0f} | {ratio:.2f} | {peak:.1f} |"
