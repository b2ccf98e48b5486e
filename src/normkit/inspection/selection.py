"""Choosing norms of a survey."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection.site import Site
from normkit.inspection.survey import Survey

POSITIONS = {"first": 1, "second": 2, "third": 3}
FIELDS = [field.name for field in fields(Site)]
Test = Callable[[Site], Any]


def select(survey: Survey, where: Any = None) -> tuple[Site, ...]:
    """The norms that ``where`` describes, in the order of the model.

        None                   all
        "layer4", "*.bn2"      those at or below a path; * stands for any text, dots included
        "kind:bn"              those of a kind; also "library:timm", "class_name:BatchNorm2d"
        {"kind": "bn", ...}    those whose fields have these values, or one of a list of values
        "stem"                 those before the first block
        "first" "second" "third" "last"    by the position in each block, shortcuts not counted
        "shortcut"             those on a shortcut
        "every:2"              those in blocks 2, 4, 6, ..., the first block being number 1
        "!shortcut"            all but those
        nn.BatchNorm2d         those of a class
        a function             those for which it gives true
        (a, b)                 those that fit both
        [a, b]                 those that fit either

    A part that fits no norm at all is an error, since it is most likely a misspelling.
    """
    if where is None:
        return survey.sites
    chosen = {id(site) for site in _chosen(survey, where)}
    return tuple(site for site in survey.sites if id(site) in chosen)


def _chosen(survey: Survey, where: Any) -> list[Site]:
    """What a part describes; never nothing."""
    if isinstance(where, list | set | frozenset):
        chosen = [site for part in _parts(where) for site in _chosen(survey, part)]
    elif isinstance(where, tuple):
        sets = [{id(site) for site in _chosen(survey, part)} for part in _parts(where)]
        chosen = [site for site in survey if all(id(site) in each for each in sets)]
    elif isinstance(where, str) and where.startswith("!"):
        out = _excluded(survey, where[1:])
        chosen = [site for site in survey if id(site) not in out]
    else:
        test = _test(where)
        chosen = [site for site in survey if test(site)]
    if not chosen:
        raise NothingToDo(_nothing(survey, where))
    return chosen


def _parts(where: Any) -> Iterable[Any]:
    if not where:
        raise OptionError(f"where={where!r} describes nothing. Try None for all norms.")
    return where


def _excluded(survey: Survey, word: str) -> set[int]:
    """What "!" takes away: only a path that exists nowhere is an error."""
    test = _test(word)
    out = {id(site) for site in survey if test(site)}
    if not out and not _is_word(word):
        raise NothingToDo(_nothing(survey, word))
    return out


def _is_word(text: str) -> bool:
    """Whether a text is one of the words that have a meaning, not a path."""
    return text in (*POSITIONS, "stem", "shortcut", "last") or ":" in text


def _test(where: Any) -> Test:
    """The condition that a single part stands for."""
    if isinstance(where, str):
        return _test_of_text(where)
    if isinstance(where, Mapping) and where:
        for name in where:
            if name not in FIELDS:
                raise OptionError(f"A site has no field {name!r}. {nearest(str(name), FIELDS)}")
        return lambda site: all(_has(site, name, value) for name, value in where.items())
    if isinstance(where, type):
        return lambda site: isinstance(site.module, where) or isinstance(site.norm, where)
    if callable(where):
        return where
    raise OptionError(
        "where expects None, a path or glob, a word such as 'stem', a mapping, a class, a "
        f"function of a site, or a list or tuple of these, got {where!r}."
    )


def _test_of_text(text: str) -> Test:
    if text in POSITIONS:
        return lambda site: site.position == POSITIONS[text]
    if text == "last":
        return lambda site: site.last_in_block
    if text in ("stem", "shortcut"):
        return lambda site: getattr(site, text)
    head, colon, value = text.partition(":")
    if colon and head == "every":
        if not value.isdecimal() or int(value) < 1:
            raise OptionError(f"where expects 'every:k' with a number k ≥ 1, got {text!r}.")
        k = int(value)
        return lambda site: site.block_index is not None and (site.block_index + 1) % k == 0
    if colon:
        if head not in FIELDS:
            raise OptionError(f"where knows no {text!r}. {nearest(head, ['every', *FIELDS])}")
        return lambda site: str(getattr(site, head)) == value
    if not text:
        raise OptionError("where='' describes nothing. Try None for all norms.")
    return lambda site: any(_lies_at(path, text) for path in site.paths)


def _lies_at(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _has(site: Site, name: str, value: Any) -> bool:
    own = getattr(site, name)
    return own in value if isinstance(value, list | set | frozenset) else own == value


def _nothing(survey: Survey, where: Any) -> str:
    """Why nothing fits, and what there is."""
    nothing = f"where={where!r} fits none of the {len(survey)} norms of {survey.title}."
    if not len(survey):
        return f"where={where!r} fits nothing: {survey.title} has no norms."
    if isinstance(where, str) and (where.startswith("kind:") or ":" not in where):
        if where.startswith("kind:"):
            return f"{nothing} Its kinds: {', '.join(survey.kinds)}."
        if where in POSITIONS or where in ("last", "shortcut", "stem"):
            longest = max((site.position or 0 for site in survey), default=0)
            return f"{nothing} It has {len(survey.blocks)} blocks, with up to {longest} norms each."
        if where in survey.kinds:
            return f"{nothing} Try where='kind:{where}'."
        paths = [path for site in survey for path in site.paths]
        close = difflib.get_close_matches(where.strip("!*."), paths, n=3, cutoff=0.4) or paths[:3]
        return f"{nothing} The nearest: {', '.join(close)}."
    return f"{nothing} Print survey(model) to see them."
