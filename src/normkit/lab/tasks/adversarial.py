"""Adversarial training: every batch is attacked by projected gradient descent, and so is the test.

Madry et al. 2018. ε and the step are shares of the way from black to white, in the largest norm:
images are attacked as pixels, whatever [data] normalizes them to, and stay images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normkit.core.messages import first_line
from normkit.core.optional_dependencies import require
from normkit.errors import OptionError, nearest
from normkit.lab.data import Sets
from normkit.lab.experiment.records import Setting
from normkit.lab.formats import ImageFormat, wide
from normkit.lab.results import METRICS, TaskMetric
from normkit.lab.tasks.base import Losses, TaskError, at_rest
from normkit.lab.tasks.classification import (
    Classification,
    ClassificationScore,
    correct,
    loss_of,
    outputs_of,
)
from normkit.lab.tasks.drawing import beside, pixels

MODES = ("eval", "train")
# what attacks the test, and the library that does it: its name, and the extra that brings it
JUDGES: Mapping[str, tuple[str, str] | None] = {
    "pgd": None,
    "foolbox": ("foolbox", "tasks"),
    "autoattack": ("pyautoattack", "autoattack"),
}
PICTURES = 3
FEWEST = 4  # classes that AutoAttack's loss compares
VISIBLE = 10  # times a perturbation is drawn stronger than it is


class Adversarial(Classification):
    """Classification of attacked images.

    ``steps`` of size ``step`` away from the truth, from a random start within ``epsilon``, make a
    training batch; the test is attacked with ``judge_steps``. ``attack_mode`` is the mode of the
    network while it is attacked in training: in "train" the running statistics see every step of
    the attack as well. ``judge`` "foolbox" lets that library attack the test instead, in the same
    way; "autoattack" is the ensemble of Croce & Hein 2020 in its standard form, without steps to
    choose: an image counts as right only if four attacks have failed.
    """

    metrics: Mapping[str, TaskMetric] = {"robust_accuracy": TaskMetric(), **METRICS}
    takes_metrics: ClassVar[bool] = False

    def __init__(
        self,
        epsilon: float = 4 / 255,
        step: float = 2 / 255,
        steps: int = 4,
        judge_steps: int = 20,
        attack_mode: str = "eval",
        judge: str = "pgd",
    ) -> None:
        if not 0 < epsilon <= 1:
            raise OptionError(
                f"epsilon is {epsilon:g}, expected a share of the way from black to white, such as "
                "0.0157. Without an attack, try the task classification."
            )
        if not 0 < step <= 2 * epsilon:
            raise OptionError(f"step is {step:g}, expected more than 0 and at most 2·epsilon.")
        for name, value in (("steps", steps), ("judge_steps", judge_steps)):
            if not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} is {value!r}, expected 1 or more.")
        choices = (("attack_mode", attack_mode, MODES), ("judge", judge, tuple(JUDGES)))
        for name, word, words in choices:
            if word not in words:
                raise OptionError(f"{name} is {word!r}. {nearest(str(word), words)}")
        self.epsilon, self.step_size, self.steps = epsilon, step, steps
        self.judge_steps, self.attack_mode, self.judge = judge_steps, attack_mode, judge

    def attach(self, setting: Setting, sets: Sets, format: ImageFormat, seed: int) -> None:
        super().attach(setting, sets, format, seed)
        if not hasattr(sets.train, "scale"):
            raise OptionError(
                f"{setting.data.name} does not say what black and white are: an attack needs the "
                "scale and shift of its loaders. Try a set of the lab."
            )
        self.attack = Attack(self, sets.train)
        self.check_judge(sets.classes)

    def check_judge(self, classes: int) -> None:
        """What the attack on the test needs, asked for before anything trains."""
        self.judging_library()
        if self.judge == "autoattack" and classes < FEWEST:
            raise OptionError(
                f"AutoAttack compares the likeliest {FEWEST} classes, and there are {classes}. Try "
                'judge = "pgd" with many judge_steps.'
            )

    def judging_library(self) -> Any:
        library = JUDGES[self.judge]
        return None if library is None else require(*library, f'judge = "{self.judge}"')

    def try_model(
        self, model: nn.Module, samples: int, classes: int, shape: tuple[int, ...]
    ) -> None:
        super().try_model(model, samples, classes, shape)
        self.check_judge(classes)
        labels = torch.zeros(samples, dtype=torch.long)
        with torch.enable_grad():
            images = self.example(shape, samples).requires_grad_()
            image_gradient(loss_of(outputs_of(model(images))[0], labels), images)

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        images, labels = batch
        with mode_of(model, self.attack_mode):
            attacked = self.attack(model, images, labels, self.steps)
        return super().loss(model, (attacked, labels))

    def evaluation(self, part: str) -> RobustScore:
        score = RobustScore(self.format.device, self.sets.classes, self.format.precision, part)
        score.task, score.criterion = self, self.criterion
        return score

    def judged(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """Test images after the attack that they are judged by."""
        if self.judge == "foolbox":
            return self.attack.by_foolbox(model, images, labels, self.judge_steps)
        if self.judge == "autoattack":
            return self.attack.by_autoattack(model, images, labels)
        return self.attack(model, images, labels, self.judge_steps)

    def pictures(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Test images, the same attacked, and the difference, made visible."""
        images, labels = next(iter(self.evaluation_batches("test")))
        images, labels = images[:PICTURES], labels[:PICTURES]
        attacked = self.judged(model, images, labels)
        answers = [model(each).argmax(1).tolist() for each in (images, attacked)]
        clean, worse = (pixels(each, self.sets.test) for each in (images, attacked))
        shown = (0.5 + VISIBLE * (worse - clean)).clamp(0, 1)
        for i, label in enumerate(labels.tolist()):
            caption = (
                f"class {label}: answer {answers[0][i]}, attacked {answers[1][i]}; the difference "
                f"is {VISIBLE} times as strong"
            )
            yield caption, beside(clean[i], worse[i], shown[i])


