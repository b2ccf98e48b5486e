"""Every layer explains itself in the same parts, its example runs, its card is complete."""

from __future__ import annotations

import doctest
import inspect
import re
from dataclasses import fields

import pytest

import normkit
from normkit import catalog
from normkit.core.card import Card

LAYERS = list(catalog.ENTRIES.items())
PARTS = ("Formula", "Statistics", "Shapes", "Use when", "Avoid when", "Paper")

every_layer = pytest.mark.parametrize(("name", "layer"), LAYERS, ids=[n for n, _ in LAYERS])


def text_of(layer: type) -> str:
    # not inspect.getdoc: a docstring inherited from another layer would describe that one
    return inspect.cleandoc(vars(layer).get("__doc__") or "")


def parts_of(text: str) -> dict[str, str]:
    """The parts of a docstring in their order: 'Shapes' -> what stands after 'Shapes:'.

    A head may go on, as in 'Formula, with m the mean of each sample:'.
    """
    head = rf"^({'|'.join(PARTS)})(?:, [^:]*)?:"
    pieces = re.split(head, text.split(">>>")[0], flags=re.MULTILINE)
    return dict(zip(pieces[1::2], map(str.strip, pieces[2::2]), strict=True))


@every_layer
def test_docstring_has_all_parts_in_order(name: str, layer: type) -> None:
    text = text_of(layer)
    summary = text.partition("\n")[0]
    assert summary.endswith(".") or text.partition("\n\n")[0].endswith(".")
    parts = parts_of(text)
    assert tuple(parts) == PARTS
    assert [part for part, said in parts.items() if not said] == []


def run_example(text: str, name: str) -> None:
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert any(example.want for example in test.examples), "an example shows what it gives"
    report: list[str] = []
    failed, tried = doctest.DocTestRunner().run(test, out=report.append)
    assert tried == len(test.examples)
    assert failed == 0, "".join(report)


@every_layer
def test_example_runs(name: str, layer: type) -> None:
    run_example(text_of(layer), name)


FUNCTIONS = [name for name in normkit.__all__ if inspect.isfunction(getattr(normkit, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_explain_themselves(name: str) -> None:
    text = inspect.getdoc(getattr(normkit, name)) or ""
    assert text.partition("\n\n")[0].endswith(".")
    if ">>>" in text:
        run_example(text, name)


@every_layer
def test_card_is_complete(name: str, layer: type) -> None:
    card = vars(layer).get("card")
    assert isinstance(card, Card), "a card of its own, not the one of a base class"
    assert card.name == name
    assert card.kind in ("activation", "weight")
    assert card.title[:1].isupper()
    assert len(card.paper) > 8, "whose method it is"
    flags = [f.name for f in fields(Card) if f.type == "bool"]
    assert flags
    assert all(isinstance(getattr(card, flag), bool) for flag in flags)


def test_titles_differ() -> None:
    titles = [layer.card.title for _, layer in LAYERS]
    assert len(set(titles)) == len(titles)


@every_layer
def test_file_is_named_like_the_layer(name: str, layer: type) -> None:
    # a trailing underscore keeps a name that Python has reserved, such as `in`
    assert layer.__module__.rpartition(".")[2].rstrip("_") == name
