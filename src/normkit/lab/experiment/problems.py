"""What is wrong with an experiment's file, all of it at once, each with its key and line."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from normkit.errors import NormkitError, nearest

KeyPath = tuple[str | int, ...]  # ("variants", 2, "train", "lr")

SHOWN = 12  # of many problems
# what other tools call some of the keys; too far from ours to be found by likeness
OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "iteration_size": "accumulate",
    "iter_size": "accumulate",
    "gradient_accumulation": "accumulate",
    "n_epochs": "epochs",
    "scheduler": "schedule",
    "gamma": "factor",
    "wd": "weight_decay",
    "eta_min": "floor",
    "normalizer": "norm",
    "normalization": "norm",
    "dataset": "data",
    "amp": "precision",
    "dtype": "precision",
    "reference": "baseline",
    "control": "baseline",
}

# of TOML
BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
BARE = re.compile(r"[A-Za-z0-9_-]+")
PLAIN = re.compile(r"[^,\]}#\n]*")  # a number, a truth value or a date
STRINGS = (  # the longer quotes first; up to two more quotes may stand before the closing three
    re.compile(r'"""(?:\\.|[^\\])*?"{3,5}(?!")', re.DOTALL),
    re.compile(r"'''.*?'{3,5}(?!')", re.DOTALL),
    re.compile(r'"(?:\\.|[^"\\\n])*"'),
    re.compile(r"'[^'\n]*'"),
)


class BadExperiment(NormkitError, ValueError):
    """An experiment's file that cannot be run as it stands."""


class Problems:
    """A list that grows while a file is read, and becomes one error at the end."""

    def __init__(
        self,
        name: str,
        lines: Mapping[KeyPath, int],
        typed: Mapping[KeyPath, str] | None = None,
    ) -> None:
        self.name, self.lines, self.scale = name, lines, ""
        self.typed = typed or {}  # keys that --set gives, as they were typed
        self.messages: dict[tuple[int, str], None] = {}

    def add(self, path: KeyPath, message: str) -> None:
        """Note that something is wrong at a key; the message goes on after the key's name."""
        place, line = self.locate(path)
        text = f"{shown(place)} {message}" if place else message
        self.messages[(line, self._origin(path) + text)] = None

    def unknown(self, path: KeyPath, keys: Iterable[str]) -> None:
        """Note a key that does not exist."""
        place, line = self.locate(path)
        keys, key = list(keys), str(path[-1])
        table = f" in {shown(place[:-1])}" if place[:-1] else ""
        other = OTHER_NAMES.get(key)
        hint = f"Did you mean {other!r}?" if other in keys else nearest(key, keys)
        text = f"unknown key {key!r}{table}. {hint}"
        self.messages[(line, self._origin(path) + text)] = None

    def locate(self, path: KeyPath) -> tuple[KeyPath, int]:
        """Where in the file a key of the merged experiment stands: within a scale, or outside."""
        if self._origin(path):
            return path, 0
        for length in range(len(path), 0, -1):
            for prefix in (("scales", self.scale), ()):
                line = self.lines.get((*prefix, *path[:length]))
                if line is not None:
                    return (*prefix, *path), line
        return path, 0

    def _origin(self, path: KeyPath) -> str:
        """What stands for a line, of a key that was given on the command line."""
        for length in range(len(path), 0, -1):
            if typed := self.typed.get(path[:length]):
                return f"--set {typed}: "
        if path and path not in self.lines:  # a table that only the command line has
            for full, typed in self.typed.items():
                if full[: len(path)] == path:
                    return f"--set {typed}: "
        return ""

    def raise_any(self) -> None:
        """One error for all of them, in the order of the file."""
        texts = [f"line {line}: {text}" if line else text for line, text in sorted(self.messages)]
        if len(texts) == 1:
            raise BadExperiment(f"{self.name}, {texts[0]}")
        if texts:
            more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
            listed = "".join(f"\n  {text}" for text in texts[:SHOWN] + more)
            raise BadExperiment(f"{self.name} has {len(texts)} problems:{listed}")


def shown(path: KeyPath) -> str:
    """A key as one would say it: variants[2].train.lr, grid."train.lr"."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if "." not in part else f'"{part}"')
    return text


def key_lines(text: str) -> dict[KeyPath, int]:
    """From each key, and each entry of an array, to its line, counted from 1.

    tomllib gives values, but not places. The text must be valid TOML: let it read first. What lies
    in several tables, such as one that is only named within longer names, has the line of its
    first mention.

    >>> key_lines('[train]\\nlr = 0.1\\n[[variants]]\\nname = "bn"\\n')[("variants", 0, "name")]
    4
    """
    return _KeyReader(text.replace("\r\n", "\n")).all_lines()


class _KeyReader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.ends = [place for place, letter in enumerate(text) if letter == "\n"]
        self.lines: dict[KeyPath, int] = {}
        self.entries: dict[KeyPath, int] = {}  # how many tables [[name]] there were so far

    def all_lines(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._peek():
            if self.text.startswith("[", self.at):
                table = self._header()
            else:
                self._pair(table)
        return self.lines

    def _header(self) -> KeyPath:
        """[name] or [[name]]; within the last entry of every array of tables that it names."""
        line = self._line()
        width = 2 if self.text.startswith("[[", self.at) else 1
        self.at += width
        *above, last = self._key()
        self._peek()
        self.at += width
        table: KeyPath = ()
        for part in above:
            table = self._latest(self._note((*table, part), line))
        table = self._note((*table, last), line)
        if width == 1:
            return self._latest(table)
        self.entries[table] = self.entries.get(table, 0) + 1
        return self._note(self._latest(table), line)

    def _latest(self, table: KeyPath) -> KeyPath:
        return (*table, self.entries[table] - 1) if table in self.entries else table

    def _pair(self, table: KeyPath) -> None:
        self._peek()
        line, path = self._line(), table
        for part in self._key():
            path = self._note((*path, part), line)
        self._peek()
        self.at += 1  # =
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        first = self._peek()
        if first == "[":
            self.at += 1
            count = 0
            while self._peek() != "]":
                self._value(self._note((*path, count), self._line()))
                count += 1
                self._skip_comma()
            self.at += 1
        elif first == "{":
            self.at += 1
            while self._peek() != "}":
                self._pair(path)
                self._skip_comma()
            self.at += 1
        elif first in "\"'":
            self._string()
        else:
            self._take(PLAIN)

    def _key(self) -> list[str]:
        parts: list[str] = []
        while True:
            if self._peek() in "\"'":
                parts.append(tomllib.loads(f"key = {self._string()}")["key"])
            else:
                parts.append(self._take(BARE))
            if self._peek() != ".":
                return parts
            self.at += 1

    def _string(self) -> str:
        for pattern in STRINGS:
            if pattern.match(self.text, self.at):
                return self._take(pattern)
        raise AssertionError(f"line {self._line()} is not TOML")  # tomllib has read it before

    def _skip_comma(self) -> None:
        if self._peek() == ",":
            self.at += 1

    def _peek(self) -> str:
        """The next letter that is neither blank nor within a comment; "" at the end."""
        self._take(BLANK)
        return self.text[self.at : self.at + 1]

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"line {self._line()} is not TOML"
        self.at = match.end()
        return match.group()

    def _note(self, path: KeyPath, line: int) -> KeyPath:
        self.lines.setdefault(path, line)
        return path

    def _line(self) -> int:
        return bisect_left(self.ends, self.at) + 1
