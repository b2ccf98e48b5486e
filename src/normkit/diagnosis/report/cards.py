"""Findings as cards."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.diagnosis.findings.examining import KINDS
from normkit.diagnosis.findings.finding import Finding
from normkit.diagnosis.report.text import escaped, number, words

PATHS = 12  # of a finding, that are listed


def badge(tone: str, text: str) -> str:
    return f'<span class="badge {escaped(tone)}">{escaped(text)}</span>'


def cards(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<h2>Findings</h2><p>Nothing was found.</p>"
    return "<h2>Findings</h2>" + "".join(map(_finding, findings))


def _finding(finding: Finding) -> str:
    title = KINDS[finding.kind].title if finding.kind in KINDS else finding.kind
    place = f' <span class="path soft">{escaped(finding.path)}</span>' if finding.path else ""
    more = len(finding.paths) - PATHS
    paths = ", ".join(map(escaped, finding.paths[:PATHS])) + (
        f" and {more} more" if more > 0 else ""
    )
    numbers = "".join(
        f"<div><dt>{words(name)}</dt><dd>{number(value)}</dd></div>"
        for name, value in finding.numbers.items()
        if value is not None
    )
    parts = [
        f'<article class="card finding {escaped(finding.severity)}">',
        f"<h3>{badge(finding.severity, finding.severity)}{escaped(title)}{place}</h3>",
        f"<p>{escaped(finding.said)}</p>",
        f'<p class="soft">{escaped(finding.why)}</p>',
        f'<p class="soft small">See: {escaped(finding.paper)}</p>' if finding.paper else "",
        f"<p>To be sure: {escaped(finding.missing)}</p>" if finding.missing else "",
        f'<p class="small soft try">Try:</p><pre>{escaped(finding.remedy)}</pre>',
        f'<p class="small soft">Layers: <span class="path">{paths}</span></p>'
        if len(finding.paths) > 1
        else "",
        f"<dl>{numbers}</dl>" if numbers else "",
        "</article>",
    ]
    return "".join(parts)
