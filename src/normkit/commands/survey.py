"""Find every normalization in a model: what it is, where it stands, what feeds and follows it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from torch import Tensor, nn

from normkit import models
from normkit.commands import outputs, subject
from normkit.commands.screen import console, table
from normkit.core.atomic_write import atomic_write_all
from normkit.errors import NormkitError, OptionError
from normkit.inspection import Survey, select, survey
from normkit.inspection.survey import CELLS, SHARED

NAME = "survey"
HELP = "every normalization in a model"
EXAMPLES = f"""\
examples:
  normkit survey timm:resnet50
  normkit survey torchvision:fcn_resnet50 --where 'classifier.*'
  normkit survey timm:mobilenetv3_small_050 --example 1x3x64x64
      run the model once: what feeds and follows a norm is then observed, not guessed
  normkit survey mypackage.nets:small_net --build width=32 --json norms.json

{subject.REFERENCES}

{subject.WHERE}"""
LIBRARIES = ("timm:", "torchvision:")  # whose models can be built without memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subject.add_model(parser)
    subject.add_where(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all facts to a file")
    parser.add_argument("--force", action="store_true", help="overwrite that file")


def run(options: argparse.Namespace) -> int:
    if options.json is not None:
        outputs.check([options.json], options.force)
    example = subject.example_of(options)
    quick = example is None and options.weights is None and options.model.startswith(LIBRARIES)
    found = _look(subject.model_of(options, meta=quick), example, options.example)
    sites = select(found, subject.where_of(options))
    columns = {name: [cell(site) for site in sites] for name, cell in CELLS.items()}
    alike = {name: cells[0] for name, cells in columns.items() if name in SHARED and _alike(cells)}
    shown = {name: cells for name, cells in columns.items() if name not in alike}
    title = f"{options.model}: {len(sites)} of {len(found)} norms ({_counts(found.kinds)})"
    screen = console()
    screen.print(table(title, list(shown), zip(*shown.values(), strict=True)))
    if alike:
        screen.print("all: " + ", ".join(f"{name} {cell}" for name, cell in alike.items()))
    if found.weights:
        kinds = Counter(weight.kind for weight in found.weights)
        screen.print(f"normalized weights: {_counts(kinds)}")
    if options.json is not None:
        text = json.dumps([site.to_dict() for site in sites], indent=1) + "\n"
        atomic_write_all({options.json: outputs.text(text)})
    return 0


def _look(model: nn.Module, example: Tensor | None, shape: str) -> Survey:
    try:
        return survey(model, example)
    except NormkitError:
        raise
    except Exception as error:  # of the model's own forward
        said = f"{type(error).__name__}: {models.first_line(error)}"
        raise OptionError(f"The model fails on an input of {shape}: {said}.") from error


def _alike(cells: list[str]) -> bool:
    return len(cells) > 1 and len(set(cells)) == 1 and bool(cells[0])


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
