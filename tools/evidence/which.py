"""docs/which-normalizer.md: what to use, drawn from the committed results and benchmarks."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import GpuRun, title
from normkit.lab.experiment import Experiment, Variant
from normkit.lab.results import DONE, Result
from normkit.lab.statistics import UNSTABLE, compare, decide
from tools.evidence.claims import ALL, OUR_OWN
from tools.evidence.damaged import DAMAGED, on_damaged_images
from tools.evidence.evidence import Evidence
from tools.evidence.judge import CONTRADICTED, FAILS, scores
from tools.evidence.results import RESULTS
from tools.evidence.schedule import (
    AGAIN,
    FILE,
    GAINS,
    LABELS,
    LARGE,
    MICRO,
    NOTHING,
    WORKER,
    advice_on_warmup,
    by_schedule,
    gains_of_warmup,
)
from tools.evidence.words import WARM, Digits

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "docs" / "benchmark-gpu.json"
ALIKE = ("g-ubn", "l-ws-bcn", "g-rectifications")  # other norms on the same ground, at 128
QUARTER = 'for c in widths: nk.convert(model, "{}", f"channels:{{c}}", groups=c // 4{})'
# what the tables call them, in code as it was measured; and in the benchmark, with how
IN_CODE = {
    "bn": ('nk.convert(model, "bn")', "bn-fused", "fused"),
    "bn + ws": (
        'nk.convert(model, "bn"); nk.standardize(model)',
        "bn-fused",
        "fused, without ws",
    ),
    "gn": (QUARTER.format("gn", ""), "gn-fused", "fused, usual groups"),
    "gn + ws": (
        QUARTER.format("gn", "") + "; then nk.standardize(model)",
        "gn-fused",
        "fused, usual groups, without ws",
    ),
    "bgn": ("nk.recipes.bgn(model, batch_size).apply()", "bgn", "not fused, default groups"),
    "bcn + ws": (
        QUARTER.format("bcn", "") + "; then nk.standardize(model)",
        "bcn-fused",
        "fused, usual groups, without ws",
    ),
    MICRO: (
        QUARTER.format("bcn", ", micro=True") + "; then nk.standardize(model); "
        "nk.follow_learning_rate(model, optimizer)",
        "",
        "",
    ),
    "ubn": ('nk.recipes.ubn(model, start="torch").apply()', "ubn", "not fused"),
    "rbn": ('nk.convert(model, "rbn")', "rbn-fused", "fused"),
    "bnet": ('nk.recipes.bnet(model, "all", start="torch").apply()', "", ""),
}
PRETRAINED = """\
## For a pretrained network with batch norms, and few images a batch

