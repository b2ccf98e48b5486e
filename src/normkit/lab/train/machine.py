"""A model on its device, with everything that a step of its training needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normkit.lab.experiment import Train
from normkit.lab.train.feeding import Feed, Inputs
from normkit.lab.train.modes import Modes
from normkit.lab.train.optimizing import Rates, load_state, optimizer_of, state_of
from normkit.lab.train.plan import Plan
from normkit.lab.train.recording import Capture, Recorded
from normkit.lab.train.stepping import History, Stepper
from normkit.lab.variants import followers


class Machine:
    """Does one step after the other; ``capture`` is what records them, if anything does."""

    def __init__(
        self, model: nn.Module, train: Train, plan: Plan, feed: Feed, capture: Capture | None
    ) -> None:
        form = feed.form
        self.model = model.to(form.device, form.dtype)
        if train.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.train, self.plan = train, plan
        self.modes = Modes(self.model)
        # compiled beside the model, whose own forward still runs hooks, and keeps its names
        self.forward: nn.Module = torch.compile(self.model) if train.compile else self.model  # type: ignore[assignment]
        self.optimizer = optimizer_of(self.model, train, form.device)
        following = followers(self.model)
        self.rates = Rates(self.optimizer, train, plan.steps, following)
        self.history = History(plan.batches, form.device)
        self.stepper = Stepper(self.forward, self.optimizer, train, self.history, following)
        self.share = torch.ones((), dtype=form.dtype, device=form.device)

        def recorded(function: Any) -> Recorded:
            return Recorded(function, plan.batch, self.tensors, capture)

        self.whole = recorded(lambda *given: self.stepper.whole(*feed.read(*given)))
        self.gradients = recorded(
            lambda *given: self.stepper.gradients(*feed.read(*given[:-1]), given[-1])
        )
        self.update = recorded(self.stepper.update)

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
            yield from (p.grad for p in self.stepper.parameters if p.grad is not None)
        scaler = self.stepper.scaler
        if scaler is not None:
            yield from (t for t in (scaler._scale, scaler._growth_tracker) if t is not None)

    # ---------------------------------------------------------------- between two steps

    def state_dict(self) -> dict[str, Any]:
        scaler = self.stepper.scaler
        return {
            "model": self.model.state_dict(),
            "counters": dict(self._unsaved()),
            "optimizer": state_of(self.optimizer),
            "scaler": None if scaler is None else scaler.state_dict(),
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
        if self.stepper.scaler is not None:
            self.stepper.scaler.load_state_dict(state["scaler"])
        self.rates.forget()

    def _unsaved(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that a model's own state_dict leaves out."""
        saved = self.model.state_dict().keys()
        return ((name, b) for name, b in self.model.named_buffers() if name not in saved)
