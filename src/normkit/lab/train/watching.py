"""What is measured beside loss and accuracy, at the ends of epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit import collect, disturbance_test, observe, survey
from normkit.diagnosis.disturbance import DELTAS, first_of_blocks
from normkit.diagnosis.measures import condensation
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection import undisturbed
from normkit.lab.experiment import Watch
from normkit.lab.train.evaluating import batch_size
from normkit.lab.train.feeding import Form
from normkit.lab.train.machine import Machine
from normkit.lab.train.watching_weights import ws_gradients

MEASURES = {
    "condensation": "mean cosine between the inputs of the first norm, of a fixed batch",
    "disturbance": "accuracy with running statistics off by up to 0, 0.1, … 0.5, after the last "
    "epoch: a list by size of the error",
    "esm": "esm_mean and esm_std of each norm on the test set, in eval mode",
    "frozen": "1 for each ubn that is a fixed map at present, 0 for others",
    "gate_saturation": "share of gates below 0.05 or above 0.95, of each norm with gates",
    "gradient_factor": "|γ| / √(σ² + ε) of each norm, from a fixed batch in training mode",
    "stat_diff": "StatDiff of each norm with groups, from a fixed batch in training mode",
    "ws_gradients": "ws_gradients_a, _b and _c of each standardized weight: what its gradient "
    "loses by the division, by the subtraction, and what is left",
}
IN_TRAINING = ("frozen", "gate_saturation", "gradient_factor", "stat_diff")
BLOCKS = 6  # whose first norm is disturbed, as in the figure of estimation shift


class Watcher:
    """Measures a model without changing it. The fixed batch is the same for all variants."""

    def __init__(self, machine: Machine, sets: Any, watch: Watch, form: Form) -> None:
        for name in watch.measures:
            if name not in MEASURES:
                raise OptionError(f"watch.measures has {name!r}. {nearest(name, MEASURES)}")
        self.model, self.modes, self.epochs = machine.model, machine.modes, machine.plan.epochs
        self.sets, self.watch, self.form = sets, watch, form
        self._batch: tuple[Tensor, Tensor] | None = None

    def due(self, epoch: int) -> bool:
        """Whether anything is measured after an epoch; 0 is before the first."""
        return bool(self.watch.measures) and (epoch % self.watch.every == 0 or epoch == self.epochs)

    def measure(self, epoch: int) -> Mapping[str, Any]:
        """Every measure that was asked for: a number, or a list with one for each norm.

        None stands for a norm for which a measure has no meaning; where it has none for any, it
        is left out.
        """
        found: dict[str, Any] = {}
        asked = self.watch.measures
        if "condensation" in asked:
            found["condensation"] = self._condensation()
        if "esm" in asked and epoch:  # before the first there are no estimates
            found.update(self._esm())
        if wanted := [name for name in IN_TRAINING if name in asked]:
            found.update(self._in_training(wanted))
        if "ws_gradients" in asked:
            with undisturbed(self.model), torch.enable_grad():
                self.modes.train()
                found.update(ws_gradients(self.model, *self._fixed()))
        if "disturbance" in asked and epoch == self.epochs:
            found["disturbance"] = self._disturbance()
        return {name: value for name, value in found.items() if _says_something(value)}

    def _esm(self) -> dict[str, list[float | None]]:
        names = ("esm_mean", "esm_std")
        try:
            seen = collect(self.model, self._tests(), measures=names)
        except NothingToDo:  # a model without norms
            return {}
        return {name: [seen.value(path, name) for path in seen.paths] for name in names}

    def _condensation(self) -> float | None:
        """Of the norm that runs first; one before the network, on the images, does not count."""
        seen: list[Tensor] = []

        def look(_: nn.Module, given: tuple[Any, ...]) -> None:
            if not seen:
                seen.append(condensation(given[0]))

        sites = [site for site in survey(self.model) if site.kind != "input_norm"]
        hooks = [site.module.register_forward_pre_hook(look) for site in sites]
        try:
            with undisturbed(self.model):
                self.model(self._fixed()[0])
        finally:
            for hook in hooks:
                hook.remove()
        return seen[0].item() if seen else None

    def _in_training(self, wanted: list[str]) -> dict[str, list[float | None]]:
        """From one forward in training mode, whose statistics are forgotten again."""
        with undisturbed(self.model):
            self.modes.train()
            with observe(self.model, every=1, measures=wanted) as observer:
                self.model(self._fixed()[0])
        seen = {(record.path, record.measure): record.value for record in observer.records}
        return {n: [seen.get((site.path, n)) for site in observer.sites] for n in wanted}

    def _disturbance(self) -> list[float]:
        """Accuracy by size of the error. Without running statistics nothing can be disturbed."""
        chosen = first_of_blocks(BLOCKS)
        where = chosen if any(chosen(site) for site in survey(self.model)) else None
        try:
            seen = disturbance_test(
                self.model, list(self._tests()), accuracy, where=where, max_batches=None
            )
        except NothingToDo:
            with undisturbed(self.model):
                rows = [(accuracy(self.model(x), y), len(y)) for x, y in self._tests()]
            plain = sum(value * size for value, size in rows) / sum(size for _, size in rows)
            return [plain] * (1 + len(DELTAS))
        return [seen.undisturbed, *(seen.means[delta] for delta in DELTAS)]

    def _fixed(self) -> tuple[Tensor, Tensor]:
        if self._batch is None:
            size = min(self.watch.samples, len(self.sets.train))
            images, labels = next(iter(self.sets.train.batches(size, seed=0, shuffle=True)))
            self._batch = self.form(images), labels.to(self.form.device)
        return self._batch

    def _tests(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.sets.test.batches(batch_size(self.sets.shape)):
            yield self.form(images), labels.to(self.form.device)


def _says_something(value: Any) -> bool:
    if isinstance(value, list):
        return any(each is not None for each in value)
    return value is not None


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) == labels).double().mean())
