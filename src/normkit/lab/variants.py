"""From a setting and a seed to the model that is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normkit import plan_conversion, standardize, survey
from normkit.errors import NothingToDo, OptionError, UnknownName, nearest
from normkit.lab.experiment import Setting, Step, Train
from normkit.lab.fresh_start import derive, drawn, start_fresh
from normkit.lab.models import build
from normkit.lab.reading_steps import KINDS, RECIPES
from normkit.lab.worker_batch import set_worker_batch
from normkit.layers.bcn import BCN


def make(setting: Setting, classes: int, shape: tuple[int, int, int], seed: int) -> nn.Module:
    """The model of a setting, in training mode on the CPU; ``seed`` is ``Run.torch_seed()``.

    All variants of a network draw the same weights from the same seed before anything is
    converted, and what a step draws comes from the seed and the place of the layer alone: so
    whatever two variants share starts bit for bit alike. Torch's own random numbers are left
    where they were.

    >>> from normkit.lab.experiment import Setting, Step
    >>> ubn = Setting(steps=(Step("norm", "ubn", options={"tau": 0.25}),))
    >>> model, plain = make(ubn, 10, (1, 8, 8), seed=1), make(Setting(), 10, (1, 8, 8), seed=1)
    >>> model.conv1.norm.tau, torch.equal(model.fc.weight, plain.fc.weight)
    (0.25, True)
    """
    with drawn(seed):
        model = build(setting.model, classes, shape)
        for step in setting.steps:
            example = torch.randn(2, *shape)
            with drawn(derive(seed, step.kind, step.name)):
                _do(model, step, setting.train, example, seed)
        if setting.train.worker_batch is not None:
            set_worker_batch(model, setting.train.worker_batch)
    return model.train()


def followers(model: nn.Module) -> list[BCN]:
    """The layers whose estimates move at the learning rate: micro-batch BCN without a fixed rate.

    Before a forward at a new learning rate, each needs ``set_update_rate(lr)``, and after each
    step of the optimizer ``commit()``. Neither waits for a device, and both write in place, so
    that a recorded graph sees them.
    """
    found = (layer for layer in model.modules() if isinstance(layer, BCN) and layer.micro)
    return [layer for layer in found if layer.update_rate is None]


def _do(model: nn.Module, step: Step, train: Train, example: torch.Tensor, seed: int) -> None:
    options = dict(step.options)
    if step.kind == "norm":
        _norm(model, step, options, seed)
    elif step.kind == "recipe":
        _recipe(model, step, options, train, example)
    elif step.kind == "weights":
        if step.where is not None:
            raise OptionError("a step of weights has no where: it takes all before a norm.")
        standardize(model, step.name, example=example, **options)
    else:
        raise OptionError(f"{step.kind!r} is no kind of step. {nearest(step.kind, KINDS)}")


def _norm(model: nn.Module, step: Step, options: dict[str, Any], seed: int) -> None:
    where: Any = step.where
    if where is None and any(site.kind == "input_norm" for site in survey(model)):
        where = "!kind:input_norm"  # it belongs to the data, not to the network
    plan = plan_conversion(model, step.name, where, example=False, **options)
    sites = {site.path: site for site in survey(model)}
    left = [s for s in plan.steps if s.action == "skip" and sites[s.path].kind == "bn"]
    if left:
        raise OptionError(
            f"{len(left)} of the batch norms cannot become {step.name}, such as {left[0].path}: "
            f"{left[0].reason}."
        )
    if not plan.count("convert") and not plan.count("keep"):
        said = next((s.reason for s in plan.steps), "it has no norms")
        raise NothingToDo(f"No norm of the model can become {step.name}: {said}.")
    plan.apply(example=False)
    start_fresh(model, plan, sites, options, seed)


def _recipe(
    model: nn.Module, step: Step, options: dict[str, Any], train: Train, example: torch.Tensor
) -> None:
    if step.name not in RECIPES:
        raise UnknownName(f"There is no recipe {step.name!r}. {nearest(step.name, RECIPES)}")
    if step.name in ("bnet", "ubn"):
        options.setdefault("start", _start(step.name, options))
    if step.name == "bgn" and not options.keys() & {"groups", "batch_size"}:
        options["batch_size"] = train.worker_batch or train.batch
    plan = RECIPES[step.name](model, where=step.where, example=example, **options)
    plan.apply(example=False)


def _start(recipe: str, options: dict[str, Any]) -> str:
    """How kernels start in a network that is trained from scratch: as the authors' code does it.

    bnet lets blocks start as their shortcut; with all norms at zero nothing would ever be learned.
    """
    if recipe == "ubn":
        return "fan_out"
    return "torch" if options.get("placement") == "all" else "zero"
