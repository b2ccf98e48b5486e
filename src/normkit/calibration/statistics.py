"""Statistics of a model's norms apart from the model: to be merged, kept in a file, put back."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from normkit.core.atomic_write import atomic_write
from normkit.core.optional_dependencies import require
from normkit.errors import OptionError, UnknownName, nearest
from normkit.inspection.statistics import MergedMoments

PARTS = ("count", "mean", "m2")
SEPARATOR = ":"  # which no path of a module has
FORMAT = "normkit.statistics"


@dataclass(frozen=True)
class StatisticsSource:
    """Where statistics come from."""

    fingerprint: str  # of the samples: see Fingerprint
    images: int
    created: str = ""
    note: str = ""

    @classmethod
    def now(cls, fingerprint: str, images: int, note: str = "") -> StatisticsSource:
        moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(fingerprint, images, moment, note)


class Statistics(Mapping[str, MergedMoments]):
    """(count, mean, M2) of each norm by its path, and the data they come from.

    ``a.merge(b)`` are the statistics of both sets of data, weighted by their sizes: from several
    loaders, days, workers or clients. The same data twice is an error, found by the fingerprint; so
    are statistics of different weights. For statistics measured "layerwise" the result is what one
    pass over all data gives; measured "progressive" each part has seen its own statistics below.
    """

    def __init__(
        self,
        moments: Mapping[str, MergedMoments],
        kinds: Mapping[str, str],
        sources: tuple[StatisticsSource, ...] = (),
        model: str = "",
        mode: str = "",
        state: str = "",
        weights: str = "",
    ) -> None:
        self._by_path = {path: merged.to("cpu") for path, merged in moments.items()}
        self.kinds = dict(kinds)
        self.sources = sources
        self.model, self.mode = model, mode  # the name of its class; how they were measured
        self.state = state  # a fingerprint of the weights and statistics it had then
        self.weights = weights  # and of its weights outside of norms

    def __getitem__(self, path: str) -> MergedMoments:
        if path not in self._by_path:
            raise UnknownName(f"No statistics of {path!r}. {nearest(path, self._by_path)}")
        return self._by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self._by_path)

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
        moments = self._by_path
        for other in others:
            moments = {path: merged.merged(other[path]) for path, merged in moments.items()}
        return Statistics(
            moments, self.kinds, sources, self.model, self.mode, self.state, self.weights
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .safetensors file: count, mean and M2 of each norm in float64, and sources."""
        tensors = {
            f"{name}{SEPARATOR}{part}": getattr(merged, part)
            for name, merged in self._by_path.items()
            for part in PARTS
        }
        _write_file(path, tensors, {FORMAT: json.dumps(self._description())})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read what ``save`` has written."""
        tensors, metadata = _read_file(path)
        if FORMAT not in metadata:
            raise OptionError(f"{path} holds no statistics, but other tensors.")
        try:
            description = json.loads(metadata[FORMAT])
            moments = {
                name: MergedMoments(*(tensors[f"{name}{SEPARATOR}{part}"] for part in PARTS))
                for name in description["kinds"]
            }
            sources = tuple(StatisticsSource(**source) for source in description["sources"])
            return cls(
                moments,
                description["kinds"],
                sources,
                description["model"],
                description["mode"],
                description["state"],
                description.get("weights", ""),  # which older files do not say
            )
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(
                f"{path} cannot be read as statistics: {error!r}. It may be from another version."
            ) from error

    def _description(self) -> dict[str, Any]:
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


def _write_file(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file: complete, or not at all."""
    library = require("safetensors.torch", "lab", "A file of statistics")
    target = Path(path)
    if target.suffix != ".safetensors":
        raise OptionError(f"{target.name}: the name has to end in .safetensors.")
    if not target.resolve().parent.is_dir():
        raise OptionError(f"There is no directory {target.parent} for {target.name}.")
    whole = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    atomic_write(target, lambda name: library.save_file(whole, name, metadata=dict(metadata)))


def _read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the description of a file."""
    library = require("safetensors", "lab", "A file of statistics")
    source = Path(path)
    if not source.is_file():
        raise OptionError(f"There is no file {source}.")
    try:
        with library.safe_open(source, "pt") as opened:
            names = list(opened.keys())
            return {k: opened.get_tensor(k) for k in names}, opened.metadata() or {}
    except OSError:
        raise
    except Exception as error:  # its error class is not a public name in all versions
        raise OptionError(f"{source} is no safetensors file: {error}.") from error