Freeze them (`nk.recipes.small_batch(model)`), with a small learning rate: at 1 to 8 images a batch
they were not behind fitted group norms in ten of eleven comparisons. Where batch norm has to go,
group norms of one group that are fitted on 64 images (`nk.recipes.small_batch(model, images)`) came
within 0 to 6 points of it at batch 2, and were 16 to 23 above batch norms that train on, with an
older version of the fit.
[The figures, and the command](fitted-conversion.md#what-to-choose).
"""
TEXT = """\
# Which normalizer should I use?

What was measured here, with the commands that measure it again; nothing on this page is edited by
hand (`make evidence`). It is a small network and a short training: take it as a first guess, and
let `normkit lab run` decide on your own data. Runs are trained again where EMPTY, a folder, has no
results; without `--results` only those that are not committed.
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
    yield from by_schedule(evidence)
    yield ""
    if measured:
        yield f"## {GAINS}"
        yield ""
        yield from gains_of_warmup(evidence)
        yield ""
    if evidence.results[DAMAGED]:
        yield "## When images differ from those of training"
        yield ""
        yield from on_damaged_images(evidence)
        yield ""
    yield PRETRAINED
    yield "## By speed and memory"
    yield ""
    yield from _speed()
    yield ""
    if mind := _to_mind(evidence):
        yield "## What to mind"
        yield ""
        yield "Where a paper's claim is contradicted here, does not hold, or runs were lost, and"
        yield "what the runs say beside that."
        yield "Letters and names such as a-wider are of [evidence.md](evidence.md):"
        yield ""
        yield from mind
        yield ""
    yield "## By claim"
    yield ""
    yield "[evidence.md](evidence.md) has each claim of the papers with its numbers."


def _to_mind(evidence: Evidence) -> list[str]:
    return [
        f"- ({claim.letter}) {claim.text}: {claim.note}"
        for i, claim in enumerate(ALL)
        if claim.note
        and not claim.source.startswith(OUR_OWN)
        and any(row.answer in (CONTRADICTED, FAILS, UNSTABLE) for row in evidence.rows[i])
    ]


def _in_short(evidence: Evidence) -> Iterator[str]:
    """The best for each number of images, what they are in code, what they cost."""
    yield "Test accuracies with an epoch of warm-up, in percent: the highest, those not shown to be"
    yield "lower (Holm for the row), and the next; beside each the paired difference to it, in"
    yield "points, on n seeds. Means are over all seeds of a norm: where they have other seeds,"
    yield "differences count. With few seeds *not shown* is not *equal*. At 128 images norms of"
    yield f"{', '.join(ALIKE)} are there too; at fewer they were not measured."
    yield ""
    yield from _highest(evidence, warmup=1)
    yield ""
    if len(cold := list(_highest(evidence, warmup=0))) > 2:
        yield "Without warm-up, where bn was run too; not all norms were:"
        yield ""
        yield from cold
        yield ""
    if micro := seen_scores(evidence, 2).get(MICRO, {}):
        yield from _micro(evidence, micro)
        yield ""
    if advice := list(advice_on_warmup(evidence)):
        yield from advice
        yield ""
    rows, device = _network_rows("resnet18-32")
    yield "In code, as measured (`widths`: the network's numbers of channels, here 16, 32, 64); and"
    yield "a step of training beside nn.BatchNorm2d: a ResNet-18 for images of 32 pixels, batch"
    yield f"128, on one {device}; – is not measured, and nothing was with ws. For speed let"
    yield "`nk.fuse(model)` follow."
    yield ""
    yield "| here | in code | speed | memory | measured as |"
    yield "|---|---|---:|---:|---|"
    for name, (code, variant, how) in IN_CODE.items():
        row = rows.get(variant)
        cost = f"{row['ratio']:.2f} | {row['memory']:.2f} | {how}" if row else "– | – | –"
        shown = code.replace("; then ", "`, then `")
        yield f"| {name} | `{shown}` | {cost} |"
    yield ""
    yield "    python -m benchmarks.gpu --parts 'network resnet18-32'"


def _highest(evidence: Evidence, warmup: int) -> Iterator[str]:
    """The best for each number of images; without warm-up only beside bn."""
    experiment = evidence.experiments[FILE]
    yield "| images that share statistics | highest | not shown to be lower | next | bn |"
    yield "|---:|---|---|---|---|"
    for size in _sizes(experiment):
        found = seen_scores(evidence, size, warmup)
        found.pop(MICRO, None)
        if not found or (not warmup and "bn" not in found):
            continue
        names = _by_mean(found)
        level = not_shown_lower(found, names[0], experiment.equivalence)
        rest = [name for name in names[1:] if name not in level]
        parts = (level, rest[:1], ["bn"] if "bn" in found else [])
        fields = [_scored(found, names[0])]
        fields += [
            "; ".join(_beside(found, each, names[0]) for each in part) or "–" for part in parts
        ]
        yield f"| {size} | {' | '.join(fields)} |"


def _micro(evidence: Evidence, micro: Mapping[int, float]) -> Iterator[str]:
    """The micro-batch form beside its fair rival, on either schedule and in the large network."""
    yield f"Where workers may exchange numbers once a step: {MICRO} has {100 * _mean(micro):.1f}"
    yield "(one set of runs for 8, 2 and 1 images a worker: statistics from samples alone, and"
    yield "estimates updated once a step from all 128 images). Its fair rival is SyncBN, bn at 128:"
    large = _scores_in(evidence, LARGE, "bn"), _scores_in(evidence, LARGE, MICRO)
    pairs = {
        "with warm-up": (seen_scores(evidence, 128).get("bn", {}), micro),
        "without": (
            seen_scores(evidence, 128, warmup=0).get("bn", {}),
            seen_scores(evidence, 2, warmup=0).get(MICRO, {}),
        ),
        "in a ResNet-18 with warm-up": large,
    }
    told = []
    for words, (sync, own) in pairs.items():
        gaps = [own[seed] - sync[seed] for seed in own if seed in sync]
        if len(gaps) > 1:
            [decision] = decide([gaps], evidence.experiments[FILE].equivalence)
            told.append(
                f"{words} {100 * statistics.fmean(gaps):+.2f} on {len(gaps)} paired seeds "
                f"({decision.verdict})"
            )
    yield f"{'; '.join(told) or 'not measured'}."


def _scores_in(evidence: Evidence, file: str, name: str) -> dict[int, float]:
    """With warm-up, by seed; none where a run was lost."""
    experiment = evidence.pooled(file)
    [variant] = [v for v in experiment.variants if v.name == name and dict(v.cell)[WARM] == 1]
    return _whole(experiment, variant, evidence.pool)


def _whole(
    experiment: Experiment, variant: Variant, results: Mapping[str, Result]
) -> dict[int, float]:
    """Scores by seed; none where a run was lost."""
    runs = {run.seed: results.get(run.id) for run in variant.runs(experiment.seeds)}
    ran = {seed: each for seed, each in runs.items() if each is not None}
    if any(each.outcome(experiment.metric) != DONE for each in ran.values()):
        return {}
    return {seed: each.score(experiment.metric) or 0.0 for seed, each in ran.items()}


def seen_scores(evidence: Evidence, size: int, warmup: int = 1) -> dict[str, dict[int, float]]:
    """By norm and seed, with or without warm-up: all on this ground that lost no run."""
    found: dict[str, dict[int, float]] = {}
    for file in (FILE, *(ALIKE if size == 128 else ())):
        experiment = evidence.pooled(file)
        for variant in experiment.variants:
            cell = dict(variant.cell)
            if cell[WARM] != warmup or cell.get(WORKER, size) != size:
                continue
            if own := _whole(experiment, variant, evidence.pool):
                name = LABELS.get(variant.name, variant.name)
                found[MICRO if name == "bcn + ws" and size < 128 else name] = own
    return found


def not_shown_lower(
    found: Mapping[str, Mapping[int, float]], best: str, margin: float
) -> list[str]:
    """Which others might be as good as the best, by paired seeds; from the highest down."""
    others = [name for name in _by_mean(found) if name != best]
    top = found[best]
    gaps = [[top[s] - found[name][s] for s in top if s in found[name]] for name in others]
    decisions = decide(gaps, margin)
    return [name for name, each in zip(others, decisions, strict=True) if each.verdict != "better"]


def _by_mean(found: Mapping[str, Mapping[int, float]]) -> list[str]:
    """From the highest down."""
    return sorted(found, key=lambda name: -_mean(found[name]))


def _mean(scores: Mapping[int, float]) -> float:
    return statistics.fmean(scores.values()) if scores else math.nan


def _scored(found: Mapping[str, Mapping[int, float]], name: str) -> str:
    return f"{name} {100 * _mean(found[name]):.1f} (n {len(found[name])})"


def _beside(found: Mapping[str, Mapping[int, float]], name: str, best: str) -> str:
    """A mean, and the paired difference to the best."""
    own, top = found[name], found[best]
    if name == best:
        return _scored(found, name)
    gaps = [own[seed] - top[seed] for seed in own if seed in top]
    gap = f"{Digits().signed(statistics.fmean(gaps))}, n {len(gaps)}" if gaps else "no pair"
    return f"{name} {100 * _mean(own):.1f} ({gap})"


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
    own_runs, planned = evidence.results[FILE], evidence.experiments[FILE]
    experiment, results = evidence.pooled(FILE), evidence.pool
    yield f"{planned.difference} {len(own_runs)} of {len(planned.runs())} runs; – is not run."
    yield "Means are over all seeds of a norm, verdicts over paired ones: decided together for a"
    yield "table, more strictly than claim by claim."
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
    yield f"    {AGAIN} {FILE}"


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
        fields = []  # bcn + ws is its micro-batch form below 128 images a worker
        for variant in (each for each in experiment.variants if each.name == name):
            values, lost = scores(experiment, variant, results)
            std = statistics.stdev(values) if len(values) > 1 else math.nan
            text = Digits().spread(statistics.fmean(values), std) if values else "–"
            verdict = verdicts.get((name, variant.cell), "") if values else ""
            mark = f", {lost} lost" if lost else ""
            fields.append(f"{text}{', ' + verdict if verdict else ''}{mark}")
        if name == "bcn + ws":
            for label, part in ((name, [fields[0], *["–"] * 3]), (MICRO, ["–", *fields[1:]])):
                if set(part) != {"–"}:
                    yield f"| {label} | " + " | ".join(part) + " |"
        elif set(fields) != {"–"}:
            yield f"| {name} | " + " | ".join(fields) + " |"


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
