"""The line of a TOML file on which each key stands: tomllib gives values, but not places."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left

KeyPath = tuple[str | int, ...]  # ("variants", 2, "train", "lr")

BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
BARE = re.compile(r"[A-Za-z0-9_-]+")
PLAIN = re.compile(r"[^,\]}#\n]*")  # a number, a truth value or a date
STRINGS = (  # the longer quotes first; up to two more quotes may stand before the closing three
    re.compile(r'"""(?:\\.|[^\\])*?"{3,5}(?!")', re.DOTALL),
    re.compile(r"'''.*?'{3,5}(?!')", re.DOTALL),
    re.compile(r'"(?:\\.|[^"\\\n])*"'),
    re.compile(r"'[^'\n]*'"),
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """From each key, and each entry of an array, to its line, counted from 1.

    The text must be valid TOML: let tomllib read it first. What lies in several tables, such as
    a table that is only named within longer names, has the line of its first mention.

    >>> key_lines('[train]\\nlr = 0.1\\n[[variants]]\\nname = "bn"\\n')[("variants", 0, "name")]
    4
    """
    return _Reader(text.replace("\r\n", "\n")).all_lines()


class _Reader:
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
        raise AssertionError(f"line {self._line()} is no TOML")  # tomllib has read it before

    def _skip_comma(self) -> None:
        if self._peek() == ",":
            self.at += 1

    def _peek(self) -> str:
        """The next letter that is neither blank nor within a comment; "" at the end."""
        self._take(BLANK)
        return self.text[self.at : self.at + 1]

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        assert found is not None, f"line {self._line()} is no TOML"
        self.at = found.end()
        return found.group()

    def _note(self, path: KeyPath, line: int) -> KeyPath:
        self.lines.setdefault(path, line)
        return path

    def _line(self) -> int:
        return bisect_left(self.ends, self.at) + 1
