"""Whatever is wrong with a file is told with its key, its line and what was expected."""

from __future__ import annotations

import re

import pytest

from normkit.lab.experiment.fields import RECORDS, types
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import parse
from normkit.lab.experiment.rules import CHOICES, LIMITS, faults

GOOD = """\
baseline = "bn"
[train]
lr = 0.1
[[variants]]
name = "bn"
[[variants]]
name = "gn"
norm = "gn"
"""


def complaint(text: str, scale: str | None = None) -> str:
    with pytest.raises(BadExperiment) as error:
        parse(text, "file", scale)
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lr = 0.1", "lrr = 0.1", "line 3: unknown key 'lrr' in train. Did you mean 'lr'?"),
        ("lr = 0.1", "learning_rate = 0.1",
         "unknown key 'learning_rate' in train. Did you mean 'lr'?"),
        ("lr = 0.1", 'lr = "0.1"', "line 3: train.lr expects a finite number, got '0.1'"),
        ("lr = 0.1", "lr = inf", "train.lr expects a finite number"),
        ("lr = 0.1", "lr = true", "train.lr expects a finite number, got true"),
        ("lr = 0.1", "epochs = 1.0", "train.epochs expects an integer, got 1.0"),
        ("lr = 0.1", "nesterov = 1", "train.nesterov expects true or false, got 1"),
        ("lr = 0.1", "milestones = 3", "train.milestones expects a list"),
        ("lr = 0.1", 'worker_batch = "two"', 'expects an integer or "none"'),
        ("lr = 0.1", "batch = -1", "line 3: train.batch expects at least 1, or 0 for the whole"),
        ("lr = 0.1", "lr = 0", "train.lr expects more than 0, got 0.0"),
        ("lr = 0.1", 'schedule = "cosin"', "train.schedule is 'cosin'. Did you mean 'cosine'?"),
        ("lr = 0.1", "milestones = [3]", 'belong to schedule = "step"'),
        ("lr = 0.1", 'schedule = "step"', "train.milestones are needed"),
        ("lr = 0.1", 'schedule = "step"\nmilestones = [3, 30]', "training ends after 10 epochs"),
        ("lr = 0.1", 'schedule = "step"\nmilestones = [3, 2]', "in order, got [3, 2]"),
        ("lr = 0.1", "batch = 4\nworker_batch = 8", "line 4: train.worker_batch is 8, more than"),
        ("lr = 0.1", "warmup = 10", "nothing is left"),
        ("lr = 0.1", "floor = 1", "above train.lr"),
        ("lr = 0.1", 'optimizer = "adam"\nnesterov = true', "needs the optimizer sgd"),
        ("lr = 0.1", 'select = "best_validation"', "needs data.validation above 0"),
        ("lr = 0.1", 'epochs = 4\nselect = "median_last_5"', "and there are 4 epochs"),
        ('norm = "gn"', 'norm = "gnn"', "line 8: variants[1].norm is 'gnn'. Did you mean 'gn'?"),
        ('norm = "gn"', 'norm = "ws"', "Did you mean weights = 'ws'?"),
        ('norm = "gn"', 'norm = "xbn"', "Did you mean recipe = 'xbn'?"),
        ('norm = "gn"', "norm = 3", "variants[1].norm is 3."),
        ('norm = "gn"', 'normm = "gn"', "line 8: unknown key 'normm' in variants[1]. Did you mean"),
        ('norm = "gn"', 'norm = "gn"\noptions.group = 2',
         "options.group is not an option of gn. Did you mean"),
        ('norm = "gn"', 'norm = "gn"\noptions = 3', "options expects a table of options, got 3"),
        ('norm = "gn"', "options.groups = 2", "options needs a norm that it belongs to"),
        ('norm = "gn"', 'where = "stem"', "where needs a norm or recipe"),
        ('norm = "gn"', 'norm = "gn"\nwhere = 3', "where expects a string"),
        ('norm = "gn"', 'norm = "gn"\noptions.eps = nan', "options.eps expects numbers"),
        ('norm = "gn"', 'recipe = "xbn"\nrecipe_options.postion = 1',
         "is not an option of xbn. Did you mean"),
        ('norm = "gn"', 'norm = "gn"\nsteps = []', "norm repeats what steps says"),
        ('norm = "gn"', "steps = [{}]", "steps[0] expects one of norm, recipe and weights, got 0"),
        ('norm = "gn"', 'steps = [{ norm = "gn", at = "stem" }]',
         "unknown key 'at' in variants[1].steps[0]"),
        ('norm = "gn"', 'steps = [{ weights = "ws", where = "stem" }]', "weights change every"),
        ('norm = "gn"', "train.learning_rate = 1",
         "line 8: unknown key 'learning_rate' in variants[1].train. Did you mean 'lr'?"),
        ('norm = "gn"', "train = 1", "variants[1].train expects a table of keys, got 1"),
        ('norm = "gn"', "", "line 6: variants[1] ('gn') equals 'bn'."),
        ('name = "gn"', 'name = "bn"', "variants[1].name is 'bn', the name of a variant before it"),
        ('name = "gn"', "", "line 6: variants[1] expects a name, got none"),
        ('name = "gn"', 'name = " "', "variants[1] expects a name, got ' '"),
        ('baseline = "bn"', 'baseline = "bm"',
         "line 1: baseline is 'bm', which is not a variant. Known: bn, gn"),
        ('baseline = "bn"', "", "baseline is missing"),
        ('baseline = "bn"', 'baseline = "bn"\nseeds = 0', "seeds expects a number from 1"),
        ('baseline = "bn"', 'baseline = "bn"\nseeds = [1, 1]', "line 2: seeds expects"),
        ('baseline = "bn"', 'baseline = "bn"\nseeds = 2_000_000_000', "got 2000000000"),
        ("lr = 0.1", "worker_batch = 7", "128 is not a multiple of it: a worker would have 2"),
        ("[train]", '[data]\nname = "digts"\n[train]', "line 3: data.name is 'digts'. Did"),
        ('name = "gn"', 'name = "g\\nn"', "line 7: variants[1].name expects a string on one line"),
        ('baseline = "bn"', 'baseline = "bn"\nseeds = "5"', "got '5'"),
        ('baseline = "bn"', 'baseline = "bn"\nmetric = "acuracy"', "Did you mean 'accuracy'?"),
        ('baseline = "bn"', 'baseline = "bn"\nequivalence = 0', "a fraction, such as 0.005"),
        ('baseline = "bn"', 'baseline = "bn"\ntitle = 3', "line 2: title expects a string, got 3"),
        ('baseline = "bn"', 'baseline = "bn"\nsedes = 3', "line 2: unknown key 'sedes'. Did you"),
        ('baseline = "bn"', 'baseline = "bn"\nscale = "lab"', "scale is 'lab'. The file has no"),
        ('baseline = "bn"', 'baseline = "bn', "line 1, column"),
        ("[train]", "[train", "line 2, column"),
        ("[train]", '[data]\nname = "folder"\n[train]', "data.path is missing"),
        ("[train]", '[watch]\nmeasures = ["esn"]\n[train]', "watch.measures has 'esn'. Did you me"),
        ("[train]", "[data]\ncrop = 4\nresized_crop = true\n[train]", "two kinds of crop"),
        ("[train]", '[model]\nname = "resnet18"\n[train]', "model.name expects native:NAME"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_key_and_line(old: str, new: str, said: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    assert said in complaint(text)


def test_the_good_file_is_good() -> None:
    assert len(parse(GOOD).variants) == 2


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    text = GOOD.replace("lr = 0.1", "lrr = 0.1\nepochs = 'x'")
    text = text.replace('norm = "gn"', 'norm = "gn"\nx = 1')
    said = complaint(text).splitlines()
    assert said[0] == "file has 3 problems:"
    assert [line.split(":")[0].strip() for line in said[1:]] == ["line 3", "line 4", "line 10"]


def test_a_mistake_within_a_scale_is_told_there() -> None:
    text = GOOD + "[scales.lab.train]\nlr = -1\n"
    assert "line 10: scales.lab.train.lr expects more than 0" in complaint(text, "lab")
    assert "there is no scale 'lap'. Did you mean 'lab'?" in complaint(text, "lap")
    assert parse(text).scale == ""


def test_nothing_to_compare() -> None:
    alone = GOOD[: GOOD.index('[[variants]]\nname = "gn"')]
    assert "nothing to compare it with" in complaint(alone)
    assert "variants is missing" in complaint('baseline = "bn"\n')


def test_a_cell_without_its_baseline() -> None:
    text = GOOD.replace('name = "bn"\n', 'name = "bn"\nonly = { "train.lr" = [1] }\n').replace(
        "[train]\nlr = 0.1", '[grid]\n"train.lr" = [1, 2]'
    )
    assert "baseline is 'bn', which is not there at train.lr = 2.0" in complaint(text)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('variant = "bm"\nvalue = 1', "which is not a variant. Known: bn, gn"),
        ('variant = "bn"', "expects a value"),
        ('variant = "bn"\nvalue = "1"', "expects a finite number"),
        ('variant = "bn"\nvalue = 1\nextra = 1', "unknown key 'extra' in published[0]"),
        ('variant = "bn"\nvalue = 300', "expects percent, from 0 to 100, got 300"),
        ('variant = "bn"\nvalue = 1\nmetric = "top5"', "published[0].metric is 'top5'. Known"),
        ('variant = "bn"\nvalue = 1\ncell = { "train.lr" = 3 }', "is not an axis of the grid"),
        ('variant = "bn"\nvalue = 1\ncell = 3', "expects a table of axes"),
        ('variant = "bn"\nalong = "train.lr"\nvalues = { 1 = 2 }', "an axis of the grid"),
        ('variant = "bn"\nvalue = 1\n[[published]]\nvariant = "bn"\nvalue = 2', "repeats an entry"),
    ],
)
def test_published_numbers_that_fit_nowhere(entry: str, said: str) -> None:
    message = complaint(f"{GOOD}[[published]]\n{entry}\n")
    assert said in message
    assert "line " in message


