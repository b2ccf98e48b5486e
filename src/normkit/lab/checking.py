"""What a file alone does not show: data sets that are missing, and models that cannot be made.

    check(experiment)        # an error before anything trains, or nothing

``reading`` has checked the names and values; here the data sets are looked for, and each model is
built, converted and run once on a few random images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from normkit.errors import NormkitError
from normkit.lab import data
from normkit.lab.experiment import Data, Experiment, Run, Setting, Step, Train, Variant
from normkit.lab.last_batches import last_of
from normkit.lab.problems import BadExperiment
from normkit.lab.train.objective import FIVE
from normkit.lab.trying import Shape, expected, few, together, try_model

Tell = Callable[[str], None]


def nobody(said: str) -> None:
    """Does not listen."""


def check(experiment: Experiment, tell: Tell = nobody) -> None:
    """Look for the data sets, count the classes and the batches, then try the models.

    ``tell`` hears what is being tried: large networks take a second or two each.
    """
    tell("Looking for the data")
    check_data(experiment)
    check_metric(experiment)
    check_batches(experiment)
    check_models(experiment, tell)


def check_data(experiment: Experiment) -> None:
    """An error that names every data set that is unknown, missing or damaged."""
    found: dict[str, str] = {}
    for variant in _distinct(experiment, "data"):
        try:
            data.locate(variant.setting.data)
        except NormkitError as error:
            found.setdefault(str(error), _name(variant))
    _complain(experiment, found, "has no data")


def check_metric(experiment: Experiment) -> None:
    """An error where the right answer is always among the five likeliest."""
    if "top5" not in experiment.metric:
        return
    for variant in _distinct(experiment, "data"):
        classes, _ = expected(variant.setting.data)
        if classes <= FIVE:
            raise BadExperiment(
                f"{experiment.name}: metric is {experiment.metric!r}, and "
                f"{variant.setting.data.name} has {classes} classes. Try accuracy or error."
            )


def check_batches(experiment: Experiment) -> None:
    """An error that names every variant that has not the samples it asks for."""
    found: dict[str, str] = {}
    count = cache(data.training_samples)  # a large folder is listed once
    for variant in experiment.variants:
        try:
            last_of(variant.setting, count)
        except NormkitError as error:
            found.setdefault(str(error), _name(variant))
    _complain(experiment, found, "cannot be trained")


def check_models(experiment: Experiment, tell: Tell = nobody) -> None:
    """An error that names every variant whose model cannot be built, converted or run."""
    found: dict[str, str] = {}
    different = list(_distinct(experiment, "model"))
    for number, variant in enumerate(different, 1):
        tell(f"Trying model {number} of {len(different)}: {_name(variant)}")
        try:
            try_model(variant.setting)
        except NormkitError as error:
            found.setdefault(str(error), _name(variant))
    _complain(experiment, found, "cannot be trained")


def _distinct(experiment: Experiment, what: str) -> Iterable[Variant]:
    """One variant for each data set, or for each model on a data set."""
    found: dict[str, Variant] = {}
    count, look = cache(data.training_samples), cache(expected)
    for variant in experiment.variants:
        setting = variant.setting
        spec = Data(name=setting.data.name, path=setting.data.path, size=setting.data.size)
        same, end = Setting(data=spec), ""
        if what == "model":
            _, shape = look(spec)
            same = Setting(spec, setting.model, setting.steps, _batches(setting, shape))
            last = last_of(setting, count)
            end = f"{last.batch}" if _links(setting) else f"{last.together == 1}"
        found.setdefault(f"{Run(same, 0).id} {spec.path} {end}", variant)
    return found.values()


def _batches(setting: Setting, shape: Shape) -> Train:
    """Of batch sizes, what a model can depend on."""
    train, whole = setting.train, together(setting.train)
    if not (_links(setting) or any(map(_counts, setting.steps))):
        whole = min(whole, few(shape))
    return Train(batch=whole, worker_batch=None if train.worker_batch is None else whole)


def _links(setting: Setting) -> bool:
    return any(step.name == "dn" for step in setting.steps)


def _counts(step: Step) -> bool:
    """Whether a step makes another layer for another batch size."""
    return (step.kind, step.name) == ("recipe", "bgn") and "groups" not in step.options


def _name(variant: Variant) -> str:
    where = ", ".join(f"{axis} = {value!r}" for axis, value in variant.cell)
    return f"{variant.name!r}" + (f" at {where}" if where else "")


def _complain(experiment: Experiment, found: dict[str, str], what: str) -> None:
    if not found:
        return
    said = [f"{name} {what}: {error}" for error, name in found.items()]
    if len(said) == 1:
        raise BadExperiment(f"{experiment.name}: variant {said[0]}")
    listed = "".join(f"\n  {each}" for each in said)
    raise BadExperiment(f"{experiment.name} has {len(said)} problems:{listed}")
