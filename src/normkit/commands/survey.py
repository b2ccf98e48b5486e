"""Find every normalization in a model: what it is, where it stands, what feeds and follows it."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from normkit.commands import model_arguments
from normkit.commands.output import add_json, check_json, screen_of, table, write_json
from normkit.errors import NormkitError, OptionError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from normkit.inspection import Survey

NAME = "survey"
HELP = "every normalization in a model"
EXAMPLES = f"""\
examples:
  normkit survey timm:resnet50
  normkit survey torchvision:fcn_resnet50 --where 'classifier.*'
  normkit survey timm:mobilenetv3_small_050 --example 1x3x64x64
      run the model once: what feeds and follows a norm is then observed, not guessed
  normkit survey mypackage.nets:small_net --build width=32 --json norms.json

{model_arguments.REFERENCES}

{model_arguments.WHERE}"""
LIBRARIES = ("timm:", "torchvision:")  # whose models can be built without memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments.add_model(parser)
    model_arguments.add_where(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from normkit.inspection import select
    from normkit.inspection.survey import CELLS, SHARED

    check_json(options)
    example = model_arguments.example_of(options)
    quick = example is None and options.weights is None and options.model.startswith(LIBRARIES)
    surveyed = _survey(model_arguments.model_of(options, meta=quick), example, options.example)
    sites = select(surveyed, model_arguments.where_of(options))
    columns = {name: [cell(site) for site in sites] for name, cell in CELLS.items()}
    alike = {name: cells[0] for name, cells in columns.items() if name in SHARED and _alike(cells)}
    shown = {name: cells for name, cells in columns.items() if name not in alike}
    title = f"{options.model}: {len(sites)} of {len(surveyed)} norms ({_counts(surveyed.kinds)})"
    screen = screen_of(options)
    screen.print(table(title, list(shown), zip(*shown.values(), strict=True)))
    if alike:
        screen.print("all: " + ", ".join(f"{name} {cell}" for name, cell in alike.items()))
    if surveyed.weights:
        kinds = Counter(weight.kind for weight in surveyed.weights)
        screen.print(f"normalized weights: {_counts(kinds)}")
    write_json(options, [site.to_dict() for site in sites])
    return 0


def _survey(model: nn.Module, example: Tensor | None, shape: str) -> Survey:
    from normkit.core.messages import error_words
    from normkit.inspection import survey

    try:
        return survey(model, example)
    except NormkitError:
        raise
    except Exception as error:  # of the model's own forward
        text = f"The model fails on an input of {shape}: {error_words(error)}."
        raise OptionError(text) from error


def _alike(cells: list[str]) -> bool:
    return len(cells) > 1 and len(set(cells)) == 1 and bool(cells[0])


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
