"""A model on its device, and what happens to one batch: forward, loss, backward, update.

Nothing in a step waits for the device, and everything is read from and written to tensors that
stay where they are. So a step can be called, or recorded once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.messages import error_words
from normkit.errors import NormkitError
from normkit.lab.experiment import Train
from normkit.lab.models.variant import learning_rate_followers
from normkit.lab.own_code import error_place
from normkit.lab.tasks import Task
from normkit.lab.tasks.base import Losses, TaskError, total
from normkit.lab.tasks.criteria import loss_hint, shown_loss
from normkit.lab.train.averaging import AveragedWeights
from normkit.lab.train.batches import EpochPlan
from normkit.lab.train.cuda_graph import Capture, Recorded
from normkit.lab.train.device import scaler
from normkit.lab.train.evaluate import History
from normkit.lab.train.optimizer import (
    Rates,
    group_state,
    load_group_state,
    load_state,
    optimizer_of,
    state_of,
)
from normkit.lab.train.share import BatchShare


class Trainer:
    """Does one step after the other; ``capture`` is what records them, if anything does.

    With one batch a step, one record holds it all. Otherwise one adds the gradients of a batch,
    and another ends the step.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Train,
        plan: EpochPlan,
        task: Task,
        capture: Capture | None,
        process: BatchShare | None = None,
    ) -> None:
        self.process = process  # None: this one works on whole batches
        device, dtype = task.format.device, task.format.dtype
        self.train, self.plan, self.task, self.device = train, plan, task, device
        self.model = model.to(device, dtype)
        if train.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.modes = Modes(self.model)
        # compiled beside the model, whose own forward still runs hooks, and keeps its names
        self.forward: nn.Module = torch.compile(self.model) if train.compile else self.model  # type: ignore[assignment]
        folder = task.setting.code.folder
        self.optimizer = optimizer_of(self.model, train, device, task.learns, folder)
        self.followers = learning_rate_followers(self.model)
        # where a step is neither recorded nor waited for, numbers are as good as tensors
        on_host = device.type == "cpu" and capture is None
        self.rates = Rates(
            self.optimizer, train, plan.steps, self.followers, folder, in_tensors=not on_host
        )
        self.average = AveragedWeights(self.model, train.ema) if train.ema else None
        self.history = History(plan.batches, device, task.batch_values, on_host)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = scaler(train.precision, device)
        if train.accumulate > 1:  # gradients that stay, to be added to
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        self.share = torch.ones((), dtype=dtype, device=device)  # of a batch in its step
        # those whose rates grow with the epochs, such as drop path
        self.growing: list[Any] = [m for m in self.model.modules() if hasattr(m, "set_progress")]
        self.progress = -1.0

        def recorded(function: Any) -> Recorded:
            return Recorded(function, plan.batch, self.tensors, capture)

        self.whole = recorded(self._whole)
        self.gradients = recorded(self._gradients)
        self.update = recorded(self._update)
        task.begin(self)

    def step(self, batches: list[tuple[Any, ...]], number: int) -> None:
        """One step of the optimizer, counted from 0 over all epochs."""
        self.rates.write(number)
        self._tell_progress(number // self.plan.steps / self.train.epochs)
        first = number % self.plan.steps * self.plan.accumulate
        if self.train.accumulate == 1:
            self.whole(*self._own(batches[0], first))
            return
        for i, inputs in enumerate(batches):
            self.share.fill_(self.plan.share(first + i))
            self.gradients(*self._own(inputs, first + i), self.share)
        self.update()

    def _tell_progress(self, share: float) -> None:
        """The share of the epochs that are over; written in place, so that records see it."""
        if share != self.progress:
            for module in self.growing:
                module.set_progress(share)
            self.progress = share

    def _own(self, inputs: tuple[Any, ...], batch: int) -> tuple[Any, ...]:
        return inputs if self.process is None else self.process.take(inputs, self.plan.size(batch))

    @property
    def is_recorded(self) -> bool:
        """Whether steps are replayed."""
        return (self.whole.replay or self.gradients.replay) is not None

    @property
    def obstacle(self) -> str:
        """Why steps could not be recorded; empty if they were, or nobody has tried."""
        return self.whole.obstacle or self.gradients.obstacle or self.update.obstacle

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a step changes."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in state_of(self.optimizer):
            yield from (value for value in state.values() if isinstance(value, Tensor))
        yield from (self.history.rows, self.history.next)
        yield from self.task.tensors()
        if self.average is not None:
            yield from self.average.tensors()
        if self.train.accumulate > 1:
            yield from (p.grad for p in self.parameters if p.grad is not None)
        if self.scaler is not None:
            own = (self.scaler._scale, self.scaler._growth_tracker)
            yield from (tensor for tensor in own if tensor is not None)

    # ---------------------------------------------------------------- what is recorded

    def _whole(self, *inputs: Any) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        if self.process is not None:
            self._shared_batch(self._apply, lambda: self._task_step(inputs))
        else:
            self._task_step(inputs)

    def _task_step(self, inputs: tuple[Any, ...]) -> None:
        with explained(self.task, "step"):
            self.task.step(self, self.task.read(*inputs))

    def _shared_batch(self, without: Callable[[], None], work: Callable[[], None]) -> None:
        """Work on a share of a batch, or, if that is empty, do what all processes have to do."""
        process = self.process
        assert process is not None
        if process.empty:
            self.history.skip()
            without()
        else:
            with process.step():
                work()
        process.average_statistics(self.model)

    def minimize(self, losses: Losses) -> None:
        """Backward and update, for a task's step: once for each batch."""
        self._backward(self._noted(losses))
        self._apply()

    def _gradients(self, *inputs: Any) -> None:
        """Add the gradients of one batch of several; the last input is its share of the step."""
        *rows, share = inputs
        if self.process is not None:
            self._shared_batch(lambda: None, lambda: self._task_gradients(rows, share))
        else:
            self._task_gradients(rows, share)

    def _task_gradients(self, rows: Sequence[Any], share: Tensor) -> None:
        with explained(self.task, "loss"):
            losses = self.task.loss(self.forward, self.task.read(*rows))
            self._backward(self._noted(losses) * share)

    def _update(self) -> None:
        self._apply()
        torch._foreach_zero_([p.grad for p in self.parameters])

    def _noted(self, losses: Losses) -> Tensor:
        """What is minimized; all of it is written down."""
        loss = total(losses) if isinstance(losses, Tensor | Mapping) else losses
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise TaskError(
                f"{type(self.task).__name__}.loss{self.task.loss_place()} gave "
                f"{shown_loss(loss)}, expected one number, a tensor () with a gradient, or several "
                f"by name. Try {loss_hint(loss)}."
            )
        values = losses if isinstance(losses, Mapping) else {}
        self.history.add({"loss": loss, **values})
        return loss

    def _backward(self, loss: Tensor) -> None:
        if self.process is not None:
            loss = loss * self.process.weight
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _apply(self) -> None:
        if self.process is not None:
            self.process.add_up_gradients(self.parameters)
        if self.train.clip > 0:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.train.clip, foreach=True)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for layer in self.followers:
            layer.commit()
        if self.average is not None:
            self.average.update()

    @property
    def judged(self) -> nn.Module:
        """The model that is evaluated: with averaged weights, where they are asked for."""
        return self.forward if self.average is None else self.average.model

    # ---------------------------------------------------------------- between two steps

    def losses(self, batches: int) -> list[float]:
        """Of an epoch's first batches; waits for the device."""
        if self.process is None:
            return self.history.losses(batches)
        return self.process.combined_losses(self.history.written()[:batches, 0], self.plan)

    def epoch_rows(self) -> tuple[dict[str, list[float]], list[int]]:
        """The numbers of each batch of an epoch, or of each process's share, and their sizes."""
        if self.process is None:
            sizes = [self.plan.size(batch) for batch in range(self.plan.batches)]
            return self.history.read(), sizes
        rows, sizes = self.process.collected(self.history.written()[: self.plan.batches], self.plan)
        return dict(zip(self.history.names, rows.T.tolist(), strict=True)), sizes

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "counters": dict(self._unsaved()),
            "optimizer": state_of(self.optimizer),
            "groups": group_state(self.optimizer),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "history": self.history.state_dict(),
            "task": self.task.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Written into the tensors that are there: records of steps stay valid."""
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            for name, buffer in self._unsaved():
                buffer.copy_(state["counters"][name])
            load_state(self.optimizer, state["optimizer"])
            if "groups" in state:  # not in checkpoints of earlier releases
                load_group_state(self.optimizer, state["groups"])
            self.history.load_state_dict(state["history"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.rates.forget()
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if task_state := state.get("task"):
            self.task.load_state_dict(task_state)

    def _unsaved(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that a model's own state_dict leaves out."""
        saved = self.model.state_dict().keys()
        return ((name, b) for name, b in self.model.named_buffers() if name not in saved)


@contextmanager
def explained(task: Task, what: str) -> Iterator[None]:
    """An error in the author's own code becomes one that names its line."""
    try:
        yield
    except (NormkitError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        if not (place := error_place(error)):
            raise
        name = type(task).__name__
        raise TaskError(f"{name}.{what} failed{place}: {error_words(error)}.") from error


class Modes:
    """The mode of every module of a model, in training and in evaluation.

    ``model.train()`` runs once, so that frozen layers may keep their mode; afterwards flags are
    set directly, since some layers read a counter from the device in ``train``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        model.eval()
        self.in_evaluation = [module.training for module in self.modules]
        model.train()
        self.in_training = [module.training for module in self.modules]

    def train(self) -> None:
        self._set(self.in_training)

    def evaluate(self) -> None:
        self._set(self.in_evaluation)

    def _set(self, flags: list[bool]) -> None:
        for module, flag in zip(self.modules, flags, strict=True):
            module.training = flag
