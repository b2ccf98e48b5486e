"""From what a user gives to evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normkit.diagnosis.batches import NO_TARGET, Batch, Loss, each_batch
from normkit.diagnosis.findings.data import Data, data_of
from normkit.diagnosis.findings.evidence import Evidence, State
from normkit.diagnosis.findings.layer import Layer
from normkit.diagnosis.findings.looking import Look, can_be_lost, look
from normkit.diagnosis.findings.mixing import mixed
from normkit.diagnosis.observe.collect import collect, norms_of
from normkit.errors import NothingToDo, OptionError, ShapeError
from normkit.inspection import survey
from normkit.inspection.calling import Forward


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
    losses = can_be_lost(loss, model, batches[0])
    found = survey(model, batches[0].inputs)
    judged = [Layer(site) for site in found]
    free = [layer.norm for layer in judged if layer.learns and layer.pools]
    on_running = look(model, found, batches, loss=loss, losses=losses)
    on_batch = _on_batch(model, found, batches, free, loss, losses)
    training = _on_batch(model, found, trained, free, None, False) if trained else None
    layers = [
        Layer(
            site,
            on_running.traffic.get(site.path),
            (on_batch or on_running).traffic.get(site.path),
            None if training is None else training.traffic.get(site.path),
        )
        for site in found
    ]
    order = {path: number for number, path in enumerate(on_running.traffic)}
    layers.sort(key=lambda layer: order.get(layer.path, len(order)))
    return Evidence(
        model,
        found,
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
        collect(model, [as_given(batch) for batch in batches]),
        nats=losses and loss is None,
    )


def as_given(batch: Batch) -> tuple[Any, ...]:
    """A batch in the form in which users give them."""
    return (batch.inputs,) if batch.target is NO_TARGET else (batch.inputs, batch.target)


def _read(
    model: nn.Module, loader: Iterable[Any], most: int, forward: Forward | None
) -> tuple[list[Batch], Data]:
    """At most so many batches, and what can be said about them; one more shows if these are all."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise OptionError(f"max_batches expects a number of at least 1, got {most!r}.")
    found = list(each_batch(loader, model, most + 1, forward))
    complete = len(found) <= most
    batches = [batch for batch in found[:most] if batch.size]
    if not batches:
        raise NothingToDo("The loader gave batches without any samples.")
    return batches, data_of(batches, loader, complete)


def _on_batch(
    model: nn.Module,
    found: Any,
    batches: list[Batch],
    free: list[nn.Module],
    loss: Loss | None,
    losses: bool,
) -> Look | None:
    """A run on batch statistics; None if they do not exist, as for batches of one sample."""
    several = [batch for batch in batches if batch.size > 1]
    if not several or (len(several) < len(batches) and losses):
        return None
    try:
        return look(model, found, several, on_batch=free, loss=loss, losses=losses)
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
