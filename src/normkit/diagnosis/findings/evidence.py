"""All that a diagnosis has to go by, from what a user gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.diagnosis.findings.bounds import SURE
from normkit.diagnosis.findings.data import LoaderFacts, data_of, mixed
from normkit.diagnosis.findings.norm import NormEvidence
from normkit.diagnosis.observe.collect import Measurements, collect, norms_of
from normkit.diagnosis.observe.passes import Loss, ModelPass, run_pass, why_no_loss
from normkit.errors import NothingToDo, OptionError, ShapeError
from normkit.inspection import Survey, survey
from normkit.inspection.batches import BatchReader, Forward, LoaderBatch

State = Mapping[str, Any]


class Gap(NamedTuple):
    """Losses of the same samples with running and with batch statistics."""

    eval: float
    batch: float
    error: float  # standard error of the difference
    pairs: int

    @property
    def difference(self) -> float:
        return self.eval - self.batch

    @property
    def sure(self) -> bool:
        """Whether one of the modes is really better; few numbers have to show more."""
        if not math.isfinite(self.difference):
            return True
        wanted = SURE * (1 + 5 / (self.pairs - 1)) if self.pairs > 1 else math.inf
        return abs(self.difference) > wanted * self.error


def paired(ours: Tensor, theirs: Tensor) -> Gap:
    """The gap between losses of the same samples."""
    difference = (ours - theirs).double()
    count = len(difference)
    error = float(difference.std()) / math.sqrt(count) if count > 1 else math.inf
    return Gap(float(ours.mean()), float(theirs.mean()), error, count)


@dataclass(frozen=True, eq=False)
class Evidence:
    """A model, what it did on data, and whatever else was given."""

    model: nn.Module
    survey: Survey
    layers: tuple[NormEvidence, ...]  # in the order in which they run
    batches: Sequence[LoaderBatch]
    data: LoaderFacts
    eval: ModelPass
    own: ModelPass | None = None
    train_data: LoaderFacts | None = None
    trained: ModelPass | None = None
    steps: int | None = None
    ranks: Sequence[State] = ()
    ema_of: State | None = None
    optimizer: torch.optim.Optimizer | None = None
    measured: Measurements | None = None
    cross_entropy: bool = False  # whether losses are that of classes
    no_loss: str = ""  # why there are no losses
    loss: Loss | None = None  # as given

    @property
    def loader(self) -> str:
        """The argument whose data statistics should come from."""
        return "loader" if self.train_data is None else "train_loader"

    @property
    def calibrating(self) -> str:
        """The line that gives a model exact statistics."""
        return f"nk.calibrate(model, {self.loader})"

    @property
    def repairing(self) -> str:
        """The same, unless the weights fit the statistics as they are: then new ones do harm."""
        if self.gap is not None and self.gap.sure and self.gap.difference < 0:
            return "model.train()  # and train on; the weights fit the statistics as they are"
        return self.calibrating

    @cached_property
    def gap(self) -> Gap | None:
        """The losses of both modes; None without a loss."""
        ours = self.eval.loss
        theirs = None if self.own is None else self.own.loss
        if ours is None or theirs is None or len(ours) != len(theirs):
            return None
        return paired(ours, theirs)

    def severity(self, layers: Sequence[NormEvidence]) -> str:
        """Of statistics that are off: serious if a layer is wrong, or if the loss has doubled."""
        gap = self.gap
        harm = gap is not None and gap.sure and not gap.eval < 2 * gap.batch
        return "serious" if harm or any(layer.wrong for layer in layers) else "warning"

    def running(self) -> list[NormEvidence]:
        """Norms with running statistics that are used as such."""
        return [layer for layer in self.layers if layer.kept is not None]


def gather(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss: Loss | None = None,
    train_loader: Iterable[Any] | None = None,
    steps: int | None = None,
    ranks: Sequence[State | nn.Module] = (),
    ema_of: State | nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    max_batches: int = 16,
    forward: Forward | None = None,
) -> Evidence:
    """Run the model on the data, in eval mode and on batch statistics. Changes nothing."""
    norms_of(model)  # refuses what cannot be looked into, and a model without norms
    _check(steps, optimizer)
    states = [_state("ranks", each) for each in ranks]
    average = None if ema_of is None else _state("ema_of", ema_of)
    given, data = _read(model, loader, max_batches, forward)
    trained, train_data = (
        ([], None) if train_loader is None else _read(model, train_loader, max_batches, forward)
    )
    batches = mixed(given)
    no_loss = why_no_loss(loss, model, batches[0])
    losses = not no_loss
    sites = survey(model, batches[0].inputs)
    judged = [NormEvidence(site) for site in sites]
    free = [layer.norm for layer in judged if layer.learns and layer.pools]
    on_running = run_pass(model, sites, batches, loss=loss, losses=losses)
    on_batch = _on_batch(model, sites, batches, free, loss, losses)
    training = _on_batch(model, sites, trained, free, None, False) if trained else None
    layers = [
        NormEvidence(
            site,
            on_running.norms.get(site.path),
            (on_batch or on_running).norms.get(site.path),
            None if training is None else training.norms.get(site.path),
        )
        for site in sites
    ]
    order = {path: number for number, path in enumerate(on_running.norms)}
    layers.sort(key=lambda layer: order.get(layer.path, len(order)))
    return Evidence(
        model,
        sites,
        tuple(layers),
        batches,
        data,
        on_running,
        on_batch,
        train_data,
        training,
        steps,
        states,
        average,
        optimizer,
        collect(model, [batch.as_given() for batch in batches]),
        cross_entropy=losses and loss is None,
        no_loss=no_loss,
        loss=loss,
    )


def _read(
    model: nn.Module, loader: Iterable[Any], most: int, forward: Forward | None
) -> tuple[list[LoaderBatch], LoaderFacts]:
    """At most so many batches, and facts about them; one more shows if these are all."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise OptionError(f"max_batches expects a number of at least 1, got {most!r}.")
    read = list(BatchReader(model, loader, forward, max_batches=most + 1))
    complete = len(read) <= most
    batches = [batch for batch in read[:most] if batch.size]
    if not batches:
        raise NothingToDo("The loader gave batches without any samples.")
    return batches, data_of(batches, loader, complete)


def _on_batch(
    model: nn.Module,
    sites: Survey,
    batches: list[LoaderBatch],
    free: list[nn.Module],
    loss: Loss | None,
    losses: bool,
) -> ModelPass | None:
    """A run on batch statistics; None if they do not exist, as for batches of one sample."""
    several = [batch for batch in batches if batch.size > 1]
    if not several or (len(several) < len(batches) and losses):
        return None
    try:
        return run_pass(model, sites, several, on_batch=free, loss=loss, losses=losses)
    except ShapeError:
        return None


def _state(argument: str, given: State | nn.Module) -> State:
    if isinstance(given, nn.Module):
        return given.state_dict()
    if not isinstance(given, Mapping) or not given:
        raise OptionError(
            f"{argument} expects models or state_dicts, got {type(given).__name__}. "
            "Try model.state_dict()."
        )
    return given


def _check(steps: int | None, optimizer: Any) -> None:
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 0):
        raise OptionError(f"steps expects a number of training batches, got {steps!r}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer expects a torch optimizer, got {type(optimizer).__name__}.")
