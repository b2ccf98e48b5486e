"""What a file alone does not show: data sets that are missing, and models that cannot be made.

    check(experiment)        # an error before anything trains, or nothing

``reading`` has checked the names and values; here the data sets are looked for, and each model is
built, converted and run once on a few random images, and on as few as an epoch ends with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from normkit.catalog import ENTRIES
from normkit.conversion.recipes import RECIPES
from normkit.errors import NormkitError, OptionError
from normkit.lab import data
from normkit.lab.data.records import LeftOut
from normkit.lab.data.sampling import seeded
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.records import (
    OWN_DATA,
    Data,
    Experiment,
    ModelStep,
    Run,
    Setting,
    Train,
    Variant,
    Watch,
)
from normkit.lab.experiment.rules import NATIVE_OPTIMIZERS
from normkit.lab.models.variant import build_variant, learning_rate_followers
from normkit.lab.own_code import own_error_words
from normkit.lab.tasks import Task, load_sets, make_task, sets_key
from normkit.lab.tasks.classification import Classification
from normkit.lab.tasks.sets import is_own
from normkit.lab.train import Training
from normkit.lab.train.batches import EpochPlan
from normkit.layers.base import Normalizer

Tell = Callable[[str], None]
BAD_DATA = "cannot be trained on its data"  # where a variant's set is missing, or not as expected
Shape = tuple[int, ...]  # channels, height, width

FEW_IMAGES = 4  # that a model is tried with; workers with more are not worth the time
LARGE_SIDE = 64  # of images of which two have to be enough
# what a step is tried with, beside the model
CHOSEN = (
    "loss", "loss_options", "optimizer", "optimizer_options", "schedule", "schedule_options",
    "rates",
)  # fmt: skip
# of two settings that differ in these, a norm is not what makes the difference
SAME_GROUND = (
    ("data", "name"), ("data", "options"), ("data", "train"), ("data", "subset"),
    ("model", "name"), ("task", "name"),
)  # fmt: skip


def check(experiment: Experiment, tell: Tell = lambda message: None) -> list[str]:
    """Look for the data sets, count the classes and the batches, then try the models.

    ``tell`` hears what is being tried: large networks take a second or two each. What is returned
    are cautions: what need not be wrong, but looks like it.
    """
    tell("Looking for the data")
    cautions = check_data(experiment)
    own = [each for each in _distinct_data(experiment) if each.setting.data.name in OWN_DATA]

    def look(variant: Variant) -> None:
        spec = variant.setting.data
        tell(f'{spec.path} has data.fingerprint = "{data.fingerprint(spec)}"')

    _try_each(experiment, own, look, BAD_DATA)
    check_metric(experiment)
    check_batches(experiment)
    return [*cautions, *check_models(experiment, tell)]


def check_data(experiment: Experiment) -> list[str]:
    """An error that names every data set that is unknown, missing or damaged; cautions are what a
    reader of files warns of, such as a box that it leaves out."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", LeftOut)
        _try_each(
            experiment,
            _distinct_data(experiment),
            lambda variant: make_task(variant.setting).locate(variant.setting),
            BAD_DATA,
        )
    for each in told:
        if each.category is not LeftOut:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return list(dict.fromkeys(str(each.message) for each in told if each.category is LeftOut))


def check_metric(experiment: Experiment) -> None:
    """An error where the metric says nothing about the data, such as top-5 of five classes."""

    def attempt(variant: Variant) -> None:
        task = make_task(variant.setting)
        task.check_metric(experiment.metric, task.classes_and_shape(variant.setting)[0])

    _try_each(experiment, _distinct_data(experiment), attempt, "cannot be judged")


def check_batches(experiment: Experiment) -> None:
    """An error that names every variant that has not the samples it asks for."""
    count = _once(lambda setting: make_task(setting).training_samples(setting))
    _try_each(
        experiment,
        experiment.variants,
        lambda variant: last_batch(variant.setting, count),
        "cannot be trained",
    )


def _once(function: Callable[[Setting], Any]) -> Callable[[Setting], Any]:
    """A function of the data of a setting: a large folder is listed once."""
    known: dict[str, Any] = {}

    def asked(setting: Setting) -> Any:
        key = sets_key(setting)
        if key not in known:
            known[key] = function(setting)
        return known[key]

    return asked


def check_models(experiment: Experiment, tell: Tell = lambda message: None) -> list[str]:
    """An error that names every variant whose model cannot be built, converted or run."""
    variants = list(_distinct_models(experiment))
    numbers = iter(range(1, len(variants) + 1))
    cautions: dict[str, None] = {}

    def attempt(variant: Variant) -> None:
        tell(f"Trying model {next(numbers)} of {len(variants)}: {_name(variant)}")
        cautions.update(dict.fromkeys(try_model(variant.setting)))

    _try_each(experiment, variants, attempt, "cannot be trained")
    return list(cautions)


