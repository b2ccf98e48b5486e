"""Which values of a setting make sense, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from normkit.errors import nearest
from normkit.lab.experiment.records import OWN_DATA, Setting, Train

CHOICES: dict[str, tuple[str, ...]] = {
    "data.train": ("train", "test"),
    "data.normalize": ("dataset", "fixed", "halves", "lite", "none"),
    "model.stem": ("own", "cifar"),
    "train.optimizer": ("sgd", "adam", "adamw", "lars", "lamb"),
    "train.decay": ("all", "weights"),
    "train.schedule": ("constant", "step", "cosine", "poly", "one_cycle"),
    "train.per": ("step", "epoch"),
    "train.precision": ("float32", "bf16", "fp16", "float64"),
    "train.statistics": ("process", "synchronized"),
    "train.select": ("last", "best_validation", "median_last_5"),
}

NATIVE_OPTIMIZERS = ("sgd", "adam", "adamw")
OPEN = ("train.optimizer", "train.schedule")  # or a class: torch.optim:RMSprop, file.py:Class

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
    "train.gpus": FROM_ONE,
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
    "train.ema": SHARE,
    "train.stop_after": FROM_ZERO,
    "train.layer_decay": (lambda value: 0 < value <= 1, "more than 0, up to 1"),
    "watch.every": FROM_ONE,
    "watch.samples": (lambda value: value >= 2, "at least 2"),
}

Fault = tuple[str, str]  # a key, and what to say about its value


def faults(setting: Setting) -> Iterator[Fault]:
    """Every value that cannot be."""
    for section in ("data", "model", "train", "watch"):
        yield from section_faults(section, getattr(setting, section))
    if setting.train.select == "best_validation" and not _validates(setting):
        yield "train.select", 'is "best_validation", which needs data.validation above 0.'
    if setting.train.stop_after and not _validates(setting):
        yield "train.stop_after", "needs data.validation above 0."


def _validates(setting: Setting) -> bool:
    """Whether there is a validation set; data of one's own may bring it along."""
    return setting.data.validation > 0 or "." in setting.data.name.partition(":")[0]


def section_faults(section: str, record: Any) -> Iterator[Fault]:
    """Every value of one record of a setting that cannot be."""
    for key, choices in CHOICES.items():
        if key.startswith(f"{section}."):
            value = getattr(record, key.partition(".")[2])
            if value not in choices and not (key in OPEN and ":" in value):
                yield key, f"is {value!r}. {nearest(value, choices)}"
    for key, (fits, expected) in LIMITS.items():
        if key.startswith(f"{section}."):
            value = getattr(record, key.partition(".")[2])
            if value is not None and not fits(value):
                yield key, f"expects {expected}, got {value!r}."
    if section == "data":
        if record.crop and record.resized_crop:
            yield "data.crop", "and data.resized_crop are two kinds of crop. Keep one of them."
        if (record.options or record.augment) and "." not in record.name.partition(":")[0]:
            key = "options" if record.options else "augment"
            yield f"data.{key}", 'belongs to data of your own, such as data = "mydata.py:make".'
        for table in record.augment:
            if not isinstance(table.get("use"), str):
                yield "data.augment", 'expects tables such as {use = "RandomCrop", size = 28}.'
        for key in ("image", "label", "fingerprint"):
            if record.name not in OWN_DATA and getattr(record, key) is not None:
                names = ", ".join(OWN_DATA)
                yield f"data.{key}", f"belongs to images of your own: data.name = {names}."
        if record.name in OWN_DATA and not record.path:
            yield (
                "data.path",
                f"is missing: data.name = {record.name!r} needs {OWN_DATA[record.name]}.",
            )
    elif section == "model":
        library, _, name = record.name.partition(":")
        if not (library and name):
            forms = "native:NAME, timm:NAME, torchvision:NAME, file.py:callable or module:callable"
            yield "model.name", f"expects {forms}, got {record.name!r}."
    elif section == "train":
        yield from _training_faults(record)


def _process_faults(train: Train) -> Iterator[Fault]:
    if train.gpus <= 1:
        if train.statistics != "process":
            yield "train.statistics", f"is {train.statistics!r}, which needs train.gpus above 1."
        return
    if train.batch % train.gpus or not train.batch:
        yield (
            "train.gpus",
            f"is {train.gpus}, and train.batch {train.batch} is not a multiple of it.",
        )
    elif train.worker_batch and train.batch // train.gpus % train.worker_batch:
        yield (
            "train.worker_batch",
            f"is {train.worker_batch}, and each of {train.gpus} processes has "
            f"{train.batch // train.gpus} samples, which is not a multiple of it.",
        )
    if train.worker_batch and train.statistics == "synchronized":
        yield "train.statistics", 'is "synchronized", and train.worker_batch asks for the contrary.'


def _training_faults(train: Train) -> Iterator[Fault]:
    yield from _process_faults(train)
    if train.worker_batch and 0 < train.batch < train.worker_batch:
        yield (
            "train.worker_batch",
            f"is {train.worker_batch}, more than the {train.batch} samples of train.batch.",
        )
    elif train.worker_batch and (rest := train.batch % train.worker_batch):
        yield (
            "train.worker_batch",
            f"is {train.worker_batch}, and train.batch {train.batch} is not a multiple of it: "
            f"a worker would have {rest}.",
        )
    if train.optimizer_options and train.optimizer in NATIVE_OPTIMIZERS:
        usual = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[train.optimizer]
        yield (
            "train.optimizer_options",
            f'belong to a class. Try train.optimizer = "torch.optim:{usual}".',
        )
    lab = [name for name in CHOICES["train.schedule"] if name != "one_cycle"]
    if train.schedule_options and train.schedule in lab:
        yield "train.schedule_options", "belong to one_cycle, or to a class of lr_scheduler."
    for pattern, factor in train.rates.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor < 0:
            yield "train.rates", f"expects numbers from 0 up, got {factor!r} for {pattern!r}."
    if train.loss_options and not train.loss:
        yield "train.loss_options", "belong to train.loss, which is not there."
    if train.loss and train.label_smoothing:
        yield "train.label_smoothing", "belongs to the task's own loss. Try train.loss_options."
    if train.nesterov and not (train.optimizer == "sgd" and train.momentum > 0):
        yield "train.nesterov", "needs the optimizer sgd with momentum above 0."
    if train.warmup >= train.epochs >= 1 and train.warmup:
        yield "train.warmup", f"is {train.warmup:g} of {train.epochs} epochs: nothing is left."
    if train.floor > train.lr > 0:
        yield "train.floor", f"is {train.floor:g}, above train.lr = {train.lr:g}."
    if train.select == "median_last_5" and 1 <= train.epochs < 5:
        yield "train.select", f'is "median_last_5", and there are {train.epochs} epochs.'
    epochs = train.milestones
    if train.schedule == "step":
        if not epochs:
            yield "train.milestones", 'are needed for schedule = "step": epochs, such as [30, 60].'
    elif epochs:
        yield (
            "train.milestones",
            f'belong to schedule = "step", and it is {train.schedule!r}. Try milestones = [].',
        )
    if list(epochs) != sorted(set(epochs)) or min(epochs, default=1) < 1:
        yield "train.milestones", f"expects epochs from 1 up, in order, got {list(epochs)}."
    elif epochs and train.schedule == "step" and epochs[-1] >= train.epochs:
        yield (
            "train.milestones",
            f"has {epochs[-1]}, and training ends after {train.epochs} epochs.",
        )
