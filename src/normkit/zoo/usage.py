"""A model in use, before and after a conversion."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conversion.plan import Plan, plan_conversion
from normkit.inspection import Survey
from normkit.zoo import running
from normkit.zoo.report import Outcome

LIMIT = 1e-5  # relative, in eval mode, for what is said to be exact
LIMIT_WIDE = 1e-9  # the same in double precision


class Usage:
    """What a model gave before it was converted."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.example, self.first = running.first(model)
        self.output: list[Tensor] | None = None

    @property
    def probe(self) -> tuple[Any, ...]:
        """What the model takes in eval mode: detectors get no targets."""
        return self.example[:1]

    def before(self, plan: Plan) -> None:
        """Take the output in eval mode, if it is not known and will be needed."""
        if self.output is None and self._compares(plan):
            self.output = running.evaluate(self.model, self.example)
            self.model.train()

    def _compares(self, plan: Plan) -> bool:
        # the certificate has the difference too, except for detectors: boxes leap, features do not
        return plan.exact or running.is_detector(self.model)

    def failures(self, target: str, plan: Plan, outcome: Outcome) -> Iterator[str]:
        """Run the converted model, and compare."""
        certificate = plan.certificate
        assert certificate is not None
        outcome.difference = certificate.difference
        if self._compares(plan):
            assert self.output is not None
            output = running.evaluate(self.model, self.example)
            outcome.difference = running.difference(self.output, output)
        if plan.exact and not certificate.layers_exact and not certificate.unreached:
            yield f"the certificate contradicts the plan: {certificate.verdict}"
        if plan.exact:
            yield from self._inexact(target, plan, outcome)
        now = running.train(self.model, self.example)
        if self.first.finite and not now.finite:
            yield "the loss or a gradient is not finite"
        for name in sorted(self._successors(plan) - now.names):
            yield f"{name} gets no gradient"

    def _inexact(self, target: str, plan: Plan, outcome: Outcome) -> Iterator[str]:
        """Whether the output is another one, though that was not to be.

        A deep model can turn rounding errors into more than is allowed. With double precision,
        which has a billionth of them, that is told from an error of our own.
        """
        assert outcome.difference is not None
        if not outcome.difference <= LIMIT:
            plan.undo()
            outcome.wide = self._difference_in_double(target)
            plan.apply(False)
            if not outcome.wide <= LIMIT_WIDE:
                yield f"said to be exact, but the output differs by {outcome.difference:.1e}"

    def _difference_in_double(self, target: str) -> float:
        x = self.example[0]
        wide = ([t.double() for t in x] if isinstance(x, list) else x.double(),)
        model = copy.deepcopy(self.model).double()
        before = running.evaluate(model, wide)
        plan_conversion(model, target).apply(False)
        return running.difference(before, running.evaluate(model, wide))

    def _successors(self, plan: Plan) -> set[str]:
        """The parameters that got a gradient before, and those that took their places."""
        got = self.first.names
        expected = {name for name, _ in self.model.named_parameters() if name in got}
        for step in plan.steps:
            if step.action == "convert" and any(n.startswith(f"{step.path}.") for n in got):
                new = self.model.get_submodule(step.path).named_parameters(step.path)
                expected |= {name for name, parameter in new if parameter.requires_grad}
        return expected


@torch.no_grad()
def wear_in(found: Survey) -> None:
    """Scales and shifts as training leaves them.

    At their usual start, 1 and 0, a loss of them would not show; and a last scale of 0, as some
    residual blocks have, hides the whole block.
    """
    for site in found:
        for name, parameter in site.module.named_parameters():
            if name.endswith("weight") and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.1, 0.1)
