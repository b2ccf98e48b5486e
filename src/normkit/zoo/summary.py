"""What the reports of a sweep add up to."""

from __future__ import annotations

from collections import Counter, defaultdict

from normkit.zoo.report import Report

COUNTS = ("models", "failed", "norms", "converted", "kept", "skipped", "exact")
MEASURED = ("their largest difference", "in double precision")
HEAD = ("target", "tried", *COUNTS, *MEASURED)
TRIED = {"meta": "on meta", "run": "run"}


def overview(reports: dict[str, Report]) -> list[tuple[str, ...]]:
    """One row a target and way of trying, under HEAD. Differences are those of exact models."""
    sums: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    largest: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name, report in reports.items():
        way = name.partition(" ")[0]
        for target, outcome in report.outcomes.items():
            sums[target, way].update(
                models=1,
                failed=bool(outcome.failures),
                norms=report.norms,
                converted=outcome.converted,
                kept=outcome.kept,
                skipped=sum(outcome.skipped.values()),
                exact=outcome.exact,
            )
            for column, found in zip(MEASURED, (outcome.difference, outcome.wide), strict=True):
                if found is not None and outcome.exact:
                    before = largest[target, way]
                    before[column] = max(before[column], found)  # type: ignore[assignment]
    return [
        (
            *(target, TRIED[way]),
            *(f"{total[column]:,}" for column in COUNTS),
            *(_number(largest[target, way].get(column)) for column in MEASURED),
        )
        for (target, way), total in sorted(sums.items(), key=lambda item: item[0][1])
    ]


def reasons(reports: dict[str, Report]) -> list[tuple[str, int, int]]:
    """Why norms were skipped: reason, norms, models. A norm counts once, whatever the target."""
    norms: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for report in reports.values():
        most: Counter[str] = Counter()
        for outcome in report.outcomes.values():
            most |= Counter(outcome.skipped)
        norms += most
        models.update(most.keys())
    return [(reason, count, models[reason]) for reason, count in norms.most_common()]


def failures(reports: dict[str, Report]) -> list[tuple[str, str, str, str]]:
    """Model, way of trying, target and what is wrong."""
    found = []
    for name, report in sorted(reports.items()):
        way, _, reference = name.partition(" ")
        found += [(reference, TRIED[way], "", failure) for failure in report.failures]
        for target, outcome in report.outcomes.items():
            found += [(reference, TRIED[way], target, failure) for failure in outcome.failures]
    return found


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
