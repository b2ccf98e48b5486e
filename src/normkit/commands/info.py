"""Explain one layer: formula, statistics, when to use and to avoid it, paper, options."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from typing import Any

from normkit.commands.output import add_json, check_json, screen_of, write_json

NAME = "info"
HELP = "formula, when to use, paper and options of a layer"
EXAMPLES = """\
examples:
  normkit info bcn
  normkit info ubn

The text is that of help(normkit.BCN); "normkit list" has the names."""
PARTS = ("Formula", "Statistics", "Shapes", "Use when", "Avoid when", "Paper")
EVERY = ("device", "dtype")  # options that all layers have, as in torch.nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="LAYER", help="its name in the catalog")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from normkit import catalog

    check_json(options)
    layer = catalog.find(options.name)
    card = layer.card
    screen = screen_of(options)
    screen.print(f"[bold]{card.name}[/bold]  {card.title}")
    screen.print(f"normkit.{layer.__name__}, from {card.paper}", markup=False)
    text = inspect.cleandoc(vars(layer)["__doc__"]).split(">>>")
    parts = dict(sections(text[0]))
    for head, body in parts.items():
        screen.print()
        if head:
            screen.print(f"[bold]{head}[/bold]")
        screen.print(body, markup=False)
    screen.print("\n[bold]Promises[/bold]")
    screen.print("\n".join(f"- {line}" for line in promises(card)), markup=False)
    screen.print("\n[bold]Options[/bold]")
    screen.print("\n".join(options_of(layer)), markup=False)
    screen.print("\n[bold]Example[/bold]")
    screen.print(">>>" + ">>>".join(text[1:]).rstrip(), markup=False)
    facts = {
        "name": card.name,
        "class": f"normkit.{layer.__name__}",
        "title": card.title,
        "paper": card.paper,
        "summary": parts.pop(""),
        "text": parts,
        "promises": list(promises(card)),
        "options": {n: repr(o.default) for n, o in layer.options().items() if n not in EVERY},
    }
    write_json(options, facts)
    return 0


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a layer's docstring, each with its head; the summary has none."""
    head = rf"^((?:{'|'.join(PARTS)})(?:, [^:]*)?):"
    first, *rest = re.split(head, text, flags=re.MULTILINE)
    yield "", first.strip()
    for name, body in zip(rest[::2], rest[1::2], strict=True):
        yield name, inspect.cleandoc(body).strip("\n")


def promises(card: Any) -> Iterator[str]:
    """What the tests hold the layer to, in words."""
    if card.kind == "weight":
        yield "normalizes weights: normkit.standardize(model, name) attaches it to convolutions"
    if card.pools_samples:
        yield "in training the output of a sample depends on the other samples of the batch"
    else:
        yield "the output of a sample does not depend on the other samples of the batch"
    yield "train() and eval() " + ("are the same" if card.same_in_eval else "differ")
    if card.kind == "activation":
        yield "from_batch_norm " + (
            "is exact: the output in eval mode stays what it was"
            if card.exact_from_bn
            else "carries what it can, but changes the function"
        )
    if card.experimental:
        yield "experimental: a reconstruction; its published results are not claimed"


def options_of(layer: Any) -> Iterator[str]:
    """Every option with its default value."""
    for name, option in layer.options().items():
        if name not in EVERY:
            yield f"{name}={option.default!r}"
