"""The table of a survey, in plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from normkit.inspection.site import Site

WIDTH = 120
# if a table is too wide, the first are left out one after the other, then the others are cut
DROPPED = ("statistics", "affine", "momentum", "class", "mode", "eps")
CUT = ("fed by", "then", "path")
LEAST = 12


def table(title: str, sites: Sequence[Site], weights: Counter[str]) -> str:
    """A headline, the facts that all norms share, and one line a norm."""
    if not sites:
        return "\n".join([f"{title} has no normalization layers.", *_weights(weights)])
    kinds = Counter(site.kind for site in sites).most_common()
    one = len(sites) == 1
    head = f"{title}: {len(sites)} norm{'' if one else 's'} ({_counts(kinds)})"
    columns = {name: [cell(site) for site in sites] for name, cell in CELLS.items()}
    common = {k: c[0] for k, c in columns.items() if k in SHARED and len(set(c)) == 1}
    said = [f"{v} mode" if k == "mode" else f"{k} {v}" for k, v in common.items() if v]
    shown = {k: [k, *c] for k, c in columns.items() if k not in common and any(c)}
    fitting = _fitting(shown)
    missing = [name for name in shown if name not in fitting]
    return "\n".join(
        [
            head,
            ("" if one else "all: ") + ", ".join(said),
            *_weights(weights),
            "",
            *_lines(fitting),
            *([f"(too wide for this table: {', '.join(missing)})"] if missing else []),
        ]
    )


def _counts(kinds: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds)


def _weights(weights: Counter[str]) -> list[str]:
    return [f"normalized weights: {_counts(weights.most_common())}"] if weights else []


def _path(site: Site) -> str:
    return (site.path or "(the model)") + (f"  ×{len(site.paths)}" if site.shared else "")


def _near(site: Site, path: str | None) -> str:
    """A path as seen from a norm: within the same parent the last name is enough."""
    if path is None:
        return ""
    parent = site.path.rpartition(".")[0]
    return f".{path[len(parent) + 1 :]}" if parent and path.startswith(parent + ".") else path


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


CELLS = {
    "path": _path,
    "kind": lambda site: site.kind,
    "class": lambda site: site.class_name,
    "channels": lambda site: "?" if site.channels is None else str(site.channels),
    "groups": lambda site: _number(site.groups),
    "eps": lambda site: _number(site.eps),
    "momentum": lambda site: _number(site.momentum),
    "affine": lambda site: "yes" if site.affine else "no",
    "statistics": lambda site: "running" if site.tracked else "none",
    "mode": lambda site: "train" if site.training else "eval",
    "fed by": lambda site: _near(site, site.fed_by),
    "then": lambda site: _near(site, site.followed_by),
    "place": lambda site: site.where,
}
SHARED = ("class", "eps", "momentum", "affine", "statistics", "mode")
RIGHT = ("channels", "groups")


def _lines(columns: dict[str, list[str]]) -> list[str]:
    widths = _widths(columns)
    rows = zip(*columns.values(), strict=True)
    return [
        "  ".join(
            cell.rjust(width) if name in RIGHT else cell.ljust(width)
            for cell, (name, width) in zip(row, widths.items(), strict=True)
        ).rstrip()
        for row in rows
    ]


def _widths(columns: dict[str, list[str]]) -> dict[str, int]:
    return {name: max(map(len, cells)) for name, cells in columns.items()}


def _excess(columns: dict[str, list[str]]) -> int:
    widths = _widths(columns)
    return sum(widths.values()) + 2 * (len(widths) - 1) - WIDTH


def _fitting(columns: dict[str, list[str]]) -> dict[str, list[str]]:
    """As many of the columns as there is room for, long texts cut at their start if need be."""
    columns = dict(columns)
    for name in DROPPED:
        if _excess(columns) > 0:
            columns.pop(name, None)
    for name in CUT:
        if name in columns and (excess := _excess(columns)) > 0:
            room = max(LEAST, _widths(columns)[name] - excess)
            columns[name] = [c if len(c) <= room else "…" + c[1 - room :] for c in columns[name]]
    return columns
