"""List the layers, one line each, as their cards describe them."""

from __future__ import annotations

import argparse

from normkit.commands.output import add_json, check_json, screen_of, table, write_json

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
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from normkit import catalog

    check_json(options)
    rows, facts = [], []
    for name in catalog.names(options.kind):
        card = catalog.find(name).card
        exact = "yes" if card.exact_from_bn else "–"
        rows.append((name, card.title, card.paper, f"{card.kind}s", card.shared_by, exact))
        facts.append(
            {
                "name": name,
                "title": card.title,
                "paper": card.paper,
                "kind": card.kind,
                "statistics_from": card.shared_by,
                "exact_from_bn": card.exact_from_bn,
                "experimental": card.experimental,
            }
        )
    screen_of(options).print(table(f"{len(rows)} layers: normkit.make(name, channels)", HEAD, rows))
    write_json(options, facts)
    return 0
