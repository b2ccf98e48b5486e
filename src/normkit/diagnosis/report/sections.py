"""The charts of the page, with what they show."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from normkit.diagnosis.findings.bounds import OFF, WRONG
from normkit.diagnosis.report.bars import MEASURES, Measure, bars
from normkit.diagnosis.report.charts import Series, heat_map, lines
from normkit.diagnosis.report.text import escaped, number, percent

if TYPE_CHECKING:
    from normkit.diagnosis.diagnosis import Diagnosis

SHARES = 15  # of the gap


def depth(diagnosis: Diagnosis) -> str:
    """Estimation shift from the first to the last norm."""
    layers = [x for x in diagnosis.layers if "error_in_eval" in x.numbers or "error" in x.numbers]
    if not layers:
        return ""
    names = [layer.path or "(model)" for layer in layers]

    def column(measure: str) -> list[float | None]:
        return [layer.numbers.get(measure) for layer in layers]

    error = lines(
        [
            Series("in eval mode", column("error_in_eval")),
            Series("own", column("error")),
        ],
        names,
        label="Output error over depth, logarithmic",
        logarithmic=True,
        bounds=(OFF, WRONG),
    )
    shift = lines(
        [Series("means", column("esm_mean")), Series("deviations", column("esm_std"))],
        names,
        label="Estimation shift magnitude over depth",
    )
    return (
        '<h2>Estimation shift over depth</h2><div class="grid">'
        '<section class="card"><h3>Output error</h3><p class="soft small">What wrong running '
        "statistics do to the standardized output, whose own size is 1, on a logarithmic axis. "
        f"Dashed: {OFF:g} is a warning, {WRONG:g} serious.</p>"
        + _legend("in eval mode, accumulated", "own, norms below on batch statistics")
        + f'{error}</section><section class="card"><h3>Estimation shift magnitude</h3>'
        '<p class="soft small">Distance between running statistics and those of the data in eval '
        "mode, over all channels of a layer (estimation-shift, section 4).</p>"
        + _legend("of the means", "of the standard deviations")
        + f"{shift}</section></div>"
    )


def _legend(one: str, two: str) -> str:
    return (
        f'<p class="legend small"><span><i></i>{escaped(one)}</span>'
        f'<span><i class="b"></i>{escaped(two)}</span></p>'
    )


def gap_shares(diagnosis: Diagnosis) -> str:
    gap = diagnosis.gap
    if gap is None:
        return ""
    how = (
        "by the loss with norms switched one by one" if gap.method == "swap" else "by output error"
    )
    error = gap.standard_error  # not known from one batch
    sure = "" if math.isnan(error) else f" (standard error {number(error)})"
    said = (
        f"The loss is {number(gap.eval_loss)} with running statistics and "
        f"{number(gap.train_loss)} with those of batches: a gap of {number(gap.gap)}{sure}."
    )
    if not gap.is_gap:
        return (
            '<h2>Gap between train and eval mode</h2><div class="card">'
            f"<p>{said} That is no gap worth attributing.</p></div>"
        )
    shown = dict(list(gap.shares.items())[:SHARES])
    about = f"{said} Shared out {how}."
    if (rest := len(gap.shares) - len(shown)) > 0:
        about += f" {rest} more norms have {percent(sum(list(gap.shares.values())[SHARES:]))}."
    chart = bars(Measure("Where the gap enters", about, None, percent), shown)
    return f"<h2>Gap between train and eval mode</h2>{chart}"


def similarity(diagnosis: Diagnosis) -> str:
    if not diagnosis.cosines:
        return ""
    cards = []
    for place, (path, cosines) in enumerate(diagnosis.cosines.items()):
        which = "the first norm" if place == 0 else "where samples are most alike"
        name = path or "(model)"
        count = len(cosines)
        cards.append(
            f'<section class="card"><h3><span class="path">{escaped(name)}</span>, {which}</h3>'
            f'<p class="soft small">Cosines between {count} samples, of what the norm is given: '
            "pale is 0, full colour is 1, the second colour is below 0.</p>"
            f"{heat_map(cosines, f'Cosines between samples at {name}')}</section>"
        )
    return f'<h2>Feature condensation</h2><div class="grid">{"".join(cards)}</div>'


def layer_charts(diagnosis: Diagnosis) -> str:
    cards = []
    for name, measure in MEASURES.items():
        values = {x.path: x.numbers[name] for x in diagnosis.layers if name in x.numbers}
        if values and any(values.values()):
            cards.append(bars(measure, values))
    if not cards:
        return ""
    return f'<h2>All norms, measure by measure</h2><div class="grid">{"".join(cards)}</div>'
