"""With which versions and on what hardware runs were made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normkit.core.messages import counted
from normkit.lab.results import Result

# ways of computing, which may change from run to run on one and the same machine
WAYS = {"recorded": "CUDA graph", "side by side": "runs at once on the device"}


@dataclass(frozen=True)
class Environment:
    """Versions and hardware that some of the runs share."""

    runs: int
    facts: tuple[tuple[str, str, bool], ...]  # name, value, whether others differ in it


def environments(results: Sequence[Result]) -> list[Environment]:
    """The most usual one first; those that no run has recorded are left out."""
    groups: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for result in results:
        items = ((str(name), str(value)) for name, value in result.environment.items())
        key = tuple(item for item in items if item[0] not in WAYS)
        groups.setdefault(tuple(sorted(key)), []).append(result)
    names = {name for key in groups for name, _ in key}
    varied = {name for name in names if len({dict(key).get(name) for key in groups}) > 1}
    found = []
    for key, runs in sorted(groups.items(), key=lambda item: -len(item[1])):
        facts = [(name, value, name in varied) for name, value in key]
        facts += [(name, said, False) for way, name in WAYS.items() if (said := _ways(runs, way))]
        if facts:
            found.append(Environment(len(runs), tuple(facts)))
    return found


def _ways(results: Sequence[Result], way: str) -> str:
    values = [str(r.environment[way]) for r in results if way in r.environment]
    distinct = list(dict.fromkeys(values))
    if len(distinct) < 2:
        return "".join(distinct)
    return "; ".join(f"{each} ({counted(values.count(each), 'run')})" for each in distinct)
