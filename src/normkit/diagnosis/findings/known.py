"""What has been found so far."""

from __future__ import annotations

from normkit.diagnosis.findings.finding import Finding


class Known:
    """Findings of earlier examiners, so that a symptom is not reported beside its cause."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.spoiled: frozenset[str] = frozenset()
        """Norms whose statistics are known to be wrong, and why."""

    def add(self, finding: Finding, spoils: bool) -> None:
        self.findings.append(finding)
        if spoils:
            self.spoiled |= frozenset(finding.paths)

    def paths(self, *kinds: str) -> frozenset[str]:
        """Norms with a finding of one of these kinds."""
        return frozenset(p for f in self.findings if f.kind in kinds for p in f.paths)

    @property
    def alarm(self) -> bool:
        return any(finding.alarm for finding in self.findings)
