"""The file of what the tasks of the papers have reached, and how stores are added to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from normkit.lab.experiment.reading import read
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.store import Store
from normkit.lab.store.experiments import StoredExperiment
from tools.evidence.tasks import merged, read_rows, rows_of, table, write_rows

ROOT = Path(__file__).parents[2]


def test_rows_are_of_experiments_that_are_there() -> None:
    rows = read_rows()
    assert rows
    for name in {row["experiment"] for row in rows}:
        assert (ROOT / "experiments" / f"{name}.toml").exists(), name


@pytest.fixture
def stored(tmp_path: Path) -> list[dict[str, str]]:
    """Made-up results of two seeds, through a store and the file."""
    experiment = read(ROOT / "experiments" / "ws-bcn-table-11.toml", "lab")
    runs = experiment.variant("bn").runs(experiment.seeds)[:2]
    with Store(tmp_path / "results.sqlite") as store:
        store.add(runs)
        store.remember(StoredExperiment.of(experiment))
        for run, miou in zip(runs, (0.40, 0.42), strict=True):
            last = Epoch(1, metrics={"test_miou": miou, "test_constant_miou": 0.02})
            store.finish(Result(run.id, DONE, (1,), (last,), seconds=61.0, parameters=1))
        rows = list(rows_of(store))
    assert read_rows(write_rows(rows, tmp_path / "tasks.csv")) == rows
    return rows


def test_a_table_has_means_seeds_and_the_constant_answer(stored: list[dict[str, str]]) -> None:
    line = next(line for line in table(stored) if line.startswith("| ws-bcn"))
    fields = [field.strip() for field in line.strip("|").split("|")]
    assert fields[:6] == ["ws-bcn-table-11", "camvid", "miou", "bn 41.0", "2", "2.0"]
    assert fields[7] == "61"


def test_a_table_says_which_rows_were_measured_where(stored: list[dict[str, str]]) -> None:
    other = {**stored[0], "experiment": "bgn-table-7", "device": "CPU, AVX512"}
    on_gpu = [{**row, "device": "NVIDIA H200"} for row in stored]
    lines = [line.split("|") for line in table([*on_gpu, other]) if line.startswith("| ")]
    assert [fields[-2].strip() for fields in lines] == ["device", "NVIDIA H200", "CPU"]


def test_runs_of_another_protocol_are_no_part_of_a_mean(stored: list[dict[str, str]]) -> None:
    again = [{**stored[0], "value": "0.5"}]
    assert [row["value"] for row in merged(stored, again)] == ["0.5", "0.42"]
    other = [{**stored[0], "protocol": "longer"}]
    assert merged(stored, other) == other
