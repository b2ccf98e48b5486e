"""What --set changes of a file: keys and values as the file would say them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from normkit.errors import OptionError
from normkit.lab.experiment.fields import RECORDS, WrongType, fit, flat, laid_over, types
from normkit.lab.experiment.problems import KeyPath, Problems
from normkit.lab.experiment.records import Variant

WORD = re.compile(r"[A-Za-z_][\w:./+-]*")  # a string that needs no quotes on a command line
ELSEWHERE = {"scale": "--scale", "scales": "--scale"}
# what changes training: numbers that a paper printed are not of such a setting
SETTINGS = (*RECORDS, "grid", "along", "variants")


class Overrides:
    """Tables to be laid over a file at its scale, and how each key was typed.

    >>> Overrides(["train.lr=0.05", "model.name=timm:resnet18"]).table
    {'train': {'lr': 0.05}, 'model': {'name': 'timm:resnet18'}}
    """

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.texts = tuple(texts)
        self.table: dict[str, Any] = {}
        self.typed: dict[KeyPath, str] = {}
        for text in texts:
            table = _table(text)
            for _, _, path in flat(table):
                if path[0] in ELSEWHERE:
                    raise OptionError(f"--set got {text!r}. Try {ELSEWHERE[str(path[0])]}.")
                if path[0] == "variants" and len(path) > 1 and isinstance(path[1], str):
                    raise OptionError(
                        f"--set got {text!r}, and variants are a list without keys: they are "
                        f"changed in the file. What all variants share can be set: keys of "
                        f"{', '.join(RECORDS)}, such as train.lr=0.05, and seeds, metric, baseline."
                    )
                self.typed[path] = text
            self.table = laid_over(self.table, table)

    @property
    def change_training(self) -> bool:
        return any(key in SETTINGS for key in self.table)

    def check_effect(self, variants: Sequence[Variant], problems: Problems) -> None:
        """Note what no variant is trained with: each of them, or the grid, says its own value."""
        for section, record in RECORDS.items():
            table = self.table.get(section, {})
            for key, value in table.items() if isinstance(table, Mapping) else ():
                if isinstance(value, Mapping):  # merged with other options
                    continue
                try:
                    wanted = fit(types(record)[key], value)
                except (KeyError, WrongType):
                    continue  # told before
                if all(getattr(getattr(v.setting, section), key) != wanted for v in variants):
                    problems.add(
                        (section, key),
                        "has no effect: the grid or every variant says its own value.",
                    )


def _table(text: str) -> dict[str, Any]:
    """KEY=VALUE as a table."""
    key, equals, value = text.partition("=")
    try:
        if equals and WORD.fullmatch(value.strip()) and value.strip() not in ("true", "false"):
            text = f"{key} = {json.dumps(value.strip())}"
        table = tomllib.loads(text)
        if table:
            return table
        reason = "it names no key"
    except tomllib.TOMLDecodeError as error:
        reason = str(error).partition(" (at ")[0]
    raise OptionError(
        f"--set got {text!r}: {reason}. Expected a key and a value as in the file, such as "
        "train.lr=0.05 or 'data.name=\"digits\"'."
    )
