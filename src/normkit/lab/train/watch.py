"""What is measured beside loss and accuracy, at the ends of epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit import adapt, collect, disturbance_test, observe, survey
from normkit.diagnosis.disturbance import DELTAS, first_of_blocks
from normkit.diagnosis.measures import condensation, ws_gradient_decomposition
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection import undisturbed
from normkit.inspection.batches import read_batch, samples_in
from normkit.inspection.run import watch_inputs
from normkit.lab.experiment import Watch
from normkit.lab.models.variant import normalizes_input
from normkit.lab.tasks import Task
from normkit.lab.train.corruption import CORRUPTIONS, corrupted
from normkit.lab.train.step import Trainer
from normkit.layers.weight import WeightNormalizer

MEASURES = {
    "condensation": "mean cosine between the inputs of the first norm, of a fixed batch",
    "corruption": "corruption and corruption_adapted: accuracy on the test images, then on damaged "
    "ones by kind, after the last epoch; as trained, and with statistics adapted to each kind",
    "disturbance": "accuracy with running statistics off by up to 0, 0.1, … 0.5, after the last "
    "epoch: a list by size of the error",
    "esm": "esm_mean and esm_std of each norm on the test set, in eval mode",
    "frozen": "1 for each norm that has become a fixed map for the time being, 0 for others",
    "gate_saturation": "share of gates below 0.05 or above 0.95, of each norm with gates",
    "gradient_factor": "|γ| / √(σ² + ε) of each norm, from a fixed batch in training mode",
    "stat_diff": "StatDiff of each norm with groups, from a fixed batch in training mode",
    "ws_gradients": "ws_gradients_a, _b and _c of each standardized weight: what its gradient "
    "loses by the division, by the subtraction, and what is left",
}
IN_TRAINING = ("frozen", "gate_saturation", "gradient_factor", "stat_diff")
BLOCKS = 6  # whose first norm is disturbed, as in the figure of estimation shift


class EpochMeasures:
    """Measures a model without changing it. The fixed batch is the same for all variants."""

    def __init__(self, trainer: Trainer, sets: Any, watch: Watch) -> None:
        self.asked = watch.measures or tuple(trainer.task.watch)
        said = "watch.measures" if watch.measures else f"watch of {type(trainer.task).__name__}"
        for name in self.asked:
            if name not in MEASURES:
                raise OptionError(f"{said} has {name!r}. {nearest(name, MEASURES)}")
        self.model, self.modes, self.epochs = trainer.model, trainer.modes, trainer.plan.epochs
        self.sets, self.watch, self.task = sets, watch, trainer.task
        self._batch: Any = None

    def due(self, epoch: int) -> bool:
        """Whether anything is measured after an epoch; 0 is before the first."""
        return bool(self.asked) and (epoch % self.watch.every == 0 or epoch == self.epochs)

    def measure(self, epoch: int) -> Mapping[str, Any]:
        """Every measure that was asked for: a number, or a list with one for each norm.

        None stands for a norm for which a measure has no meaning; where it has none for any, it
        is left out.
        """
        values: dict[str, Any] = {}
        asked = self.asked
        if "condensation" in asked:
            values["condensation"] = self._condensation()
        if "esm" in asked and epoch:  # before the first there are no estimates
            values.update(self._esm())
        if wanted := [name for name in IN_TRAINING if name in asked]:
            values.update(self._in_training(wanted))
        if "ws_gradients" in asked:
            with undisturbed(self.model), torch.enable_grad():
                self.modes.train()
                values.update(ws_gradients(self.model, self.task, self._fixed_batch()))
        if "disturbance" in asked and epoch == self.epochs:
            values["disturbance"] = self._disturbance()
        if "corruption" in asked and epoch == self.epochs:
            values.update(self._corruption())
        return {name: value for name, value in values.items() if _is_measured(value)}

    def _esm(self) -> dict[str, list[float | None]]:
        names = ("esm_mean", "esm_std")
        try:
            seen = collect(
                self.model,
                self.task.evaluation_batches("test"),
                measures=names,
                forward=self.task.forward,
            )
        except NothingToDo:  # a model without norms
            return {}
        return {name: [seen.value(path, name) for path in seen.paths] for name in names}

    def _condensation(self) -> float | None:
        """Of the norm that runs first; one before the network, on the images, does not count."""
        seen: list[Tensor] = []

        def look(x: Tensor) -> None:
            if not seen:
                seen.append(condensation(x))

        norms = [s.module for s in survey(self.model) if not normalizes_input(s)]
        with undisturbed(self.model), watch_inputs(dict.fromkeys(norms, look)):
            self.task.forward(self.model, self._fixed_batch())
        return seen[0].item() if seen else None

    def _in_training(self, wanted: list[str]) -> dict[str, list[float | None]]:
        """From one forward in training mode, whose statistics are forgotten again."""
        with undisturbed(self.model):
            self.modes.train()
            with observe(self.model, every=1, measures=wanted) as observer:
                self.task.forward(self.model, self._fixed_batch())
        seen = {(record.path, record.measure): record.value for record in observer.records}
        return {n: [seen.get((site.path, n)) for site in observer.sites] for n in wanted}

    def _disturbance(self) -> list[float]:
        """The score by size of the error. Without running statistics nothing can be disturbed."""
        chosen = first_of_blocks(BLOCKS)
        where = chosen if any(chosen(site) for site in survey(self.model)) else None
        try:
            seen = disturbance_test(
                self.model,
                list(self.task.evaluation_batches("test")),
                self.task.agreement,
                where=where,
                max_batches=None,
                forward=self.task.forward,
            )
        except NothingToDo:
            return [self._score(self.task.evaluation_batches("test"))] * (1 + len(DELTAS))
        return [seen.undisturbed, *(seen.means[delta] for delta in DELTAS)]

    def _corruption(self) -> dict[str, list[float]]:
        """The score on the test images and on damaged ones, as trained and adapted."""
        test = list(self.task.evaluation_batches("test"))
        plain = [self._score(test)]
        adapted = [*plain]
        for name in CORRUPTIONS:
            damaged = list(corrupted(test, name))
            plain.append(self._score(damaged))
            with undisturbed(self.model):
                try:
                    # AdaBN: there is no lack of images, and the guard is for users' own
                    adapt(self.model, damaged, prior=0, guard=False, forward=self.task.forward)
                except NothingToDo:  # no running statistics
                    adapted.append(plain[-1])
                else:
                    adapted.append(self._score(damaged))
        return {"corruption": plain, "corruption_adapted": adapted}

    def _score(self, batches: Iterable[Any]) -> float:
        """What the task says of all outputs, over the samples."""
        rows = []
        with undisturbed(self.model):
            for batch in batches:
                target = read_batch(batch, self.model).target
                output = self.task.forward(self.model, batch)
                rows.append((self.task.agreement(output, target), samples_in(batch)))
        return sum(value * size for value, size in rows) / sum(size for _, size in rows)

    def _fixed_batch(self) -> Any:
        if self._batch is None:
            size = min(self.watch.samples, len(self.sets.train))
            given = next(iter(self.sets.train.batches(size, seed=0, shuffle=True)))
            self._batch = self.task.format.nested(given)
        return self._batch


def ws_gradients(model: nn.Module, task: Task, batch: Any) -> dict[str, list[float]]:
    """The parts of each standardized weight's gradient, summed over its filters.

    The model is run in the mode it is in; gradients of its parameters are left alone.
    """
    uses: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def look(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        uses[module] = args[0].detach(), out

    weights = (module for module in model.modules() if isinstance(module, WeightNormalizer))
    hooks = [each.register_forward_hook(look) for each in weights if each.standardizes]
    try:
        loss = task.measured_loss(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not uses:
        return {}
    grads = torch.autograd.grad(loss, [out for _, out in uses.values()])
    parts = [
        ws_gradient_decomposition(weight, grad)
        for (weight, _), grad in zip(uses.values(), grads, strict=True)
    ]
    return {
        f"ws_gradients_{name}": [float(getattr(part, name).sum()) for part in parts]
        for name in ("a", "b", "c")
    }


def _is_measured(value: Any) -> bool:
    if isinstance(value, list):
        return any(each is not None for each in value)
    return value is not None
