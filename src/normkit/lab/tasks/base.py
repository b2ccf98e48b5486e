"""What a task decides, with the defaults that most of them keep.

    load ──> Sets ──> read(batch) ──> loss(model, batch) ──> step
                 └──> evaluation(part): add(model, batch) …, values() ──> metrics of an epoch

A task belongs to one run: ``attach`` tells it what it works on before anything else is asked, and
what it keeps between steps goes through ``state_dict``, so that a run can be interrupted anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from normkit.errors import NormkitError, OptionError
from normkit.inspection.batches import call_model, inputs_of
from normkit.lab import data
from normkit.lab.data import Sets
from normkit.lab.experiment.records import Setting
from normkit.lab.formats import ImageFormat
from normkit.lab.models.build import build
from normkit.lab.own_code import source_place
from normkit.lab.results import Epoch, TaskMetric
from normkit.lab.tasks.criteria import OwnLoss, OwnMetric
from normkit.lab.tasks.sets import data_sets, is_own, own_loaded

if TYPE_CHECKING:
    from normkit.lab.train.batches import EpochPlan
    from normkit.lab.train.step import Trainer

Losses = Tensor | Mapping[str, Tensor]
Values = Mapping[str, "float | list[float]"]


class TaskError(NormkitError):
    """A task, loss, metric or data set of one's own that did not do what the lab expects of it."""


class Evaluation:
    """What is summed up over one of the sets after an epoch.

    ``add`` is called for each batch, without gradients and with the model in eval mode, and
    should not wait for a GPU; ``values`` once at the end.
    """

    def add(self, model: nn.Module, batch: Any) -> None:
        raise NotImplementedError

    def values(self) -> Values:
        """By metric; further numbers are kept too. A list has a number for each unit."""
        raise NotImplementedError


