"""What a variant does to the model: norm, recipe and weights, or a list of steps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from normkit import catalog
from normkit.conversion.recipes import RECIPES
from normkit.conversion.targets import TARGETS
from normkit.errors import nearest
from normkit.lab.experiment.fields import NONE, WrongType, option, shorten
from normkit.lab.experiment.problems import KeyPath, Problems
from normkit.lab.experiment.records import ModelStep

KINDS = ("norm", "recipe", "weights")
# what a variant without a list of steps calls the options of each kind
OPTIONS = {"norm": "options", "recipe": "recipe_options", "weights": "weights_options"}
SHORT_KEYS = (*KINDS, *OPTIONS.values(), "where")
STEP_KEYS = (*KINDS, "where", "options")
NOT_OPTIONS = ("model", "where", "example", "optimizer")  # arguments of recipes that no file gives


def steps_of(
    variant: Mapping[str, Any], path: KeyPath, problems: Problems
) -> tuple[ModelStep, ...]:
    """The steps of a variant, from ``steps`` or from the keys that stand for it.

    Of norm, recipe and weights the norms come first, then the recipe, then the weights.
    """
    if "steps" not in variant:
        steps = _from_short_keys(variant, path, problems)
        return tuple(step for step in steps if step is not None)
    for key in SHORT_KEYS:
        if key in variant:
            problems.add((*path, key), "repeats what steps says. Keep one of them.")
    tables = variant["steps"]
    if not isinstance(tables, list) or not all(isinstance(each, Mapping) for each in tables):
        problems.add((*path, "steps"), 'expects a list of tables, such as [{norm = "gn"}].')
        return ()
    steps = [_from_table(each, (*path, "steps", i), problems) for i, each in enumerate(tables)]
    return tuple(step for step in steps if step is not None)


def names(kind: str) -> list[str]:
    if kind == "weights":
        return catalog.names("weight")
    return list(TARGETS) if kind == "norm" else list(RECIPES)


def known_options(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Every option of a layer or recipe, with its annotation."""
    if kind != "recipe":
        if name not in catalog.ENTRIES:  # torch.nn's own, such as torch_bn
            return dict.fromkeys(TARGETS[name].options, "")
        parameters = catalog.find(name).options()
        return {k: str(p.annotation) for k, p in parameters.items() if k not in ("device", "dtype")}
    recipe = RECIPES[name]
    parameters = inspect.signature(recipe.plan).parameters
    own = {
        key: str(parameter.annotation)
        for key, parameter in parameters.items()
        if key not in NOT_OPTIONS and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    default = parameters["norm"].default if "norm" in parameters else recipe.layer
    layer = given.get("norm", default)
    if passes_on and layer in TARGETS:
        own = {**known_options("norm", str(layer), {}), **own}
    return own


def _from_short_keys(
    variant: Mapping[str, Any], path: KeyPath, problems: Problems
) -> list[ModelStep | None]:
    steps = []
    for kind in KINDS:
        if kind in variant:
            where = variant.get("where") if kind != "weights" else None
            options = variant.get(OPTIONS[kind], {})
            at = (*path, OPTIONS[kind])
            steps.append(_step(kind, variant[kind], where, options, path, at, problems))
        elif OPTIONS[kind] in variant:
            problems.add((*path, OPTIONS[kind]), f"needs a {kind} that it belongs to.")
    if "where" in variant and not {"norm", "recipe"} & variant.keys():
        problems.add((*path, "where"), "needs a norm or recipe that it belongs to.")
    return steps


def _from_table(table: Mapping[str, Any], path: KeyPath, problems: Problems) -> ModelStep | None:
    for key in table:
        if key not in STEP_KEYS:
            problems.unknown((*path, key), STEP_KEYS)
    kinds = [kind for kind in KINDS if kind in table]
    if len(kinds) != 1:
        problems.add(path, f"expects one of norm, recipe and weights, got {len(kinds)} of them.")
        return None
    if kinds == ["weights"] and "where" in table:
        problems.add((*path, "where"), "is for norms and recipes; weights change everywhere.")
    where, options = table.get("where"), table.get("options", {})
    return _step(kinds[0], table[kinds[0]], where, options, path, (*path, "options"), problems)


def _step(
    kind: str,
    name: Any,
    where: Any,
    options: Any,
    path: KeyPath,
    options_path: KeyPath,
    problems: Problems,
) -> ModelStep | None:
    if where is not None and not isinstance(where, str):
        problems.add((*path, "where"), f'expects a string such as "stem", got {shorten(where)}.')
        where = None
    if name not in names(kind):
        other = next((other for other in KINDS if other != kind and name in names(other)), None)
        hint = catalog.suggestion(name, names(kind))
        hint = f"Did you mean {other} = {name!r}?" if other else hint
        problems.add((*path, kind), f"is {shorten(name)}. {hint}")
        return None
    if not isinstance(options, Mapping):
        problems.add(options_path, f"expects a table of options, got {shorten(options)}.")
        return None
    known = known_options(kind, name, options)
    checked: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            hint = nearest(key, known) if known else "It has none."
            problems.add((*options_path, key), f"is not an option of {name}. {hint}")
            continue
        try:
            checked[key] = option_value(value, known[key])
        except WrongType as error:
            problems.add((*options_path, key), f"expects {error}, got {shorten(value)}.")
    return ModelStep(kind, name, where, checked)


def option_value(value: Any, annotation: str) -> Any:
    """The value of an option; "none" stands for None where the annotation allows it."""
    return None if value == NONE and "None" in annotation else option(value)
