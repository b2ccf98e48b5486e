"""The parts of the page, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normkit.diagnosis.findings.finding import SEVERITIES, plural
from normkit.diagnosis.report.cards import badge, cards
from normkit.diagnosis.report.sections import depth, gap_shares, layer_charts, similarity
from normkit.diagnosis.report.style import CSS
from normkit.diagnosis.report.text import escaped, number

if TYPE_CHECKING:
    from normkit.diagnosis.diagnosis import Diagnosis


def page(diagnosis: Diagnosis) -> str:
    """The whole page: no scripts, no fonts, nothing that is loaded."""
    title = f"Diagnosis of {diagnosis.model}"
    body = "".join(
        [
            _head(diagnosis, title),
            cards(diagnosis.findings),
            _undecided(diagnosis),
            depth(diagnosis),
            gap_shares(diagnosis),
            similarity(diagnosis),
            layer_charts(diagnosis),
            _foot(diagnosis),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(diagnosis: Diagnosis, title: str) -> str:
    counts = {s: sum(x.severity == s for x in diagnosis) for s in SEVERITIES}
    badges = "".join(badge(s, f"{n} {plural(s, n)}") for s, n in counts.items() if n)
    if diagnosis.healthy:
        badges = badge("fine", "no alarm") + badges
    facts = diagnosis.facts
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts.get("kinds", {}).items())
    said = [
        f"{len(diagnosis.layers)} norms ({kinds})" if kinds else f"{len(diagnosis.layers)} norms",
        f"{facts.get('samples', 0):,} samples in {facts.get('batches', 0)} batches",
    ]
    if facts.get("training_samples"):
        said.append(f"{facts['training_samples']:,} training samples")
    if facts.get("loss_eval") is not None:
        said.append(
            f"loss {number(facts['loss_eval'])} in eval mode, {number(facts['loss_batch'])} with "
            "batch statistics"
        )
    listed = "; ".join(escaped(each) for each in said)
    return f'<h1>{escaped(title)}</h1><p>{badges}</p><p class="soft">{listed}.</p>'


def _undecided(diagnosis: Diagnosis) -> str:
    if not diagnosis.undecided:
        return ""
    listed = "".join(
        f"<p>{escaped(x.question)} Give <code>{escaped(x.give)}</code>.</p>"
        for x in diagnosis.undecided
    )
    return f'<h2>Not decided with what was given</h2><div class="card">{listed}</div>'


def _foot(diagnosis: Diagnosis) -> str:
    torch = diagnosis.facts.get("torch")
    made = "Made by normkit" + (f" with torch {torch}" if torch else "")
    return f'<footer class="soft small">{escaped(made)}. This page loads nothing.</footer>'
