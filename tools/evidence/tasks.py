"""What the tasks of the papers have reached: a small file of runs, and the table that it gives.

    python -m tools.evidence.tasks STORE …    add the runs of stores to the file, a row each
    make evidence                             write the table of docs/tasks-of-the-papers.md

A run that is already there is replaced; runs of an experiment whose settings have changed since
are dropped as soon as there are runs with the new ones, so that a mean is over one protocol.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from normkit.core.atomic_write import write_text
from normkit.lab.results import Result
from normkit.lab.store import Store
from normkit.lab.store.experiments import StoredExperiment, StoredVariant

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments" / "results" / "tasks.csv"
PAGE = ROOT / "docs" / "tasks-of-the-papers.md"
BEGIN, END = "<!-- measured: make evidence -->\n", "<!-- end of what was measured -->\n"
COLUMNS = (
    *("experiment", "data", "cell", "variant", "seed", "metric", "value", "constant"),
    *("epochs", "seconds", "device", "torch", "protocol", "command"),
)
# of a task's metrics, what the table has; the others are on the lab's page
SHOWN = {
    "segmentation": ("miou",),
    "detection": ("ap50", "ap", "mask_ap50", "mask_ap"),
    "few-shot": ("1_shot", "5_shot"),
    "adversarial": ("accuracy", "robust_accuracy"),
    "video": ("accuracy",),
    "adaptation": ("accuracy",),
    "architecture-search": ("accuracy",),
}
Row = dict[str, str]


def rows_of(store: Store) -> Iterator[Row]:
    """A row for each metric of each finished run, of the experiments that a store remembers."""
    results, contents = store.results(), store.contents()
    for experiment in sorted(store.experiments(), key=lambda each: each.saved):
        for variant in experiment.variants:
            for run, seed in zip(variant.runs, experiment.seeds, strict=True):
                if run in results:
                    yield from _rows(
                        experiment, variant, seed, results[run], contents[run]["setting"]
                    )


def _rows(
    experiment: StoredExperiment,
    variant: StoredVariant,
    seed: int,
    result: Result,
    setting: Mapping[str, Any],
) -> Iterator[Row]:
    task = setting.get("task", {})
    for metric in SHOWN.get(task.get("name", ""), (experiment.metric,)):
        if result.epochs[-1].value(metric) is None:
            continue
        score = result.score(metric)
        constant = constant_answer(task, result)
        yield {
            "experiment": experiment.name,
            "data": setting["data"]["name"],
            "cell": ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in variant.cell),
            "variant": variant.name,
            "seed": str(seed),
            "metric": metric,
            "value": "" if score is None else f"{score:.6g}",
            "constant": "" if constant is None else f"{constant:.4g}",
            "epochs": str(setting["train"]["epochs"]),
            "seconds": f"{result.seconds:.1f}",
            "device": result.environment.get("device", ""),
            "torch": result.environment.get("torch", ""),
            "protocol": protocol(setting),
            "command": f"normkit lab run {experiment.name} --scale {experiment.scale}",
        }


def protocol(setting: Mapping[str, Any]) -> str:
    """What all variants of a cell share, as a short hash: rows are compared only within it."""
    shared = {key: setting.get(key) for key in ("data", "model", "train")}
    text = json.dumps(shared, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def constant_answer(task: Mapping[str, Any], result: Result) -> float | None:
    """What the best answer that does not look at the image would reach."""
    last = result.epochs[-1]
    if task.get("name") == "few-shot":
        return 1 / int(task.get("options", {}).get("ways", 5))
    if task.get("name") == "detection":
        return 0.0  # nothing is found
    constant = last.value("constant_miou")
    return last.test_majority if constant is None else constant


# ------------------------------------------------------------------ the file


def read_rows(file: Path = FILE) -> list[Row]:
    if not file.exists():
        return []
    return list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """New rows in the place of old ones; old ones of another protocol go, wherever they are."""
    rows = [*old, *new]
    last = {(row["experiment"], row["cell"]): row["protocol"] for row in rows}
    by_key = {
        tuple(row[key] for key in ("experiment", "cell", "metric", "variant", "seed")): row
        for row in rows
        if row["protocol"] == last[row["experiment"], row["cell"]]
    }
    return list(by_key.values())


def write_rows(rows: Iterable[Row], file: Path = FILE) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_text(file, text.getvalue())


# ------------------------------------------------------------------ the table


def tasks_page() -> str:
    """docs/tasks-of-the-papers.md, with its table as the file has it now."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE.name} has lost the marks of its table"
    return "".join([before, begin, *(f"{line}\n" for line in table(read_rows())), end, after])


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    head = ("experiment", "data", "metric, %", "mean", "seeds", "constant", "epochs", "seconds")
    yield f"| {' | '.join((*head, 'device'))} |"
    yield "|---|---|---|---|---:|---:|---:|---:|---|"
    for group in _groups(rows, "experiment", "cell", "metric"):
        first = group[0]
        variants = [
            (mine[0]["variant"], [float(row["value"]) for row in mine if row["value"]], len(mine))
            for mine in _groups(group, "variant")
        ]
        means = " · ".join(
            f"{name} {100 * statistics.fmean(values):.1f}" if values else f"{name} lost"
            for name, values, _ in variants
        )
        counts = sorted({many for _, _, many in variants})
        seconds = sorted(float(row["seconds"]) for row in group)
        where = f"{first['data']}, {first['cell']}" if first["cell"] else first["data"]
        constant = f"{100 * float(first['constant']):.1f}" if first["constant"] else "–"
        yield (
            f"| {first['experiment']} | {where} | {first['metric']} | {means} "
            f"| {_range(counts)} | {constant} | {first['epochs']} "
            f"| {_range([round(seconds[0]), round(seconds[-1])])} "
            f"| {' and '.join(sorted({row['device'].partition(',')[0] for row in group}))} |"
        )
    yield ""
    devices = sorted({f"{row['device']}, torch {row['torch']}" for row in rows})
    yield f"Measured on: {'; '.join(devices)}."
    yield ""


def _groups(rows: Sequence[Row], *keys: str) -> list[list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.values())


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{first}" if first == last else f"{first}–{last}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evidence.tasks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stores", nargs="+", type=Path, metavar="STORE", help="of normkit lab run")
    rows = read_rows()
    for path in parser.parse_args(arguments).stores:
        with Store(path) as store:
            rows = merged(rows, rows_of(store))
    print(write_rows(rows))
    write_text(PAGE, tasks_page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