def different_ground(experiment: Experiment) -> list[str]:
    """A caution for each variant that is not compared with the baseline on the same ground.

    A cell of the grid has a baseline of its own; variants of one cell share it.
    """
    cautions: dict[str, None] = {}
    for variant in experiment.variants:
        base = experiment.variant(experiment.baseline, variant.cell)
        keys = [
            f"{section}.{key}"
            for section, key in SAME_GROUND
            if getattr(getattr(variant.setting, section), key)
            != getattr(getattr(base.setting, section), key)
        ]
        if keys:
            cautions[
                f"{variant.name!r} is compared with {experiment.baseline!r}, which has another "
                f"{' and '.join(keys)}. For a baseline of its own, try "
                + " and ".join(f'"{key}"' for key in keys)
                + " as an axis of [grid]."
            ] = None
    return list(cautions)


# ------------------------------------------------------------------ one of each kind of variant


def _distinct_data(experiment: Experiment) -> Iterable[Variant]:
    """One variant for each data set."""
    distinct: dict[str, Variant] = {}
    for variant in experiment.variants:
        distinct.setdefault(sets_key(_data_only(variant.setting)), variant)
    return distinct.values()


def _data_only(setting: Setting) -> Setting:
    """Of a setting, what its images depend on."""
    spec = setting.data
    images = Data(
        name=spec.name,
        path=spec.path,
        image=spec.image,
        label=spec.label,
        fingerprint=spec.fingerprint,
        size=spec.size,
        options=spec.options,
        augment=spec.augment,
    )
    loss = Train(loss=setting.train.loss, loss_options=setting.train.loss_options)
    return Setting(data=images, task=setting.task, train=loss, code=setting.code)


def _distinct_models(experiment: Experiment) -> Iterable[Variant]:
    """One variant for each model on a data set, by all that a trial of it can depend on."""
    distinct: dict[str, Variant] = {}
    count = _once(lambda setting: make_task(setting).training_samples(setting))
    look = _once(lambda setting: make_task(setting).classes_and_shape(setting))
    for variant in experiment.variants:
        setting = variant.setting
        only = _data_only(setting)
        _, shape = look(only)
        links = any(map(_links_samples, setting.steps))
        samples = _sharing_statistics(setting.train)
        if not (links or any(map(_depends_on_batch, setting.steps))):
            samples = min(samples, _few(shape))
        worker = None if setting.train.worker_batch is None else samples
        chosen = {k: getattr(setting.train, k) for k in CHOSEN}
        train = Train(batch=samples, worker_batch=worker, **chosen)
        last = last_batch(setting, count)
        end = f"{last.batch}" if links else f"{last.sharing == 1}"
        same = Run(replace(only, model=setting.model, steps=setting.steps, train=train), 0)
        distinct.setdefault(f"{same.id} {setting.data.path} {end}", variant)
    return distinct.values()


def _links_samples(step: ModelStep) -> bool:
    layer = ENTRIES.get(step.name) if step.kind == "norm" else None
    return layer is not None and layer.card.links_samples


def _depends_on_batch(step: ModelStep) -> bool:
    """Whether a step makes another layer for another batch size."""
    if step.kind != "recipe":
        return False
    untrained = RECIPES[step.name].untrained
    return untrained(step.options, 1) != untrained(step.options, 2)


def _name(variant: Variant) -> str:
    where = ", ".join(f"{axis} = {value!r}" for axis, value in variant.cell)
    return f"{variant.name!r}" + (f" at {where}" if where else "")


def _try_each(
    experiment: Experiment,
    variants: Iterable[Variant],
    attempt: Callable[[Variant], object],
    failure: str,
) -> None:
    """One error for all variants that fail, and each kind of failure once."""
    errors: dict[str, str] = {}
    for variant in variants:
        try:
            attempt(variant)
        except NormkitError as error:
            errors.setdefault(str(error), f"{_name(variant)} {failure}: {error}")
    texts = list(errors.values())
    if len(texts) == 1:
        raise BadExperiment(f"{experiment.name}: variant {texts[0]}")
    if texts:
        listed = "".join(f"\n  {each}" for each in texts)
        raise BadExperiment(f"{experiment.name} has {len(texts)} problems:{listed}")


# ------------------------------------------------------------------ a trial of a model


