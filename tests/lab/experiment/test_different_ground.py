"""What is compared with what: the baseline of the same cell, on the same data and network."""

from __future__ import annotations

from normkit.lab.experiment.checks import different_ground
from normkit.lab.experiment.reading import parse
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.statistics import compare

FILE = """
baseline = "bn"
seeds = 3
[[variants]]
name = "bn"
[[variants]]
name = "gn"
norm = "gn"
"""


def test_each_network_has_a_baseline_of_its_own() -> None:
    """gn lies between the networks' baselines: across cells every verdict would be reversed."""
    experiment = parse(f'{FILE}[grid]\n"model.name" = ["native:resnet20", "native:mlp"]')
    level = {"native:resnet20": {"bn": 0.9, "gn": 0.7}, "native:mlp": {"bn": 0.5, "gn": 0.7}}
    results = {}
    for variant in experiment.variants:
        for run in variant.runs(experiment.seeds):
            score = level[variant.setting.model.name][variant.name] + run.seed / 1000
            epoch = Epoch(1, test_accuracy=score + run.seed**2 / 10_000 * (variant.name == "gn"))
            results[run.id] = Result(run.id, DONE, (1,), (epoch,), 1.0, 1)
    found = {dict(each.cell)["model.name"]: each for each in compare(experiment, results)}
    assert {name: each.verdict for name, each in found.items()} == {
        "native:resnet20": "worse",
        "native:mlp": "better",
    }
    assert abs(found["native:resnet20"].baseline_mean - 0.902) < 1e-12
    assert abs(found["native:mlp"].baseline_mean - 0.502) < 1e-12
    assert different_ground(experiment) == []


def test_networks_that_share_one_baseline_are_told() -> None:
    text = f'{FILE}[[variants]]\nname = "mlp gn"\nnorm = "gn"\nmodel.name = "native:mlp"'
    assert different_ground(parse(text)) == [
        "'mlp gn' is compared with 'bn', which has another model.name. For a baseline of its own, "
        'try "model.name" as an axis of [grid].'
    ]
