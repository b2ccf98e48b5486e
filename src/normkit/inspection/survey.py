"""Every normalization of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from normkit.core.messages import aligned
from normkit.errors import UnknownName, nearest
from normkit.inspection.blocks import places_of
from normkit.inspection.checks import refuse_wrapped
from normkit.inspection.flow import guessed_neighbours, observed_neighbours
from normkit.inspection.site import Site, WeightSite, facts_of, weights_of
from normkit.inspection.tree import Node, tree_of
from normkit.layers.domains import OfDomains

WIDTH = 120
# if a table is too wide, the first are left out one after the other, then the others are cut
DROPPED = ("statistics", "affine", "momentum", "class", "mode", "eps")
CUT = ("fed by", "then", "path")
LEAST = 12


class Survey:
    """The norms of a model, in the order of ``named_modules()``. ``print`` it for a table.

    ``survey["layer1.0.bn1"]`` and ``survey[0]`` give one of them, ``survey.weights`` the layers
    whose weight is normalized.
    """

    def __init__(
        self, sites: tuple[Site, ...], weights: tuple[WeightSite, ...] = (), title: str = "model"
    ) -> None:
        self.sites = sites
        self.weights = weights
        self.title = title
        self._by_path = {path: site for site in sites for path in site.paths}

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __contains__(self, path: object) -> bool:
        return path in self._by_path

    def __getitem__(self, path: str | int) -> Site:
        if isinstance(path, int):
            return self.sites[path]
        if path not in self._by_path:
            hint = nearest(path, self._by_path) if self._by_path else "It has none at all."
            raise UnknownName(f"{self.title} has no norm at {path!r}. {hint}")
        return self._by_path[path]

    @property
    def kinds(self) -> dict[str, int]:
        """How many norms there are of each kind, the most frequent first."""
        return dict(Counter(site.kind for site in self.sites).most_common())

    @property
    def blocks(self) -> tuple[str, ...]:
        """The paths of the blocks, in order."""
        return tuple(dict.fromkeys(site.block for site in self.sites if site.block is not None))

    def to_rows(self) -> list[dict[str, Any]]:
        """One dictionary a norm, of values that JSON can hold."""
        return [site.to_dict() for site in self.sites]

    def __str__(self) -> str:
        return table(self.title, self.sites, Counter(site.kind for site in self.weights))

    def __repr__(self) -> str:
        return f"<Survey of {self.title}: {len(self)} norms>"


def survey(model: nn.Module, example: Any = None) -> Survey:
    """Every normalization in a model, what it is and where it stands. Changes nothing.

    Recognised are the norms of normkit, torch.nn, timm and torchvision, and modules of other
    libraries that call themselves norms; a norm with an activation inside is one entry. What a
    model computes without a module, as with ``F.layer_norm``, cannot be seen.

    Which convolution feeds a norm and which activation follows it are guessed from the order of
    registration. With an example input (a tensor, a tuple of positional or a mapping of keyword
    arguments) the model is run once and they are observed. Without, models on the meta device
    and with lazy layers can be surveyed as well.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> [(site.path, site.kind, site.fed_by) for site in nk.survey(model)]
    [('1', 'bn', '0')]
    """
    refuse_wrapped(model)
    tree = tree_of(model)
    guessed = guessed_neighbours(tree)
    places = places_of(tree, guessed)
    flow = guessed if example is None else observed_neighbours(tree, example)
    sites = tuple(_site(n, *flow[n.path], places[n.path]) for n in tree.norms())
    return Survey(sites, weights_of(model), type(model).__name__)


def _site(node: Node, fed_by: str | None, followed_by: str | None, place: dict[str, Any]) -> Site:
    facts = facts_of(node.module)
    act = facts["act"]
    return Site(
        path=node.path,
        paths=(node.path, *node.others),
        module=node.module,
        fed_by=fed_by,
        followed_by=followed_by if act is None else type(act).__name__,
        **facts,
        **place,
    )


# -------------------------------------------------------------------- the printed table


def table(title: str, sites: Sequence[Site], weights: Counter[str]) -> str:
    """A headline, the facts that all norms share, and one line a norm."""
    if not sites:
        return "\n".join([f"{title} has no normalization layers.", *_weights(weights)])
    kinds = Counter(site.kind for site in sites).most_common()
    one = len(sites) == 1
    head = f"{title}: {len(sites)} norm{'' if one else 's'} ({_counts(kinds)})"
    columns = {name: [cell(site) for site in sites] for name, cell in CELLS.items()}
    common = {k: c[0] for k, c in columns.items() if k in SHARED and len(set(c)) == 1}
    facts = [f"{v} mode" if k == "mode" else f"{k} {v}" for k, v in common.items() if v]
    shown = {k: [k, *c] for k, c in columns.items() if k not in common and any(c)}
    fitting = _fitting(shown)
    missing = [name for name in shown if name not in fitting]
    return "\n".join(
        [
            head,
            ("" if one else "all: ") + ", ".join(facts),
            *_weights(weights),
            "",
            *aligned(
                list(zip(*fitting.values(), strict=True)),
                right=[i for i, name in enumerate(fitting) if name in RIGHT],
            ),
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


def _statistics(site: Site) -> str:
    domains = site.norm.domains if isinstance(site.norm, OfDomains) else None
    return ("running" if site.tracked else "none") + (f" of {domains} domains" if domains else "")


CELLS = {
    "path": _path,
    "kind": lambda site: site.kind,
    "class": lambda site: site.class_name,
    "channels": lambda site: "?" if site.channels is None else str(site.channels),
    "groups": lambda site: _number(site.groups),
    "eps": lambda site: _number(site.eps),
    "momentum": lambda site: _number(site.momentum),
    "affine": lambda site: "yes" if site.affine else "no",
    "statistics": _statistics,
    "mode": lambda site: "train" if site.training else "eval",
    "fed by": lambda site: _near(site, site.fed_by),
    "then": lambda site: _near(site, site.followed_by),
    "place": lambda site: site.where,
}
SHARED = ("class", "eps", "momentum", "affine", "statistics", "mode")
RIGHT = ("channels", "groups")


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
