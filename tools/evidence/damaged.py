"""Of docs/which-normalizer.md how norms mind damaged test images."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tools.evidence.evidence import Evidence
from tools.evidence.schedule import AGAIN
from tools.evidence.words import where

DAMAGED = "p-damaged-images"


def on_damaged_images(evidence: Evidence) -> Iterator[str]:
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
    yield f"    {AGAIN} {DAMAGED}"
