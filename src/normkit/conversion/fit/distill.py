"""On from a fit: train on the same images, without labels, to match what the old network gives.

The model is not changed: the student is the model with new norms that compute with tensors of
their own. The best state on the images that are held out is kept, that of the fit among them, so
the result is never worse than the fit there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normkit.conversion.edits import tensors
from normkit.conversion.fit.data import UNTOUCHED, Fit, ImageRun
from normkit.conversion.fit.lockstep import FitSite
from normkit.conversion.fit.report import agreement, output_error, output_leaves
from normkit.conversion.fit.resume import Course
from normkit.conversion.fit.views import flipped_and_cropped
from normkit.conversion.fit.weights import StandardizedSite, standardized
from normkit.conversion.forward_probe import full_precision, leaves
from normkit.errors import OptionError
from normkit.inspection import call_model, undisturbed
from normkit.inspection.run import replaced_forward

NORMS_LR = 1e-2  # of scales and shifts that are trained alone
WITH_OTHERS_LR, OTHERS_LR = 2e-3, 2e-4  # more undoes what a regression of the weights has reached
HINTS = 8  # norms inside whose outputs are matched, too
CHECKS = 12  # of the held-out part, in all
PATIENCE = 6  # checks without progress, after which it stops: it often rises before it falls
FOR_VIEWS = 1.2  # times the error for images as given: photos have 1.04, digits 1.5 to 2.9
SMALLEST = 1e-12  # of what is divided by
WARM = 0.1  # of the steps, with a rising learning rate


@dataclass(frozen=True)
class Distilled:
    """What came of it: values by path, and how it went on the images that were held out."""

    values: dict[str, Tensor]
    steps: int
    best_step: int
    """After how many steps it was best: 0 means that the fit was."""
    output_error: float
    agreement: float | None
    augmented: bool
    """Whether images were flipped and cropped."""


@dataclass(frozen=True, eq=False)
class _Lesson:
    """Inputs and what the old network gives for them."""

    inputs: Any
    targets: list[Tensor]


class _Student:
    """The model with its new norms, as a function of tensors that can be trained."""

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[FitSite],
        everything: bool,
        weights: dict[str, Tensor],
    ) -> None:
        self.model = model
        self.active = False
        """Whether the model computes as the student; else as it is."""
        self.inside: list[Tensor] | None = None
        """Where a call leaves what some of its norms give."""
        order = sorted((p for p in places if p.chosen is not None), key=lambda place: place.turn)
        every = -(-len(order) // HINTS) if order else 1
        self.hinted = {id(place) for place in order[every - 1 :: every]}
        self.norms: list[tuple[FitSite, dict[str, Tensor]]] = []
        self.trained: dict[str, Tensor] = {}
        self.scales: set[str] = set()
        for place in places:
            candidate = place.current
            own = {n: t.detach() for n, t in tensors(candidate.edit.new).items()}
            new = candidate.edit.new
            parameters = {n for n, p in new.named_parameters() if p.requires_grad}
            fitted = candidate.values()
            for name in sorted(parameters if everything else set(fitted) & parameters):
                value = fitted.get(name, own[name]).detach().to(own[name].dtype, copy=True)
                own[name] = value.requires_grad_(True)
                self.trained[f"{place.site.path}.{name}"] = value
                self.scales.add(f"{place.site.path}.{name}")
            own |= {n: v.to(own[n].dtype) for n, v in fitted.items() if n not in parameters}
            self.norms.append((place, own))
        self.others: dict[str, Tensor] = {}
        if everything:
            inside = {id(p) for place in places for p in place.site.module.parameters()}
            for name, p in model.named_parameters():
                if id(p) not in inside and p.requires_grad and p.is_floating_point():
                    value = weights.get(name, p).detach().to(p.dtype, copy=True)
                    self.others[name] = value.requires_grad_(True)
            self.trained |= self.others
        if not self.trained:
            raise OptionError(
                "Distilling has nothing to train: every parameter has requires_grad=False. Try "
                f"model.requires_grad_(True), or fit alone. {UNTOUCHED}"
            )

    def described(self) -> dict[str, str]:
        """The new norms with their options, by path."""
        chosen = ((place, place.current) for place, _ in self.norms)
        return {place.site.path: str(candidate.edit.new) for place, candidate in chosen}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the norms of the model are the student's while it is active."""
        with ExitStack() as stack:
            for place, own in self.norms:
                module = place.site.module
                stand_in = self._stand_in(place, own, module.forward)
                stack.enter_context(replaced_forward(module, stand_in))
            yield

    def _stand_in(
        self, place: FitSite, own: dict[str, Tensor], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        new = place.current.edit.new

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.active:
                output = functional_call(new, own, args, kwargs)
            else:
                output = original(*args, **kwargs)
            if self.inside is not None and id(place) in self.hinted:
                self.inside.append(output)
            return output

        return forward

    def __call__(self, inputs: Any) -> list[Tensor]:
        self.active = True
        try:
            if not self.others:
                return leaves(call_model(self.model, inputs))
            wrapped = _Called(self.model)
            named = {f"model.{name}": value for name, value in self.others.items()}
            return leaves(functional_call(wrapped, named, (inputs,)))
        finally:
            self.active = False

    def looked_into(self, call: Callable[[], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """What a call gives, and what some norms inside gave on the way."""
        self.inside = []
        try:
            return call(), self.inside
        finally:
            self.inside = None

    @torch.no_grad()
    def teacher(self, inputs: Any) -> list[Tensor]:
        """What the old network gives."""
        return leaves(call_model(self.model, inputs))


class _Called(nn.Module):
    """A model that takes its inputs in whatever form batches have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return call_model(self.model, inputs)


def distill(
    model: nn.Module,
    places: Sequence[FitSite],
    weights: dict[str, Tensor],
    convolutions: Sequence[StandardizedSite],
    runs: Sequence[ImageRun],
    outputs: Sequence[Any],
    fit: Fit,
) -> Distilled:
    """Train scales and shifts, or all parameters; ``outputs`` are the old network's for each run.

    ``weights`` are those that were fitted beside the norms, by their paths, ``convolutions`` those
    whose weights are standardized in the new network.

    Adam with a rising, then falling rate. Each step takes some of the fitted images, flipped and
    cropped at random where the fit holds for such views, and asks the old network what it gives for
    them, at its outputs and at some norms inside: a few dozen images alone would be learned by
    heart. A few hundred steps at most are meant.
    """
    lessons = [_lesson(run, out, held_out=False) for run, out in zip(runs, outputs, strict=True)]
    tests = [_lesson(run, out, held_out=True) for run, out in zip(runs, outputs, strict=True)]
    lessons, tests = ([one for one in part if one.targets[0].numel()] for part in (lessons, tests))
    spread = _spread(lessons)
    student = _Student(model, places, fit.everything, weights)
    lessons = _pooled(lessons)
    groups = [
        {"params": [t for n, t in student.trained.items() if (n in student.scales) == scales],
         "lr": (WITH_OTHERS_LR if fit.everything else NORMS_LR) if scales else OTHERS_LR}
        for scales in (True, False)
    ]  # fmt: skip
    optimizer = torch.optim.Adam([g for g in groups if g["params"]], betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, steps=fit.distill))
    every = max(1, fit.distill // CHECKS)
    standard = standardized(convolutions, lambda: student.active)
    with undisturbed(model), student.in_place(), standard, full_precision(model):
        targets = [t for lesson in (*lessons, *tests) for t in lesson.targets]
        fitted = math.inf if fit.checkpoint is None else _error(student, tests)
        augment = fit.augment and _holds_for_views(student, tests)
        course = Course(student.trained, optimizer, schedule, fit, targets, student.described())
        while True:
            if (course.step % every == 0 or course.step == fit.distill) and not course.resumed:
                now = _error(student, tests)
                course.record(now)
                if fit.progress is not None:
                    fit.progress(course.step, now)
            course.resumed = False  # the step it goes on from was measured before
            if course.step == fit.distill or course.waited >= PATIENCE:
                break
            _train(student, _views(lessons, course.step, fit.batch, augment), spread, optimizer)
            schedule.step()
            course.step += 1
        course.take_best()
        if fitted < math.inf and not _error(student, tests) <= fitted:
            course.take_start()  # whatever a file held: never worse than the fit
        after = [student(test.inputs) for test in tests]
    old = [t for test in tests for t in test.targets]
    firsts = [test.targets[0] for test in tests], [out[0] for out in after]
    return Distilled(
        course.best,
        course.step,
        course.best_step,
        output_error(old, [t for out in after for t in out]) or 0.0,
        agreement(*([torch.cat(side)] for side in firsts)),
        augment,
    )


def _train(
    student: _Student, inputs: Any, spread: list[Tensor], optimizer: torch.optim.Optimizer
) -> None:
    targets, wanted = student.looked_into(lambda: student.teacher(inputs))
    with torch.enable_grad():
        outputs, given = student.looked_into(lambda: student(inputs))
        loss = _loss(outputs, targets, spread) + _hints(given, wanted)
        grads = torch.autograd.grad(loss, list(student.trained.values()), allow_unused=True)
    for tensor, grad in zip(student.trained.values(), grads, strict=True):
        tensor.grad = grad
    if bool(torch.isfinite(loss)):
        optimizer.step()


def _hints(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor | float:
    """How far the norms inside are from the old ones, relative to how much these vary."""
    errors = []
    for new, old in zip(given, wanted, strict=False):
        if new.shape == old.shape and old.dim() > 1 and old.numel():
            rest = [axis for axis in range(old.dim()) if axis != 1]
            spread = (old - old.mean(rest, keepdim=True)).float().square().mean()
            gap = (new.float() - old.float()).square().mean()
            errors.append(gap / spread.clamp(min=SMALLEST))
    return torch.stack(errors).mean() if errors else 0.0


def _pooled(lessons: Sequence[_Lesson]) -> list[_Lesson]:
    """All images together, if they are tensors of one shape, so that each step can take others."""
    inputs = [lesson.inputs for lesson in lessons]
    if not all(isinstance(x, Tensor) and x.shape[1:] == inputs[0].shape[1:] for x in inputs):
        return list(lessons)
    targets = zip(*(lesson.targets for lesson in lessons), strict=True)
    return [_Lesson(torch.cat(inputs), [torch.cat(parts) for parts in targets])]


def _views(lessons: Sequence[_Lesson], step: int, batch: int, augment: bool) -> Any:
    """What a step learns from; which images and how they are changed follows from its number, so
    that a resumed run sees the same."""
    inputs = lessons[step % len(lessons)].inputs
    if not isinstance(inputs, Tensor):
        return inputs
    size = min(len(inputs), max(1, batch // 2))
    turn, place = divmod(step, max(1, len(inputs) // size))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(turn))
    images = inputs[order[place * size : (place + 1) * size].to(inputs.device)]
    generator = torch.Generator().manual_seed(step)
    return flipped_and_cropped(images, generator) if augment else images


def _holds_for_views(student: _Student, tests: Sequence[_Lesson]) -> bool:
    """Whether the fit is nearly as good for flipped and cropped images as for those given.

    If not, as with letters and digits, such images are unlike those the network is for, and to
    match it there would cost what it has to say about the others.
    """
    if not all(isinstance(test.inputs, Tensor) for test in tests):
        return False
    generator = torch.Generator().manual_seed(0)
    views = [flipped_and_cropped(test.inputs, generator) for test in tests]
    old, new = ([t for view in views for t in run(view)] for run in (student.teacher, student))
    error = output_error(old, new)
    return error is not None and error <= FOR_VIEWS * _error(student, tests)


def _rate(step: int, steps: int) -> float:
    warm = max(1, int(WARM * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _lesson(run: ImageRun, output: Any, held_out: bool) -> _Lesson:
    """The fitted, or the held-out samples of a run."""
    targets, count = output_leaves(output), len(run.held_out)
    inputs = run.inputs(held_out)
    if not targets or inputs is None or any(t.shape[:1] != (count,) for t in targets):
        raise OptionError(
            "The outputs have no row for each image, as those of a detector, so they cannot be "
            f"matched. Distil a part of the model, such as its backbone, or fit alone. {UNTOUCHED}"
        )
    return _Lesson(inputs, [run.part(t, held_out) for t in targets])


def _spread(lessons: Sequence[_Lesson]) -> list[Tensor]:
    """Of each output, the mean square about the mean of all samples."""
    sizes = []
    for number in range(len(lessons[0].targets)):
        whole = torch.cat([lesson.targets[number].float().flatten(1) for lesson in lessons])
        sizes.append((whole - whole.mean(0)).square().mean().clamp(min=SMALLEST))
    return sizes


def _loss(outputs: Sequence[Tensor], targets: Sequence[Tensor], spread: Sequence[Tensor]) -> Tensor:
    """Of each output the mean square error, relative to how much it varies."""
    errors = [
        (out.float() - target.float()).square().mean() / size
        for out, target, size in zip(outputs, targets, spread, strict=True)
    ]
    return torch.stack(errors).mean()


def _error(student: _Student, tests: Sequence[_Lesson]) -> float:
    old = [t for test in tests for t in test.targets]
    new = [t for test in tests for t in student(test.inputs)]
    found = output_error(old, new)
    return math.inf if found is None or math.isnan(found) else found
