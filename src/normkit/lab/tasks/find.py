"""From the name of a task to the task."""

from __future__ import annotations

import inspect

import torch

from normkit.errors import NormkitError, OptionError, UnknownName, nearest
from normkit.lab.data import Sets
from normkit.lab.experiment.records import Setting, TaskSpec
from normkit.lab.own_code import error_place, find, is_reference, source_place, verify
from normkit.lab.tasks.adaptation import Adaptation
from normkit.lab.tasks.adversarial import Adversarial
from normkit.lab.tasks.architecture_search import ArchitectureSearch
from normkit.lab.tasks.base import Task, TaskError
from normkit.lab.tasks.classification import Classification
from normkit.lab.tasks.criteria import OwnMetric, criterion_of
from normkit.lab.tasks.detection import Detection
from normkit.lab.tasks.few_shot import FewShot
from normkit.lab.tasks.segmentation import Segmentation
from normkit.lab.tasks.supervised import Supervised
from normkit.lab.tasks.video import Video

TASKS: dict[str, type[Task]] = {
    "adaptation": Adaptation,
    "adversarial": Adversarial,
    "architecture-search": ArchitectureSearch,
    "classification": Classification,
    "detection": Detection,
    "few-shot": FewShot,
    "segmentation": Segmentation,
    "supervised": Supervised,
    "video": Video,
}


def task_names() -> list[str]:
    """The tasks of the lab.

    >>> "classification" in task_names()
    True
    """
    return sorted(TASKS)


def task_class(spec: TaskSpec, folder: str = "") -> type[Task]:
    """The class of a task: of the lab, or file.py:Class and package.module:Class."""
    if spec.name in TASKS:
        return TASKS[spec.name]
    if not is_reference(spec.name):
        hint = nearest(spec.name, TASKS)
        raise UnknownName(f"there is no task {spec.name!r}. {hint} Of your own: file.py:Class.")
    found = find(spec.name, folder)
    if not (isinstance(found, type) and issubclass(found, Task)):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise OptionError(
            f"{spec.name} is a {kind}, expected a subclass of normkit.lab.tasks.Task."
        )
    return found


def load_sets(setting: Setting, device: torch.device | str = "cpu") -> Sets:
    """The sets that a setting is trained and tested on."""
    verify(setting.code.hashes, setting.code.folder)
    return make_task(setting).load(setting, device)


def _check_given(kind: type[Task], spec: TaskSpec) -> None:
    """Refuse a task without an option that it cannot do without."""
    missing = [
        name
        for name, each in inspect.signature(kind).parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and each.default is each.empty
        and name not in spec.options
    ]
    if missing:
        raise OptionError(
            f"task {spec.name} needs {' and '.join(f'task.options.{name}' for name in missing)}."
        )


def make_task(setting: Setting) -> Task:
    """The task of a setting, with its options; not attached to anything yet."""
    spec = setting.task
    kind = task_class(spec, setting.code.folder)
    _check_given(kind, spec)
    try:
        task = kind(**spec.options)
    except NormkitError:
        raise
    except TypeError as error:
        allowed = [name for name in inspect.signature(kind).parameters if name != "options"]
        raise OptionError(
            f"task {spec.name} could not be made: {error}. Its options: "
            f"{', '.join(allowed) or 'none'}."
        ) from error
    except (Exception, SystemExit) as error:  # whatever an author's constructor does
        raise TaskError(
            f"task {spec.name} could not be made: {type(error).__name__}: {error}"
            f"{error_place(error)}."
        ) from error
    if not task.metrics:
        raise TaskError(
            f"task {spec.name} has no metric{source_place(kind)}. Expected "
            'metrics = {"name": TaskMetric(higher_is_better=…)}, the most important one first.'
        )
    if spec.metrics and not task.takes_metrics:
        raise OptionError(f"task {spec.name} has metrics of its own and takes none of [metrics].")
    folder = setting.code.folder
    task.own_metrics = [OwnMetric(name, table, folder) for name, table in spec.metrics.items()]
    task.metrics = {**task.metrics, **{each.name: each.about for each in task.own_metrics}}
    task.criterion = criterion_of(setting)
    task.check(setting)
    return task
