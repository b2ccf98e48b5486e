"""The committed results of all claims, and the rows that they give."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from normkit.lab.experiment import Experiment
from tools.evidence.claims import ALL, experiment_of
from tools.evidence.judge import all_seeds, judge, judge_left
from tools.evidence.missing import RunCosts
from tools.evidence.results import RESULTS, read_results, read_sweeps
from tools.evidence.words import POINTS


class Evidence:
    """The committed results, and the rows of every claim."""

    def __init__(self, folder: Path = RESULTS) -> None:
        files = dict.fromkeys(claim.file for claim in ALL if claim.file)
        self.experiments = {file: experiment_of(file) for file in files}
        self.results = {
            file: read_results(experiment, folder) for file, experiment in self.experiments.items()
        }
        self.sweeps = read_sweeps(folder)
        # experiments share runs, some have more seeds of them than others
        self.pool = {run: each for file in files for run, each in self.results[file].items()}
        self.rows = [judge(claim, self.pool) for claim in ALL]
        # who has less accuracy can lose less: of claims about lost accuracy, what is left
        self.left = [
            judge_left(claim, self.pool) if claim.measure in POINTS else [] for claim in ALL
        ]

    def pooled(self, file: str) -> Experiment:
        """An experiment with the seeds of the one that has most, as claims are judged."""
        return dataclasses.replace(self.experiments[file], seeds=all_seeds())

    def runs(self) -> int:
        """How many were trained; experiments share some."""
        return len({run for results in self.results.values() for run in results})

    def planned(self) -> int:
        runs = (experiment.runs() for experiment in self.experiments.values())
        return len({run.id for each in runs for run in each})

    def total(self, kind: str) -> float:
        """Seconds of all sweeps on a GPU or on a CPU."""
        return sum(each["seconds"] for each in self.sweeps if device_kind(each["device"]) == kind)

    def seconds(self, file: str) -> dict[str, float]:
        """GPU and CPU seconds of an experiment's runs: their part of the time of their sweep."""
        spent: dict[str, float] = {}
        costs = RunCosts(self.pool, self.sweeps)
        for result in self.results[file].values():
            kind = device_kind(result.environment.get("device", ""))
            spent[kind] = spent.get(kind, 0.0) + costs.of(result)
        return spent


def device_kind(device: str) -> str:
    return "CPU" if device.startswith("CPU") else "GPU"
