"""A model on its device, and what happens to one batch: forward, loss, backward, update.

Nothing in a step waits for the device, and everything is read from and written to tensors that
stay where they are. So a step can be called, or recorded once and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normkit.lab.experiment import Train
from normkit.lab.models.variant import learning_rate_followers
from normkit.lab.train.batches import BatchFeed, EpochPlan, Inputs
from normkit.lab.train.cuda_graph import Capture, Recorded
from normkit.lab.train.device import autocast, scaler
from normkit.lab.train.evaluate import History, correct, loss_of
from normkit.lab.train.optimizer import Rates, load_state, optimizer_of, state_of


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
        feed: BatchFeed,
        capture: Capture | None,
    ) -> None:
        device, dtype = feed.format.device, feed.format.dtype
        self.train, self.plan, self.feed, self.device = train, plan, feed, device
        self.model = model.to(device, dtype)
        if train.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.modes = Modes(self.model)
        # compiled beside the model, whose own forward still runs hooks, and keeps its names
        self.forward: nn.Module = torch.compile(self.model) if train.compile else self.model  # type: ignore[assignment]
        self.optimizer = optimizer_of(self.model, train, device)
        self.followers = learning_rate_followers(self.model)
        self.rates = Rates(self.optimizer, train, plan.steps, self.followers)
        self.history = History(plan.batches, device)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = scaler(train.precision, device)
        if train.accumulate > 1:  # gradients that stay, to be added to
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        self.share = torch.ones((), dtype=dtype, device=device)  # of a batch in its step

        def recorded(function: Any) -> Recorded:
            return Recorded(function, plan.batch, self.tensors, capture)

        self.whole = recorded(self._whole)
        self.gradients = recorded(self._gradients)
        self.update = recorded(self._update)

    def step(self, batches: list[Inputs], number: int) -> None:
        """One step of the optimizer, counted from 0 over all epochs."""
        self.rates.write(number)
        if self.train.accumulate == 1:
            self.whole(*batches[0])
            return
        first = number % self.plan.steps * self.plan.accumulate
        for i, inputs in enumerate(batches):
            self.share.fill_(self.plan.share(first + i))
            self.gradients(*inputs, self.share)
        self.update()

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
            yield from state.values()
        yield from (self.history.rows, self.history.next)
        if self.train.accumulate > 1:
            yield from (p.grad for p in self.parameters if p.grad is not None)
        if self.scaler is not None:
            own = (self.scaler._scale, self.scaler._growth_tracker)
            yield from (tensor for tensor in own if tensor is not None)

    # ---------------------------------------------------------------- what is recorded

    def _whole(self, *inputs: Tensor) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._backward(self._loss(*inputs))
        self._apply()

    def _gradients(self, *inputs: Tensor) -> None:
        """Add the gradients of one batch of several; the last input is its share of the step."""
        *rows, share = inputs
        self._backward(self._loss(*rows) * share)

    def _update(self) -> None:
        self._apply()
        torch._foreach_zero_([p.grad for p in self.parameters])

    def _loss(self, *inputs: Tensor) -> Tensor:
        images, labels = self.feed.read(*inputs)
        with autocast(self.train.precision, self.device):
            logits = self.forward(images)
        loss = loss_of(logits, labels, self.train.label_smoothing)
        self.history.add(loss, correct(logits.detach(), labels))
        return loss

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _apply(self) -> None:
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

    # ---------------------------------------------------------------- between two steps

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "counters": dict(self._unsaved()),
            "optimizer": state_of(self.optimizer),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "history": {"rows": self.history.rows, "next": self.history.next},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Written into the tensors that are there: records of steps stay valid."""
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            for name, buffer in self._unsaved():
                buffer.copy_(state["counters"][name])
            load_state(self.optimizer, state["optimizer"])
            self.history.rows.copy_(state["history"]["rows"])
            self.history.next.copy_(state["history"]["next"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.rates.forget()

    def _unsaved(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that a model's own state_dict leaves out."""
        saved = self.model.state_dict().keys()
        return ((name, b) for name, b in self.model.named_buffers() if name not in saved)


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
