"""A run's id says exactly what its result depends on, and never changes by accident."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest

from normkit.lab.experiment import Data, Model, ModelStep, Run, Setting, Train, Watch
from normkit.lab.experiment.fields import fit, types
from normkit.lab.experiment.reading import parse

FILE = """
baseline = "bn"
seeds = 2
[[variants]]
name = "bn"
[[variants]]
name = "gn"
norm = "gn"
options = { groups = 4, eps = 1e-5 }
"""


def ids(text: str) -> set[str]:
    return {run.id for run in parse(text).runs()}


def test_ids_are_those_of_all_releases() -> None:
    # written out, since results in people's stores are found by them
    assert [run.id for run in parse(FILE).runs()] == [
        "69a2e0ee1669e515a68d",
        "66e2caff1f88658e7bba",
        "8c1b9e568ca928f9c208",
        "44ef961133987b3794cb",
    ]
    assert Run(Setting(), 1).id == hashed('{"protocol":1,"seed":1,"setting":{}}')
    full = Setting(
        Data("cifar10", crop=4, path="/somewhere"),
        Model("native:resnet20", options={"shortcut": "A"}),
        (ModelStep("norm", "bcn", "stem", {"groups": 4, "eps": 1.0}), ModelStep("weights", "ws")),
        Train(lr=0.05, milestones=(3, 5), schedule="step"),
        Watch(("esm",)),
    )
    assert Run(full, 7).id == hashed(
        '{"protocol":1,"seed":7,"setting":{"data":{"crop":4,"name":"cifar10"},'
        '"model":{"name":"native:resnet20","options":{"shortcut":"A"}},'
        '"steps":[{"kind":"norm","name":"bcn","options":{"eps":1,"groups":4},"where":"stem"},'
        '{"kind":"weights","name":"ws"}],'
        '"train":{"lr":0.05,"milestones":[3,5],"schedule":"step"},"watch":{"measures":["esm"]}}}'
    )


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def test_adding_seeds_or_variants_changes_no_other_run() -> None:
    more = FILE.replace("seeds = 2", "seeds = 5") + '[[variants]]\nname = "in"\nnorm = "in"\n'
    assert ids(FILE) < ids(more)
    assert len(ids(more)) == 15


def test_names_titles_and_order_are_no_part_of_an_id() -> None:
    other = FILE.replace("[[variants]]", 'title = "x"\n[[variants]]', 1)
    other = other.replace('name = "gn"', 'name = "group norm"')
    other = other.replace("groups = 4, eps = 1e-5", "eps = 0.00001, groups = 4.0")
    assert ids(other) == ids(FILE)


def test_sugar_and_steps_are_one() -> None:
    steps = 'steps = [{ norm = "gn", options = { groups = 4, eps = 1e-5 } }]'
    start = FILE.index('norm = "gn"')
    assert ids(FILE[:start] + steps) == ids(FILE)


def test_a_setting_said_in_full_is_the_one_left_to_defaults() -> None:
    said = "[train]\nepochs = 10\nlr = 0.1\nmilestones = []\n[data]\nname = 'digits'\n"
    assert ids(FILE.replace("[[variants]]", said + "[[variants]]", 1)) == ids(FILE)


def test_where_a_copy_of_the_data_lies_is_no_part_of_an_id() -> None:
    here, there = Setting(Data(path="/a")), Setting(Data(path="/b"))
    assert Run(here, 1).id == Run(there, 1).id == Run(Setting(), 1).id
    stated = [Setting(Data("csv", path=p, fingerprint=f)) for p, f in (("/a", "1"), ("/b", "1"))]
    assert Run(stated[0], 1).id == Run(stated[1], 1).id
    assert Run(Setting(Data("csv", path="/a", fingerprint="2")), 1).id != Run(stated[0], 1).id


def test_a_file_is_read_where_its_own_images_are_not() -> None:
    parse(FILE.replace("[[variants]]", "[data]\nname = 'csv'\npath = '/gone'\n[[variants]]", 1))


FIELDS = [
    (section.name, field.name)
    for section in dataclasses.fields(Setting)
    if section.name != "steps"
    for field in dataclasses.fields(type(getattr(Setting(), section.name)))
    if (section.name, field.name)
    not in (("data", "path"), ("data", "fingerprint"), ("code", "folder"))
]


def changed(value: Any, kind: Any, name: str) -> Any:
    """Another value of a field's type."""
    if name == "augment":
        return ({"use": "RandomCrop", "size": 8},)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (3, 5) if "int" in str(kind) else ("esm",)
    if isinstance(value, dict):
        return {"depth": 3}
    if value is None:
        return "x" if "str" in str(kind) else 7
    return value + 1 if isinstance(value, int | float) else f"{value}x"


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_every_field_of_a_setting_is_part_of_the_id(section: str, name: str) -> None:
    record = getattr(Setting(), section)
    other = changed(getattr(record, name), kind := types(type(record))[name], name)
    assert fit(kind, list(other) if isinstance(other, tuple) else other) == other
    setting = dataclasses.replace(
        Setting(), **{section: dataclasses.replace(record, **{name: other})}
    )
    assert Run(setting, 1).id != Run(Setting(), 1).id


def test_steps_and_their_order_are_part_of_the_id() -> None:
    gn, ws = ModelStep("norm", "gn"), ModelStep("weights", "ws")
    found = [
        Run(Setting(steps=steps), 1).id
        for steps in (
            (),
            (gn,),
            (ws,),
            (gn, ws),
            (ws, gn),
            (dataclasses.replace(gn, where="stem"),),
        )
    ]
    assert len(set(found)) == 6


def test_seeds_are_hashed_as_in_revisiting_bn() -> None:
    # semantics of their seeds.py: the last 32 bits of the MD5 of the number's digits
    assert [Run(Setting(), seed).torch_seed() for seed in range(4)] == [
        4186399962,
        1869972635,
        3423897132,
        4071078643,
    ]


def test_ids_are_the_same_in_every_process() -> None:
    code = "from normkit.lab.experiment import Run, Setting; print(Run(Setting(), 1).id)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "3"},
    )
    assert ran.stdout.strip() == Run(Setting(), 1).id


def test_the_runs_of_a_seed_are_finished_together() -> None:
    assert [run.seed for run in parse(FILE).runs()] == [1, 1, 2, 2]