class Task:
    """The base of all tasks. Options of the experiment's file go to the constructor."""

    # the metrics of a set; the first is the task's score, by which the best epoch is selected
    metrics: Mapping[str, TaskMetric] = {}
    # measures of [watch], where the file names none
    watch: ClassVar[tuple[str, ...]] = ()
    # Names of the numbers that loss() gives for each batch. None: whatever comes with the first
    # batch; then steps are never recorded as a CUDA graph.
    batch_values: ClassVar[tuple[str, ...] | None] = None
    # Whether evaluations add up the metrics of the file's [metrics]
    takes_metrics: ClassVar[bool] = False
    # Whether a step is tensor operations alone, always the same ones, and waits for nothing
    recordable: bool = False

    setting: Setting
    sets: Sets
    format: ImageFormat
    seed: int  # of torch
    own_metrics: Sequence[OwnMetric] = ()  # of [metrics]
    criterion: OwnLoss | None = None  # of train.loss

    def attach(self, setting: Setting, sets: Sets, format: ImageFormat, seed: int) -> None:
        """What the task works on. Told once, before the model is built."""
        self.setting, self.sets, self.format, self.seed = setting, sets, format, seed

    def check(self, setting: Setting) -> None:
        """Refuse a setting that cannot be, when the file is read."""

    # ---------------------------------------------------------------- data

    def load(self, setting: Setting, device: torch.device | str) -> Sets:
        """The sets of a setting: a set of the lab, or what the author's own function makes.

        Loaders have ``len()``, the samples, and ``batches(…)`` as ``lab.data.Loader`` has them; a
        batch may be anything, such as a list of images and a list of targets, or a mapping with
        one batch of the source and one of the target domain.
        """
        return data_sets(setting, device)

    def batches(self, plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[Any, ...]]:
        """What the steps of an epoch are given, without the first ``start`` batches.

        Epochs count from 0. The same seed gives every variant the same batches.
        """
        given = self.sets.train.batches(
            plan.batch,
            seed=self.seed,
            epoch=epoch,
            shuffle=True,
            drop_last=plan.samples < len(self.sets.train),
            augment=True,
            start=start,
        )
        return ((batch,) for batch in given)

    def read(self, *given: Any) -> Any:
        """The batch that a loader has given, as ``loss`` wants it; inside a step."""
        return self.format.nested(given[0] if len(given) == 1 else given)

    def locate(self, setting: Setting) -> None:
        """An error if the data cannot be had, before anything trains."""
        if is_own(setting.data.name):
            own_loaded(setting)
        else:
            data.locate(setting.data)

    def training_samples(self, setting: Setting) -> int:
        """How many samples ``load(setting, …).train`` has; sets of the lab are not read for it."""
        if is_own(setting.data.name):
            return len(own_loaded(setting).train)
        return data.training_samples(setting.data)

    def batch_size(self, setting: Setting) -> int | None:
        """Of data that comes in batches of its own size; None: train.batch says it."""
        if not is_own(setting.data.name):
            return None
        return getattr(own_loaded(setting).train, "batch_size", None)

    def classes_and_shape(self, setting: Setting) -> tuple[int, tuple[int, ...]]:
        """What ``network`` is told of the data, likewise."""
        if is_own(setting.data.name):
            sets = own_loaded(setting)
            return sets.classes, sets.shape
        return data.classes_and_shape(setting.data)

    def evaluation_batches(self, part: str) -> Iterable[Any]:
        """What is evaluated after an epoch: the batches of a set, or episodes drawn from it."""
        size = self.setting.train.batch or len(getattr(self.sets, part))
        for batch in getattr(self.sets, part).batches(size):
            yield self.format.nested(batch)

    # ---------------------------------------------------------------- model

    def network(self, setting: Setting, classes: int, shape: tuple[int, ...]) -> nn.Module:
        """The network of [model], before anything is done to its norms."""
        return build(setting.model, classes, shape, folder=setting.code.folder)

    def example(self, shape: tuple[int, ...], samples: int) -> Any:
        """Inputs that a model is tried with: random images."""
        return torch.randn(samples, *shape)

    def try_model(
        self, model: nn.Module, samples: int, classes: int, shape: tuple[int, ...]
    ) -> None:
        """Run a model once on an example, in the mode that it is in; an error if it does not fit.

        Called without gradients before anything trains.
        """
        call_model(model, self.example(shape, samples))

    def check_metric(self, metric: str, classes: int) -> None:
        """Refuse a metric that has no meaning for so many classes."""

    def learns(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether the optimizer of the lab trains a parameter; others are the task's own."""
        return True

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's output for a batch, in the mode that it is in."""
        return call_model(model, inputs_of(batch, model))

    # ---------------------------------------------------------------- training

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """What is minimized: the mean over a batch, in float32.

        Several by name are added up. If one of them is called "loss" it is minimized alone, and
        the others are recorded beside it. An attack on the inputs belongs here.
        """
        raise NotImplementedError

    def loss_place(self) -> str:
        """Where the author has written the loss; "" where that is torch's or the lab's."""
        own = "" if self.criterion is None else self.criterion.place
        return own or source_place(type(self).loss)

    def step(self, trainer: Trainer, batch: Any) -> None:
        """One step on a batch: gradients are cleared before. For searches with two levels, say."""
        trainer.minimize(self.loss(trainer.forward, batch))

    def begin(self, trainer: Trainer) -> None:
        """Called once when model and optimizer are there, before the first step."""

    def tensors(self) -> Iterator[Tensor]:
        """What a recorded step changes beside model and optimizer."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same numbers: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""

    # ---------------------------------------------------------------- judging

    def evaluation(self, part: str) -> Evaluation:
        """A new evaluation of the "test" or "validation" set."""
        raise NotImplementedError

    def epoch_values(self, rows: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> Values:
        """Of an epoch's batches, from the numbers of each: means over the samples.

        What fp16 has lost to overflow, and what is not finite otherwise, is left out.
        """
        return {name: mean_of(values, sizes) for name, values in rows.items()}

    def measured_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss whose gradients are measured: what training minimizes."""
        return total(self.loss(model, batch))

    def agreement(self, output: Any, target: Any) -> float:
        """A score of one batch, for the test with disturbed statistics."""
        raise OptionError(
            f'{type(self).__name__} has no agreement(output, target), which "disturbance" '
            'and "corruption" need.'
        )

    def collapsed(self, epochs: Sequence[Epoch]) -> str | None:
        """Why a run has learned nothing, from the epochs that count; "" if it has."""
        return ""

    def pictures(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Captions and images (3, H, W) from 0 to 1 for the report, of the trained model."""
        return ()

    def texts(self, model: nn.Module) -> Mapping[str, str]:
        """What a trained model leaves in words, kept with the run and shown on its page."""
        return {}


def total(losses: Losses) -> Tensor:
    """What is minimized, of one loss or several."""
    if isinstance(losses, Tensor):
        return losses
    if "loss" in losses:
        return losses["loss"]
    return torch.stack(list(losses.values())).sum()


@contextmanager
def at_rest(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Losses that are computed inside have no gradient of these parameters."""
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def mean_of(values: Sequence[float], sizes: Sequence[int]) -> float:
    """Over the samples, of the means of batches that are finite."""
    kept = [(v * n, n) for v, n in zip(values, sizes, strict=True) if math.isfinite(v)]
    return sum(part for part, _ in kept) / max(1, sum(n for _, n in kept))