def test_grids_that_nobody_can_train() -> None:
    axes = "".join(f'"model.options.{letter}" = [1, 2, 3, 4, 5, 6, 7, 8]\n' for letter in "abcde")
    said = complaint(f"{GOOD}[grid]\n{axes}")
    assert said == "file, line 9: grid has 32,768 cells, expected 10,000 at most."


def test_published_numbers_name_their_cell() -> None:
    text = GOOD.replace("[train]\nlr = 0.1", '[grid]\n"train.lr" = [1, 2]')
    entry = '[[published]]\nvariant = "bn"\nvalue = 1\n'
    assert "fits 2 cells. Say train.lr as well" in complaint(text + entry)
    assert "the axis has [1.0, 2.0]" in complaint(f'{text}{entry}cell = {{ "train.lr" = 3 }}\n')


def test_the_rules_speak_of_fields_that_exist() -> None:
    fields = {f"{section}.{name}" for section, rec in RECORDS.items() for name in types(rec)}
    assert set(CHOICES) | set(LIMITS) <= fields


def test_the_defaults_break_no_rule() -> None:
    from normkit.lab.experiment import Setting

    assert list(faults(Setting())) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("gpus = 3\nbatch = 64", "train.gpus is 3, and train.batch 64 is not a multiple of it"),
        ("gpus = 2\nbatch = 0", "train.gpus is 2, and train.batch 0 is not a multiple of it"),
        ('statistics = "synchronized"', "needs train.gpus above 1"),
        ("gpus = 2\nbatch = 64\nworker_batch = 64", "each of 2 processes has 32 samples"),
        (
            'gpus = 2\nbatch = 64\nworker_batch = 8\nstatistics = "synchronized"',
            "train.worker_batch asks for the contrary",
        ),
    ],
)
def test_batches_are_divided_among_processes(keys: str, message: str) -> None:
    text = 'baseline = "bn"\n[[variants]]\nname = "bn"\n[[variants]]\nname = "gn"\nnorm = "gn"\n'
    with pytest.raises(BadExperiment, match=re.escape(message)):
        parse(f"{text}[train]\n{keys}\n")
