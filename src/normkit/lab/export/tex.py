"""Text that LaTeX sets as it was typed."""

from __future__ import annotations

import unicodedata

SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\char34{}",  # babel gives the sign itself a meaning in some languages
    "`": r"\textasciigrave{}",
    # at the begin of a row they would be read as arguments of the line's end before it
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
}
SIGNS = {
    "−": "$-$",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "≈": r"$\approx$",
    "→": r"$\to$",
    "∞": r"$\infty$",
    "√": r"$\surd$",
    "²": r"$^2$",
    "³": r"$^3$",
    "°": r"$^\circ$",
    "…": r"\ldots{}",
    "’": "'",
    "“": "``",
    "”": "''",
    "µ": r"$\mu$",
    "ς": r"$\varsigma$",
    "ο": "o",
    "Ο": "O",
}
# Greek letters that have no command of their own because they look like Latin ones
LATIN = dict(zip("ΑΒΕΖΗΙΚΜΝΡΤΧ", "ABEZHIKMNPTX", strict=True))


def escaped(text: str) -> str:
    r"""For LaTeX with UTF-8; whatever it could not set is named by its code.

    >>> print(escaped("50% of γ_1 & <b>"))
    50\% of $\gamma$\_1 \& \textless{}b\textgreater{}
    """
    plain = "".join(map(_character, " ".join(text.split())))
    return plain.replace("--", "-{}-").replace("--", "-{}-")  # else they are one long dash


def _character(one: str) -> str:
    if one in SPECIAL:
        return SPECIAL[one]
    if one in SIGNS:
        return SIGNS[one]
    if one in LATIN:
        return LATIN[one]
    if one.isascii():
        return one if one.isprintable() else ""
    name = unicodedata.name(one, "")
    if name.startswith("GREEK") and (command := _greek(name)):
        return command
    accented = name.startswith("LATIN") and ord(one) < 0x180  # what inputenc knows
    return one if accented else f"{{[}}U+{ord(one):04X}{{]}}"


def _greek(name: str) -> str:
    """GREEK SMALL LETTER GAMMA is $\\gamma$; accents are not set."""
    words = name.split()
    if words[1:3] not in (["SMALL", "LETTER"], ["CAPITAL", "LETTER"]) or len(words) != 4:
        return ""
    letter = {"LAMDA": "lambda"}.get(words[3], words[3].lower())
    return f"$\\{letter.capitalize() if words[1] == 'CAPITAL' else letter}$"


def label(name: str) -> str:
    r"""A name for \label and \ref, where escapes are not allowed."""
    return "".join(one if one.isascii() and one.isalnum() else "-" for one in name).strip("-")
