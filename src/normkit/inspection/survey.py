"""Every normalization of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch import nn

from normkit.errors import UnknownName, nearest
from normkit.inspection.facts import facts_of
from normkit.inspection.flow import guessed
from normkit.inspection.observed import observed
from normkit.inspection.places import places_of
from normkit.inspection.site import Site
from normkit.inspection.table import table
from normkit.inspection.tree import Node, tree_of
from normkit.inspection.weights import WeightSite, weights_of
from normkit.inspection.wrappers import refuse_wrapped


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
    places = places_of(tree)
    flow = guessed(tree) if example is None else observed(tree, example)
    sites = tuple(_site(n, *flow[n.path], asdict(places[n.path])) for n in tree.norms())
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
