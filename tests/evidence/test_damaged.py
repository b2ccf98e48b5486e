"""Damaged images on the page: what is compared with what, and of how many runs a mean is."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

from claims_made_up import made_up
from tools.evidence.claims import experiment_of
from tools.evidence.damaged import DAMAGED, on_damaged_images
from tools.evidence.evidence import Evidence
from tools.evidence.results import write_results


def test_group_norms_stand_beside_the_others() -> None:
    """No line compared gn + ws with xbn: 51.0 and 50.1 of other norms' 41 and 46."""
    text = "\n".join(on_damaged_images(Evidence()))
    paired = text.partition("Paired, warm-up, gn + ws against the others")[2]
    assert re.search(r"\| xbn \| \+0\.96 \(.*\), not shown, n 5 \| \+2\.6\d \(.*\), better", paired)
    assert re.search(r"\| bcn \+ ws \| \+4\.6\d .*\| bn \| \+9\.9\d|\| bn \| \+9\.9\d", paired)
    assert "| contrast |" in text
    assert "Of what xbn has above bn, 55% is contrast alone." in text


def test_a_run_alone_is_no_mean(tmp_path: Path) -> None:
    """n 1 stood beside n 5."""
    experiment = experiment_of(DAMAGED)
    results = made_up(DAMAGED, {})
    for variant in experiment.variants:
        for run in variant.runs(experiment.seeds):
            if run.seed > 1 and variant.name == "bn" and dict(variant.cell)["train.warmup"] == 0:
                del results[run.id]
                continue
            draw = random.Random(f"{variant.name} {run.seed}")
            values = [0.8, *(0.5 + draw.uniform(-0.01, 0.01) for _ in range(6))]
            measures = {"corruption": values, "corruption_adapted": values}
            last = dataclasses.replace(results[run.id].epochs[-1], measures=measures)
            results[run.id] = dataclasses.replace(results[run.id], epochs=(last,))
    write_results(experiment, results, tmp_path)
    text = "\n".join(on_damaged_images(Evidence(tmp_path)))
    assert "Left out for fewer than 2 runs: bn, no warm-up." in text
    assert "| bn, no warm-up |" not in text
    assert "Paired, warm-up, " in text
    assert "Paired, no warm-up, " not in text
