"""Statistics of a model's norms apart from the model: to be merged, kept in a file, put back."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from normkit.calibration import files
from normkit.errors import OptionError, UnknownName, nearest
from normkit.inspection.tally import Tally

PARTS = ("count", "mean", "m2")
SEPARATOR = ":"  # which no path of a module has
FORMAT = "normkit.statistics"


@dataclass(frozen=True)
class Source:
    """Where statistics come from."""

    fingerprint: str  # of the samples: see Fingerprint
    images: int
    created: str = ""
    note: str = ""

    @classmethod
    def now(cls, fingerprint: str, images: int, note: str = "") -> Source:
        moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(fingerprint, images, moment, note)


class Statistics(Mapping[str, Tally]):
    """(count, mean, M2) of each norm by its path, and the data they come from.

    ``a.merge(b)`` are the statistics of both sets of data, weighted by their sizes: from several
    loaders, days, workers or clients. The same data twice is an error, found by the fingerprint; so
    are statistics of different weights. For statistics measured "layerwise" the result is what one
    pass over all data gives; measured "progressive" each part has seen its own statistics below.
    """

    def __init__(
        self,
        tallies: Mapping[str, Tally],
        kinds: Mapping[str, str],
        sources: tuple[Source, ...] = (),
        model: str = "",
        mode: str = "",
        state: str = "",
        weights: str = "",
    ) -> None:
        self.tallies = {path: tally.to("cpu") for path, tally in tallies.items()}
        self.kinds = dict(kinds)
        self.sources = sources
        self.model, self.mode = model, mode  # the name of its class; how they were measured
        self.state = state  # a fingerprint of the weights and statistics it had then
        self.weights = weights  # and of its weights outside of norms

    def __getitem__(self, path: str) -> Tally:
        if path not in self.tallies:
            raise UnknownName(f"No statistics of {path!r}. {nearest(path, self.tallies)}")
        return self.tallies[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tallies)

    def __len__(self) -> int:
        return len(self.tallies)

    @property
    def images(self) -> int:
        return sum(source.images for source in self.sources)

    def merge(self, *others: Statistics) -> Statistics:
        """The statistics of all data together."""
        everyone = (self, *others)
        for other in others:
            _check_alike(self, other)
        sources = tuple(source for one in everyone for source in one.sources)
        prints = [source.fingerprint for source in sources if source.fingerprint]
        if twice := {p for p in prints if prints.count(p) > 1}:
            raise OptionError(
                f"The data with fingerprint {min(twice)} are in more than one of the statistics: "
                "merged, they would count twice."
            )
        tallies = dict(self.tallies)
        for other in others:
            tallies = {path: tally.merged(other[path]) for path, tally in tallies.items()}
        return Statistics(
            tallies, self.kinds, sources, self.model, self.mode, self.state, self.weights
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .safetensors file: count, mean and M2 of each norm in float64, and sources."""
        tensors = {
            f"{name}{SEPARATOR}{part}": getattr(tally, part)
            for name, tally in self.tallies.items()
            for part in PARTS
        }
        files.write(path, tensors, {FORMAT: json.dumps(self._described())})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read what ``save`` has written."""
        tensors, metadata = files.read(path)
        if FORMAT not in metadata:
            raise OptionError(f"{path} holds no statistics, but other tensors.")
        try:
            said = json.loads(metadata[FORMAT])
            tallies = {
                name: Tally(*(tensors[f"{name}{SEPARATOR}{part}"] for part in PARTS))
                for name in said["kinds"]
            }
            sources = tuple(Source(**source) for source in said["sources"])
            return cls(
                tallies,
                said["kinds"],
                sources,
                said["model"],
                said["mode"],
                said["state"],
                said.get("weights", ""),  # which older files do not say
            )
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(
                f"{path} cannot be read as statistics: {error!r}. It may be from another version."
            ) from error

    def _described(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "mode": self.mode,
            "state": self.state,
            "weights": self.weights,
            "kinds": self.kinds,
            "sources": [asdict(source) for source in self.sources],
        }

    def __repr__(self) -> str:
        prints = ", ".join(source.fingerprint for source in self.sources)
        return f"<Statistics of {len(self)} norms of {self.model}, {self.images} images ({prints})>"


def _check_alike(first: Statistics, other: Statistics) -> None:
    """Statistics of one model only can be merged."""
    if not isinstance(other, Statistics):
        raise OptionError(f"Expected Statistics to merge, got {type(other).__name__}.")
    if missing := set(first) ^ set(other):
        some = ", ".join(sorted(missing)[:3])
        raise OptionError(f"The statistics are of different models: only one side has {some}.")
    for path, kind in first.kinds.items():
        if other.kinds[path] != kind:
            raise OptionError(f"{path} is {kind} on one side and {other.kinds[path]} on the other.")
    if first.mode != other.mode:
        raise OptionError(
            f"Statistics measured {first.mode!r} and {other.mode!r} cannot be merged: the norms "
            "saw different inputs."
        )
    weights = {one.weights for one in (first, other) if one.weights}
    states = {one.state for one in (first, other) if one.state}
    if len(weights) > 1 or len(states) > 1:
        raise OptionError(
            "The statistics were measured on different weights, or on a model with other "
            "statistics, so that the norms saw different inputs."
        )
