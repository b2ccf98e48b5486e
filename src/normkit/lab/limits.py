"""Which values of a setting make sense, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from normkit.errors import nearest
from normkit.lab.data.checking import NAMES
from normkit.lab.data.normalization import KINDS
from normkit.lab.experiment import Setting, Train
from normkit.lab.models.build import STEMS
from normkit.lab.train.optimizing import OPTIMIZERS
from normkit.lab.train.schedule import SCHEDULES
from normkit.lab.train.selecting import SELECTIONS
from normkit.lab.train.watching import MEASURES

CHOICES: dict[str, tuple[str, ...]] = {
    "data.train": ("train", "test"),
    "data.normalize": KINDS,
    "model.stem": STEMS,
    "train.optimizer": OPTIMIZERS,
    "train.decay": ("all", "weights"),
    "train.schedule": SCHEDULES,
    "train.per": ("step", "epoch"),
    "train.precision": ("float32", "bf16", "fp16", "float64"),
    "train.select": SELECTIONS,
}

Rule = tuple[Callable[[Any], bool], str]
FROM_ZERO: Rule = (lambda value: value >= 0, "at least 0")
FROM_ONE: Rule = (lambda value: value >= 1, "at least 1")
POSITIVE: Rule = (lambda value: value > 0, "more than 0")
SHARE: Rule = (lambda value: 0 <= value < 1, "from 0 to below 1")
LIMITS: dict[str, Rule] = {
    "data.validation": SHARE,
    "data.split_seed": FROM_ZERO,
    "data.subset": FROM_ONE,
    "data.size": FROM_ONE,
    "data.crop": FROM_ZERO,
    "data.rotation": (lambda value: 0 <= value <= 180, "degrees from 0 to 180"),
    "data.cutout": FROM_ZERO,
    "data.mixup": FROM_ZERO,
    "train.epochs": FROM_ONE,
    "train.batch": (lambda value: value >= 0, "at least 1, or 0 for the whole training set"),
    "train.worker_batch": FROM_ONE,
    "train.accumulate": FROM_ONE,
    "train.lr": POSITIVE,
    "train.momentum": SHARE,
    "train.weight_decay": FROM_ZERO,
    "train.slower_scale": POSITIVE,
    "train.factor": (lambda value: 0 < value < 1, "between 0 and 1"),
    "train.floor": FROM_ZERO,
    "train.power": POSITIVE,
    "train.warmup": FROM_ZERO,
    "train.clip": FROM_ZERO,
    "train.label_smoothing": SHARE,
    "train.evaluate_every": FROM_ONE,
    "watch.every": FROM_ONE,
    "watch.samples": (lambda value: value >= 2, "at least 2"),
}


def faults(setting: Setting) -> Iterator[tuple[str, str]]:
    """Every value that cannot be: its key, and what to say about it."""
    for key, known in CHOICES.items():
        value = _value(setting, key)
        if value not in known:
            yield key, f"is {value!r}. {nearest(value, known)}"
    for key, (fits, expected) in LIMITS.items():
        value = _value(setting, key)
        if value is not None and not fits(value):
            yield key, f"expects {expected}, got {value!r}."
    for measure in setting.watch.measures:
        if measure not in MEASURES:
            yield "watch.measures", f"has {measure!r}. {nearest(measure, MEASURES)}"
    if setting.data.name.partition(":")[0] not in NAMES:
        yield "data.name", f"is {setting.data.name!r}. {nearest(setting.data.name, NAMES)}"
    yield from _of_the_model(setting)
    yield from _of_training(setting.train)
    if setting.train.select == "best_validation" and setting.data.validation == 0:
        yield "train.select", 'is "best_validation", which needs data.validation above 0.'
    if setting.data.crop and setting.data.resized_crop:
        yield "data.crop", "and resized_crop are two kinds of crop. Keep one of them."
    if setting.data.name == "folder" and not setting.data.path:
        yield "data.path", 'is needed for data.name = "folder": where the images are.'


def _of_the_model(setting: Setting) -> Iterator[tuple[str, str]]:
    library, _, name = setting.model.name.partition(":")
    if not (library and name):
        forms = "native:NAME, timm:NAME, torchvision:NAME or package.module:callable"
        yield "model.name", f"expects {forms}, got {setting.model.name!r}."


def _of_training(train: Train) -> Iterator[tuple[str, str]]:
    if train.worker_batch and 0 < train.batch < train.worker_batch:
        yield (
            "train.worker_batch",
            f"is {train.worker_batch}, more than the {train.batch} samples of train.batch.",
        )
    elif train.worker_batch and (rest := train.batch % train.worker_batch):
        yield (
            "train.worker_batch",
            f"is {train.worker_batch}, and train.batch {train.batch} is no multiple of it: "
            f"a worker would have {rest}.",
        )
    if train.nesterov and not (train.optimizer == "sgd" and train.momentum > 0):
        yield "train.nesterov", "needs the optimizer sgd with momentum above 0."
    if train.warmup >= train.epochs >= 1 and train.warmup:
        yield "train.warmup", f"is {train.warmup:g} of {train.epochs} epochs: nothing is left."
    if train.floor > train.lr > 0:
        yield "train.floor", f"is {train.floor:g}, above train.lr = {train.lr:g}."
    if train.select == "median_last_5" and 1 <= train.epochs < 5:
        yield "train.select", f'is "median_last_5", and there are {train.epochs} epochs.'
    yield from _of_milestones(train)


def _of_milestones(train: Train) -> Iterator[tuple[str, str]]:
    marks = train.milestones
    if train.schedule == "step":
        if not marks:
            yield "train.milestones", 'are needed for schedule = "step": epochs, such as [30, 60].'
    elif marks:
        yield (
            "train.milestones",
            f'belong to schedule = "step", and it is {train.schedule!r}. Try milestones = [].',
        )
    if list(marks) != sorted(set(marks)) or min(marks, default=1) < 1:
        yield "train.milestones", f"expects epochs from 1 up, in order, got {list(marks)}."
    elif marks and train.schedule == "step" and marks[-1] >= train.epochs:
        yield "train.milestones", f"has {marks[-1]}, and training ends after {train.epochs} epochs."


def _value(setting: Setting, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(setting, section), name)