@dataclass(frozen=True)
class LastBatch:
    """The end of an epoch, which may have fewer samples than the batches before it."""

    total: int  # samples of the epoch
    batch: int  # of the last batch
    sharing: int  # the fewest that share statistics, in any batch

    def __str__(self) -> str:
        alone = self.sharing < self.batch
        share = f", and a worker has {self.sharing} of them" if alone else ""
        return (
            f"the last batch of an epoch has {self.batch} of {self.total:,} training samples{share}"
        )


def last_batch(setting: Setting, count: Callable[[Setting], int] | None = None) -> LastBatch:
    """What an epoch of a setting ends with; an error if it has no batch at all.

    >>> print(last_batch(Setting(Data("digits"), train=Train(batch=64, worker_batch=4))))
    the last batch of an epoch has 29 of 1,437 training samples, and a worker has 1 of them
    """
    count = count or make_task(setting).training_samples
    plan = EpochPlan.of(setting.train, count(setting), make_task(setting).batch_size(setting))
    batch = plan.size(plan.batches - 1)
    worker = setting.train.sharing_statistics() or plan.batch
    sharing = min(size % worker or worker for size in (plan.batch, batch))
    return LastBatch(plan.samples, batch, sharing)


def try_model(setting: Setting) -> list[str]:
    """Build the model of a setting, and run it once in training mode and once in eval mode.

    What is returned are cautions.
    """
    task = make_task(setting)
    classes, shape = task.classes_and_shape(setting)
    try:
        model = build_variant(setting, classes, shape, seed=1, task=task)
    except NormkitError:
        raise
    except (Exception, SystemExit) as error:  # of options that do not fit
        raise OptionError(f"the model: {type(error).__name__}: {error}") from error
    for layer in learning_rate_followers(model):
        layer.set_update_rate(setting.train.lr)
    norms = [module for module in model.modules() if isinstance(module, Normalizer)]
    multiple = max((norm.batch_multiple for norm in norms), default=1)
    samples = max(multiple, min(_sharing_statistics(setting.train), _few(shape)))
    cautions = try_step(setting) if has_choices(setting) else []
    for training in (True, False):
        _run(task, model.train(training), samples, classes, shape)
    last = last_batch(setting)
    sizes = {last.batch % multiple} - {0}
    if last.sharing == 1 < samples:
        sizes.add(1)
    for size in sizes:  # said at the beginning of an epoch, not at its end
        try:
            _run(task, model.train(), size, classes, shape)
        except NormkitError as error:
            raise OptionError(f"{last}: {error} Try train.drop_last = true.") from error
    return cautions


def has_choices(setting: Setting) -> bool:
    """Whether parts of training are the author's own, or chosen by a name that only says where."""
    train = setting.train
    chosen = (train.loss, train.rates, setting.task.metrics, setting.code.hashes)
    lab = train.optimizer in NATIVE_OPTIMIZERS and ":" not in train.schedule
    return any(chosen) or not lab or train.schedule == "one_cycle"


def try_step(setting: Setting) -> list[str]:
    """One step and one batch of evaluation with what the author has written or chosen.

    Sets of the lab, which may be large, are stood in for by drawn images of their shape.
    """
    task = make_task(setting)
    few = replace(setting.train, batch=min(setting.train.batch or FEW_IMAGES, FEW_IMAGES))
    few = replace(few, worker_batch=None, compile=False, accumulate=1, drop_last=False)
    trial = replace(setting, train=few, watch=Watch())
    if is_own(setting.data.name) or type(task).load not in (Task.load, Classification.load):
        sets = load_sets(setting)
    else:
        classes, shape = task.classes_and_shape(setting)
        # a few of the classes: with five samples of each, large images would not be few
        sizes = "x".join(map(str, (*shape, min(classes, FEW_IMAGES), 5 * FEW_IMAGES)))
        share = 0.5 if setting.data.validation else 0.0
        sets = replace(data.load(Data(f"synthetic:{sizes}", validation=share)), classes=classes)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an untrained model, a handful of samples
        return Training(Run(trial, 1), sets).try_out()


def _run(task: Task, model: nn.Module, samples: int, classes: int, shape: Shape) -> None:
    try:
        with torch.no_grad(), seeded(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # random images of no meaning
            task.try_model(model, samples, classes, shape)
    except NormkitError:
        raise
    except (Exception, SystemExit) as error:
        raise OptionError(
            f"the model does not take {samples} images of {'×'.join(map(str, shape))}: "
            f"{own_error_words(error)}"
        ) from error


def _few(shape: Shape) -> int:
    return FEW_IMAGES if max(shape[1:], default=1) <= LARGE_SIDE else 2


def _sharing_statistics(train: Train) -> int:
    """How many samples share statistics."""
    return train.sharing_statistics() or FEW_IMAGES
