"""normkit lab new: the file of an experiment, with comments, from a few answers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit import catalog
from normkit.commands.output import check_outputs, screen_of, write_json, write_texts
from normkit.core.messages import counted
from normkit.errors import NormkitError, OptionError
from normkit.lab.experiment.reading import parse
from normkit.lab.experiment.records import OWN_DATA

MODEL = "as it is"  # the name of the variant whose norms stay


@dataclass(frozen=True)
class Question:
    """What is asked, and the default where nobody answers; an option of the same name answers."""

    name: str
    text: str
    default: Callable[[dict[str, Any]], Any]
    read: Callable[[str], Any] = str
    applies: Callable[[dict[str, Any]], bool] = lambda answers: True


def _norms(text: str) -> tuple[str, ...]:
    names = tuple(each.strip() for each in text.split(",") if each.strip())
    for name in names:
        catalog.find(name)
    if not names or len(set(names)) < len(names):
        raise OptionError(f"norms got {text!r}. Expected names of normkit list, each once: gn,bcn")
    return names


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise OptionError(f"Expected a number from 1 up, got {text!r}.")
    return int(text)


def _usual_norm(answers: dict[str, Any]) -> str:
    """The layer to which diagnosis sends most patients."""
    return max(catalog.names("activation"), key=lambda name: len(catalog.find(name).card.cures))


def _is_small(answers: dict[str, Any]) -> bool:
    return answers["data"] == "digits"


QUESTIONS = (
    Question("title", "What do you want to know?", lambda a: "Which norm is better here?"),
    Question("data", "Which images? (digits, cifar10, mnist, folder, csv, …)", lambda a: "digits"),
    Question(
        "path", "Where are they?", lambda a: "data", applies=lambda a: a["data"] in OWN_DATA
    ),
    Question(
        "model",
        "Which model? (torchvision:resnet18, timm:resnet50, mypackage.nets:build)",
        lambda a: "native:small_cnn" if _is_small(a) else "torchvision:resnet18",
    ),
    Question(
        "norms", "Which norms in place of its own? (a,b,…; normkit list)", _usual_norm, _norms
    ),
    Question("epochs", "How many epochs?", lambda a: "8" if _is_small(a) else "30", _count),
    Question("batch", "How many images a batch?", lambda a: "64", _count),
    Question("seeds", "How many seeds? (5 or more show small differences)", lambda a: "5", _count),
)  # fmt: skip


def new(options: argparse.Namespace) -> int:
    path: Path = options.file
    if path.suffix != ".toml":
        raise OptionError(f"{path} got the ending {path.suffix!r}, expected .toml.")
    check_outputs([path], options.force)
    ask = input if sys.stdin is not None and sys.stdin.isatty() and not options.yes else None
    answers = gather(vars(options), ask)
    text = file_text(answers)
    experiment = parse(text, path.stem)
    write_texts({path: text})
    screen = screen_of(options)
    screen.print(
        f"Written: {path}, {counted(len(experiment.runs()), 'run')}. Next:\n"
        f"  normkit lab check {path}\n  normkit lab run {path}",
        markup=False,
        soft_wrap=True,
    )
    write_json(options, {"file": path, "runs": len(experiment.runs()), **answers})
    return 0


def gather(given: dict[str, Any], ask: Callable[[str], str] | None) -> dict[str, Any]:
    """An answer to each question: an option, what is typed, or the default."""
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        if not question.applies(answers):
            continue
        option, default = given.get(question.name), str(question.default(answers))
        if option is not None or ask is None:
            answers[question.name] = question.read(default if option is None else str(option))
            continue
        while question.name not in answers:
            typed = ask(f"{question.text} [{default}] ").strip()
            try:
                answers[question.name] = question.read(typed or default)
            except NormkitError as error:
                print(error, file=sys.stderr)
    return answers


def file_text(answers: dict[str, Any]) -> str:
    """The file that the answers describe."""
    quoted = {key: json.dumps(value, ensure_ascii=False) for key, value in answers.items()}
    path = f"path = {quoted['path']}\n" if "path" in answers else ""
    small = _is_small(answers)
    variants = "".join(
        f'\n[[variants]]\nname = "{name}"\nnorm = "{name}" # normkit info {name} has its options\n'
        for name in answers["norms"]
    )
    return f"""\
# Read by normkit lab run; docs/experiments.md has all keys. What is not said has its default.
title = {quoted["title"]}
baseline = "{MODEL}" # every other variant is compared with it, seed by seed
metric = "accuracy" # or error, loss, top5_accuracy, top5_error
seeds = {answers["seeds"]} # more can be added later; what has been trained is kept
equivalence = 0.005 # a smaller difference does not matter

[data]
name = {quoted["data"]}
{path}validation = 0.0 # a share of the training images, for select = "best_validation"
{"crop = 1" if small else "flip = true"} # or flip, crop, resized_crop, rotation, cutout, mixup

[model]
name = {quoted["model"]}

[train]
epochs = {answers["epochs"]}
batch = {answers["batch"]}
drop_last = true # a last batch of few images has poor statistics
optimizer = "sgd" # or adam, adamw
lr = 0.05
weight_decay = 1e-4
schedule = "cosine" # or constant, step, poly
warmup = {int(answers["epochs"] > 1)} # epochs of linear rise: without, some norms collapse
precision = "float32" # or bf16, fp16
select = "last" # the epoch that counts; or best_validation, median_last_5

# what is measured beside loss and accuracy, for the page
[watch]
measures = []  # such as ["condensation", "esm"]

# every variant at every point of a grid, each compared with the baseline there:
# [grid]
# "train.worker_batch" = [{answers["batch"]}, 2] # as if so few images were on each worker

[[variants]]
name = "{MODEL}" # the model with its own norms
{variants}
# a smaller one, to try the file: normkit lab run FILE --scale quick
[scales.quick]
seeds = 2
[scales.quick.train]
epochs = {min(answers["epochs"], 2)}
"""