class Attack:
    """Projected gradient descent in the largest norm, between black and white."""

    def __init__(self, task: Adversarial, loader: Any) -> None:
        self.task = task
        format = task.format
        scale, shift = (
            getattr(loader, name).to(format.device, format.dtype) for name in ("scale", "shift")
        )
        self.black, self.range = shift, scale * getattr(loader, "white", 255)  # (1, C, 1, 1) each

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
        """Images within ε of those given, on which the loss is larger."""
        reach, stride = self.task.epsilon * self.range, self.task.step_size * self.range
        low = torch.maximum(images - reach, self.black)
        high = torch.minimum(images + reach, self.black + self.range)
        start = images + reach * (2 * torch.rand_like(images) - 1)
        attacked = start.clamp(low, high).detach()
        with torch.enable_grad():
            for _ in range(steps):
                attacked.requires_grad_()
                with self.task.format.autocast():
                    logits = outputs_of(model(attacked))[0]
                gradient = image_gradient(loss_of(logits, labels), attacked)
                attacked = (attacked.detach() + stride * gradient.sign()).clamp(low, high)
        return attacked

    def by_foolbox(self, model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
        """The same attack by foolbox, of pixels from 0 to 1."""
        foolbox = self.task.judging_library()
        pixels = PixelNetwork(self, model).eval()
        wrapped = foolbox.PyTorchModel(pixels, bounds=(0, 1), device=images.device)
        relative = self.task.step_size / self.task.epsilon
        attack = foolbox.attacks.LinfPGD(rel_stepsize=relative, steps=steps)
        plain = ((images - self.black) / self.range).clamp(0, 1)
        with torch.enable_grad():
            _, found, _ = attack(wrapped, plain, labels, epsilons=self.task.epsilon)
        attacked: Tensor = found.detach() * self.range + self.black
        return attacked

    def by_autoattack(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """The worst of four attacks that have nothing to tune, of pixels from 0 to 1."""
        library = self.task.judging_library()
        attack = library.AutoAttack(
            PixelNetwork(self, model).eval(),
            eps=self.task.epsilon,
            device=images.device,
            seed=0,  # of torch's random numbers, which an evaluation has for itself
        )
        others = min(attack.fab.n_target_classes, self.task.sets.classes - 1)
        attack.fab.n_target_classes = attack.apgd_targeted.n_target_classes = others
        plain = ((images - self.black) / self.range).clamp(0, 1)
        with at_rest(model.parameters()):  # a library may call backward()
            found, _ = attack.run_standard_evaluation(plain, labels, batch_size=len(images))
        attacked: Tensor = found.detach() * self.range + self.black
        return attacked


class PixelNetwork(nn.Module):
    """A network as libraries want to attack it: of pixels from 0 to 1, in float32 or wider."""

    def __init__(self, attack: Attack, model: nn.Module) -> None:
        super().__init__()
        self.parts = (attack, model)  # no submodule: modes and parameters are the task's

    def forward(self, values: Tensor) -> Tensor:
        attack, model = self.parts
        with attack.task.format.autocast():
            logits, *_ = outputs_of(model(values * attack.range + attack.black))
        return wide(logits)


class RobustScore(ClassificationScore):
    """Right answers, to test images as they are and attacked."""

    task: Adversarial
    robust: Tensor | None = None

    def add(self, model: nn.Module, batch: Any) -> None:
        super().add(model, batch)
        images, labels = batch
        attacked = self.task.judged(model, images, labels)
        with self.task.format.autocast():
            right = correct(model(attacked), labels)
        self.robust = right if self.robust is None else self.robust + right

    def values(self) -> dict[str, float | list[float]]:
        robust = 0.0 if self.robust is None else float(self.robust) / self.samples
        return {"robust_accuracy": robust, **super().values()}


def image_gradient(loss: Tensor, images: Tensor) -> Tensor:
    """Of the images alone: no gradient of a parameter is added to."""
    try:
        (gradient,) = torch.autograd.grad(loss, images)
    except RuntimeError as error:
        raise TaskError(
            "No gradient of the loss reaches the images, so they cannot be attacked: "
            f"{first_line(error)}. Try a model without argmax, rounding, "
            "detach() or no_grad()."
        ) from error
    return gradient


@contextmanager
def mode_of(model: nn.Module, mode: str) -> Iterator[None]:
    """The flags of all modules, set directly, since frozen layers have a train() of their own."""
    if mode == "train":
        yield
        return
    modules = [module for module in model.modules() if module.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
