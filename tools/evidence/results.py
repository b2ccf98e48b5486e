"""Results of the claims as small files that are committed, one for each experiment.

A run says of which variant and cell it is, all of them where several share it, and its seed: the
files can be read, and the numbers of the pages computed again, without the code that made them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normkit.core.atomic_write import write_text
from normkit.errors import NormkitError
from normkit.lab.experiment import Experiment
from normkit.lab.results import Result
from tools.evidence.claims import CLAIMS, experiment_of

RESULTS = CLAIMS / "results"
SWEEPS = "sweeps.json"  # what the sweeps took, all claims together
DIGITS = 6  # that are kept of losses and measures; accuracies of 10,000 images have four


class ResultsError(NormkitError):
    """A file of results that is not one."""


def write_results(
    experiment: Experiment, results: Mapping[str, Result], folder: Path = RESULTS
) -> Path | None:
    """The experiment's own runs; None if it has none yet."""
    own = [results[run.id] for run in experiment.runs() if run.id in results]
    if not own:
        return None
    of = _places(experiment)
    records = [of[result.run] | shortened(json.loads(result.to_json())) for result in own]
    common = _common([record["environment"] for record in records])
    lines = []
    for record in records:
        record["environment"] = {
            key: value for key, value in record["environment"].items() if key not in common
        }
        lines.append(json.dumps(record, ensure_ascii=False, separators=(",", ":")))
    head = json.dumps(common, ensure_ascii=False)
    body = ",\n".join(lines)
    text = f'{{"environment": {head},\n"runs": [\n{body}\n]}}\n'
    return write_text(folder / f"{experiment.name}.json", text)


def in_sweep(result: Result, number: int) -> Result:
    """The same result, which says in which of the sweeps it was trained."""
    return dataclasses.replace(result, environment={**result.environment, "sweep": str(number)})


def read_results(experiment: Experiment, folder: Path = RESULTS) -> dict[str, Result]:
    """By run id; empty where nothing was committed."""
    path = folder / f"{experiment.name}.json"
    if not path.exists():
        return {}
    results = {}
    with _readable(path):
        document = json.loads(path.read_text(encoding="utf-8"))
        for record in document["runs"]:
            for key in ("of", "seed"):
                record.pop(key, None)
            whole = {**record, "environment": {**document["environment"], **record["environment"]}}
            results[record["run"]] = from_record(whole)
    return results


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """An error that names the file, if it is not what ``write_results`` has written."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ResultsError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Expected results as "
            "tools.evidence writes them: try git checkout of this file, or another --results"
        ) from None


def from_record(record: Mapping[str, Any]) -> Result:
    """A result of what ``shortened`` made of it."""
    return Result.from_json(json.dumps(record))


def read_all(folder: Path = RESULTS) -> dict[str, Result]:
    """Every run that was committed, of whichever experiment."""
    files = sorted(path.stem for path in CLAIMS.glob("*.toml"))
    return {
        run: each for f in files for run, each in read_results(experiment_of(f), folder).items()
    }


def read_sweeps(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The sweeps that were run: seconds, runs, device."""
    path = folder / SWEEPS
    if not path.exists():
        return []
    with _readable(path):
        sweeps: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return sweeps


def _places(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Of each run the variants and cells that it is a run of, and its seed."""
    places: dict[str, dict[str, Any]] = {}
    for variant in experiment.variants:
        for run in variant.runs(experiment.seeds):
            place = places.setdefault(run.id, {"of": [], "seed": run.seed})
            place["of"].append({"variant": variant.name, **dict(variant.cell)})
    return places


def shortened(value: Any) -> Any:
    """A record without what is not known, with few digits, and without folders of a machine."""
    if isinstance(value, dict):
        kept = {key: shortened(each) for key, each in value.items() if each not in (None, {}, "")}
        if "command" in kept:
            kept["command"] = re.sub(r"(?<= )/\S+", "FOLDER", kept["command"])
        return {"environment": {}, **kept} if "run" in value else kept
    if isinstance(value, list):
        return [shortened(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _common(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    first, *others = environments
    return {
        key: value for key, value in first.items() if all(each.get(key) == value for each in others)
    }
