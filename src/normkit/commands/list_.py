"""List the layers, one line each, as their cards describe them."""

from __future__ import annotations

import argparse

from normkit.commands.output import console, table

NAME = "list"
HELP = "the layers, one line each"
EXAMPLES = """\
examples:
  normkit list                   all of them
  normkit list --kind weight     those that normalize weights, not activations

"Statistics from" says whose values share a mean and a variance in training; "exact from BN", that
a trained batch norm becomes this layer without a change of its output in eval mode."""
HEAD = ("name", "title", "paper", "normalizes", "statistics from", "exact from BN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=("activation", "weight"), help="only layers of this kind")


def run(options: argparse.Namespace) -> int:
    from normkit import catalog

    rows = []
    for name in catalog.names(options.kind):
        card = catalog.find(name).card
        exact = "yes" if card.exact_from_bn else "–"
        rows.append((name, card.title, card.paper, f"{card.kind}s", card.shared_by, exact))
    console().print(table(f"{len(rows)} layers: normkit.make(name, channels)", HEAD, rows))
    return 0
