"""A plan in plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import wrap
from typing import Protocol

from normkit.conversion.certificate import Certificate
from normkit.conversion.edit import Edit
from normkit.conversion.replacing import ReplaceModule
from normkit.conversion.step import Action, Step

WIDTH = 120  # of what is not a column
INDENT = "    "


class Printable(Protocol):
    title: str
    steps: tuple[Step, ...]
    edits: tuple[Edit, ...]
    notes: tuple[str, ...]
    certificate: Certificate | None

    @property
    def exact(self) -> bool: ...
    def count(self, action: Action = "convert") -> int: ...


def table(plan: Printable) -> str:
    """A headline, one line a norm, the other edits, and the certificate if there is one."""
    lines = [_headline(plan)]
    counted = Counter(step.contents for step in plan.steps if step.action == "convert")
    usual, times = next(iter(counted.most_common(1)), ("", 0))
    if times > 1:
        others = "" if len(counted) == 1 else ", if not said otherwise"
        lines += wrap(f"Each layer{others}: {usual}.", WIDTH)
    if plan.steps:
        lines += ["", *_rows(plan.steps, usual if times > 1 else "")]
    besides = [edit.description for edit in plan.edits if not isinstance(edit, ReplaceModule)]
    if besides:
        lines += ["", "Besides:", *(f"  {description}" for description in besides)]
    if plan.certificate is not None:
        lines += ["", f"Applied. {plan.certificate}"]
    elif plan.notes:
        lines += ["", *plan.notes]
    return "\n".join(lines)


def _headline(plan: Printable) -> str:
    counts = [f"{plan.count()} of {len(plan.steps)} norms to convert"]
    others = (plan.count("keep"), "kept"), (plan.count("skip"), "skipped")
    counts += [f"{count} {word}" for count, word in others if count]
    if not plan.count():
        return f"{plan.title}: {', '.join(counts)}."
    outlook = (
        "Each layer is exact in eval mode."
        if plan.exact
        else "The function changes: apply() measures by how much."
    )
    return f"{plan.title}: {', '.join(counts)}. {outlook}"


def _rows(steps: Sequence[Step], usual: str) -> list[str]:
    """One line a norm, and below it what happens to its contents where that is not the usual."""
    cells = [("layer", "change", ""), *((s.path, s.change, s.note) for s in steps)]
    widths = [max(len(row[i]) for row in cells) for i in (0, 1)]
    below = ["", *("" if step.contents == usual else step.contents for step in steps)]
    lines = []
    for (path, change, note), contents in zip(cells, below, strict=True):
        line = f"{path:{widths[0]}}  {change:{widths[1]}}  {note}".rstrip()
        fits = len(line) <= WIDTH
        lines.append(line if fits else f"{path:{widths[0]}}  {change}")
        for text in (contents, "" if fits else note):
            lines += wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return lines
