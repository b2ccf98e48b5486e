"""What a variant does to the model: norm, recipe and weights, or a list of steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from normkit import catalog
from normkit.conversion import recipes
from normkit.conversion.targets import TARGETS
from normkit.errors import nearest
from normkit.lab.experiment import Step
from normkit.lab.lines import KeyPath
from normkit.lab.problems import Problems
from normkit.lab.reading_fields import NONE, Unfit, option, said

KINDS = ("norm", "recipe", "weights")
# what the sugar of a variant calls the options of each kind
OPTIONS = {"norm": "options", "recipe": "recipe_options", "weights": "weights_options"}
SUGAR = (*KINDS, *OPTIONS.values(), "where")

RECIPES: dict[str, Callable[..., Any]] = {
    name: made
    for name, made in vars(recipes).items()
    if inspect.isfunction(made) and "model" in inspect.signature(made).parameters
}
NOT_SAID = ("model", "where", "example", "optimizer")  # arguments that no file gives
# the layer whose options a recipe passes on; xbn and micro_batch say it by their option norm
LAYER_OF = {"bgn": "bgn", "bnet": "bnet", "ibn": "ibn", "ubn": "ubn", "xbn": "gn"}


def steps_of(variant: Mapping[str, Any], path: KeyPath, problems: Problems) -> tuple[Step, ...]:
    """The steps of a variant, from ``steps`` or from the keys that stand for it.

    Of norm, recipe and weights the norms come first, then the recipe, then the weights.
    """
    if "steps" not in variant:
        return _from_sugar(variant, path, problems)
    for key in SUGAR:
        if key in variant:
            problems.add((*path, key), "says again what steps says. Keep one of them.")
    listed = variant["steps"]
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        problems.add((*path, "steps"), 'expects a list of tables, such as [{norm = "gn"}].')
        return ()
    found = [_one(each, (*path, "steps", i), problems) for i, each in enumerate(listed)]
    return tuple(step for step in found if step is not None)


def _from_sugar(variant: Mapping[str, Any], path: KeyPath, problems: Problems) -> tuple[Step, ...]:
    found = []
    for kind in KINDS:
        table = {own: variant[key] for own, key in (("options", OPTIONS[kind]),) if key in variant}
        if kind not in variant:
            if table:
                problems.add((*path, OPTIONS[kind]), f"needs a {kind} that it belongs to.")
            continue
        if kind != "weights" and "where" in variant:
            table["where"] = variant["where"]
        keys = {"options": OPTIONS[kind]}
        found.append(_step(kind, {kind: variant[kind], **table}, path, problems, keys))
    if "where" in variant and not {"norm", "recipe"} & variant.keys():
        problems.add((*path, "where"), "needs a norm or recipe that it belongs to.")
    return tuple(step for step in found if step is not None)


def _one(table: Mapping[str, Any], path: KeyPath, problems: Problems) -> Step | None:
    for key in table:
        if key not in (*KINDS, "where", "options"):
            problems.unknown((*path, key), (*KINDS, "where", "options"))
    kinds = [kind for kind in KINDS if kind in table]
    if len(kinds) != 1:
        problems.add(path, f"expects one of norm, recipe and weights, got {len(kinds)} of them.")
        return None
    if kinds == ["weights"] and "where" in table:
        problems.add((*path, "where"), "is for norms and recipes; weights change everywhere.")
    return _step(kinds[0], table, path, problems, {"options": "options"})


def _step(
    kind: str,
    table: Mapping[str, Any],
    path: KeyPath,
    problems: Problems,
    keys: Mapping[str, str],  # what the file calls the key "options"
) -> Step | None:
    name, where, options = table[kind], table.get("where"), table.get("options", {})
    if where is not None and not isinstance(where, str):
        problems.add((*path, "where"), f'expects a text such as "stem", got {said(where)}.')
        where = None
    if name not in (known := names(kind)):
        problems.add((*path, kind), f"is {said(name)}. {_hint(kind, name, known)}")
        return None
    at = (*path, keys["options"])
    if not isinstance(options, Mapping):
        problems.add(at, f"expects a table of options, got {said(options)}.")
        return None
    return Step(kind, name, where, options_of(kind, name, options, at, problems))


def options_of(
    kind: str, name: str, options: Mapping[str, Any], path: KeyPath, problems: Problems
) -> dict[str, Any]:
    """Options by the signature of the layer or recipe that will get them."""
    known = known_options(kind, name, options)
    found: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            hint = nearest(key, known) if known else "It has none."
            problems.add((*path, key), f"is no option of {name}. {hint}")
            continue
        try:
            nothing = value == NONE and "None" in known[key]
            found[key] = None if nothing else option(value)
        except Unfit as unfit:
            problems.add((*path, key), f"expects {unfit}, got {said(value)}.")
    return found


def names(kind: str) -> list[str]:
    if kind == "weights":
        return catalog.names("weight")
    return list(TARGETS) if kind == "norm" else list(RECIPES)


def known_options(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Every option of a layer or recipe, with its annotation."""
    if kind != "recipe":
        if name not in catalog.ENTRIES:  # torch.nn's own, such as torch_bn
            return dict.fromkeys(TARGETS[name].options, "")
        found = catalog.find(name).options()
        return {k: str(p.annotation) for k, p in found.items() if k not in ("device", "dtype")}
    parameters = inspect.signature(RECIPES[name]).parameters
    own = {
        key: str(parameter.annotation)
        for key, parameter in parameters.items()
        if key not in NOT_SAID and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    default = parameters["norm"].default if "norm" in parameters else LAYER_OF.get(name)
    layer = given.get("norm", default)
    if passes_on and layer in TARGETS:
        own = {**known_options("norm", str(layer), {}), **own}
    return own


def _hint(kind: str, name: Any, known: list[str]) -> str:
    for other in KINDS:
        if other != kind and name in names(other):
            return f"Did you mean {other} = {name!r}?"
    return nearest(str(name), known)
