"""Which experiment a command is about, and where its results are kept."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import normkit
from normkit.errors import OptionError, UnknownName, nearest
from normkit.lab.experiment import Experiment
from normkit.lab.experiment.fields import seeds_of
from normkit.lab.experiment.reading import read
from normkit.lab.results import METRICS

RESULTS = Path("results")
WHERE = f"""\
FILE is a TOML file, or the name of an experiment that comes with normkit (normkit lab list).
Results are kept in {RESULTS}/NAME.sqlite of the working directory, or where --store says."""


def add_experiment(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", nargs=nargs, help="a TOML file, or a name; see below")
    add("--scale", metavar="NAME", help="of those in the file: paper, lab, desk, …")
    add("--seeds", metavar="N", help="so many seeds instead of the file's; or a list, 1,2,7")
    add("--metric", metavar="NAME", help=f"instead of the file's: {', '.join(METRICS)}")
    add("--store", type=Path, metavar="FILE", help=f"default {RESULTS}/NAME.sqlite")


def experiment_of(options: argparse.Namespace) -> Experiment:
    found = read(find(options.file), options.scale, options.metric)
    if options.seeds is not None:
        found = dataclasses.replace(found, seeds=_seeds(options.seeds))
    return found


def store_of(options: argparse.Namespace, experiment: Experiment) -> Path:
    chosen: Path | None = options.store
    return chosen or RESULTS / f"{experiment.name}.sqlite"


def beside(store: Path, experiment: Experiment, ending: str, metric: str | None = None) -> Path:
    """A file about an experiment beside its results: of a scale, and of a metric asked for."""
    parts = [experiment.name, experiment.scale, metric or ""]
    return store.with_name("-".join(filter(None, parts)) + ending)


def find(reference: str) -> Path:
    """A file, or an experiment that comes with normkit, by its name."""
    path = Path(reference)
    if path.suffix or path.exists() or len(path.parts) > 1:
        return path
    known = shipped()
    if reference not in known:
        hint = nearest(reference, known) if known else "Try the path of a TOML file."
        raise UnknownName(f"There is no experiment {reference!r}. {hint}")
    return known[reference]


def shipped() -> dict[str, Path]:
    """The experiments of normkit by name: as installed, or beside the source."""
    package = Path(normkit.__file__).parent
    for folder in (package / "experiments", package.parents[1] / "experiments"):
        if found := sorted(folder.glob("*.toml")):
            return {path.stem: path for path in found}
    return {}


def _seeds(text: str) -> tuple[int, ...]:
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError:
        raise OptionError(f"--seeds got {text!r}. Expected a number, or a list as 1,2,7.") from None
    return seeds_of(numbers if "," in text else numbers[0])
