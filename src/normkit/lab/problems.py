"""What is wrong with an experiment's file, all of it at once, each with its key and line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from normkit.errors import NormkitError, nearest
from normkit.lab.lines import KeyPath

SHOWN = 12  # of many problems
# what other tools call some of the keys; too far from ours to be found by likeness
ELSEWHERE = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "iteration_size": "accumulate",
    "iter_size": "accumulate",
    "gradient_accumulation": "accumulate",
    "n_epochs": "epochs",
    "scheduler": "schedule",
    "gamma": "factor",
    "wd": "weight_decay",
    "eta_min": "floor",
    "normalizer": "norm",
    "normalization": "norm",
    "dataset": "data",
    "amp": "precision",
    "dtype": "precision",
    "reference": "baseline",
    "control": "baseline",
}


class BadExperiment(NormkitError, ValueError):
    """An experiment's file that cannot be run as it stands."""


class Problems:
    """A list that grows while a file is read, and becomes one error at the end."""

    def __init__(self, name: str, lines: Mapping[KeyPath, int], scale: str = "") -> None:
        self.name, self.lines, self.scale = name, lines, scale
        self.found: dict[tuple[int, str], None] = {}

    def add(self, path: KeyPath, said: str) -> None:
        """Note that something is wrong at a key; ``said`` goes on after the key's name."""
        place, line = self.locate(path)
        self.found[(line, f"{shown(place)} {said}" if place else said)] = None

    def unknown(self, path: KeyPath, known: Iterable[str]) -> None:
        """Note a key that does not exist."""
        known, key = list(known), str(path[-1])
        hint = repr(ELSEWHERE[key]) if ELSEWHERE.get(key) in known else ""
        hint = f"Did you mean {hint}?" if hint else nearest(key, known)
        self.add(path, f"is no known key. {hint}")

    def locate(self, path: KeyPath) -> tuple[KeyPath, int]:
        """Where in the file a key of the merged experiment stands: within a scale, or outside."""
        for length in range(len(path), 0, -1):
            for prefix in (("scales", self.scale), ()):
                line = self.lines.get((*prefix, *path[:length]))
                if line is not None:
                    return (*prefix, *path), line
        return path, 0

    def raise_any(self) -> None:
        if not self.found:
            return
        said = [f"line {line}: {text}" if line else text for line, text in sorted(self.found)]
        if len(said) == 1:
            raise BadExperiment(f"{self.name}, {said[0]}")
        more = [f"and {len(said) - SHOWN} more"] if len(said) > SHOWN else []
        listed = "".join(f"\n  {text}" for text in said[:SHOWN] + more)
        raise BadExperiment(f"{self.name} has {len(said)} problems:{listed}")


def shown(path: KeyPath) -> str:
    """A key as one would say it: variants[2].train.lr, grid."train.lr"."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if "." not in part else f'"{part}"')
    return text
