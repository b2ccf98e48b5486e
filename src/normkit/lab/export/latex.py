"""The table as papers print it: mean ± standard deviation, bold if better, the best underlined."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence

from normkit import __version__
from normkit.core.messages import counted
from normkit.lab.experiment import Cell, Experiment
from normkit.lab.report.scores import Arrangement, Scoreboard, Scores, arrange
from normkit.lab.report.words import Metric, cell_words
from normkit.lab.results import Comparison, Result

LEVEL = 0.05


def latex(
    experiment: Experiment,
    results: Mapping[str, Result],
    comparisons: Sequence[Comparison],
    *,
    columns: str | None = None,
    corrected: bool = True,
    failures: Collection[str] = (),
) -> str:
    """A table for booktabs, with a row for each variant and a column for each value of an axis.

    Bold is what is significantly better than the baseline, underlined the best of its column among
    those that lost no seed. Without ``corrected`` the test is that of revisiting BN, which is
    not corrected for the number of comparisons.
    """
    board = Scoreboard(experiment, results, failures)
    table = arrange(experiment.cells(), columns)
    better = {
        (c.variant, c.cell)
        for c in comparisons
        if (c.verdict == "better" if corrected else c.p_better <= LEVEL and not c.lost)
    }
    width = len(table.columns)
    lines = [
        f"% Made by normkit {__version__} from {counted(board.counts['finished'], 'result')}; "
        "needs \\usepackage{booktabs}.",
        r"\begin{table}[t]",
        r"  \centering",
        f"  \\caption{{{_caption(board, corrected)}}}",
        f"  \\label{{tab:{latex_label(experiment.name)}}}",
        f"  \\begin{{tabular}}{{l{'c' * width}}}",
        r"    \toprule",
        *_head(table, board.metric),
        r"    \midrule",
    ]
    for place, group in enumerate(table.groups):
        if group:
            if place:
                lines.append(r"    \midrule")
            title = escape_latex(cell_words(group))
            lines.append(f"    \\multicolumn{{{width + 1}}}{{l}}{{\\emph{{{title}}}}} \\\\")
        lines += _rows(board, table, group, better)
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _caption(board: Scoreboard, corrected: bool) -> str:
    experiment = board.experiment
    title = experiment.title or experiment.name
    baseline = escape_latex(experiment.baseline)
    stop = "" if title.endswith((".", "?", "!")) else "."
    unfinished = any(len(scores.by_seed) < len(experiment.seeds) for scores in board)
    seeds = ("up to " if unfinished else "") + counted(len(experiment.seeds), "seed")
    holm = experiment.multiplicity == "holm"
    rule = " after Holm's correction" if corrected and holm else ", not corrected"
    sides = "two" if corrected else "one"
    caption = (
        f"{escape_latex(title)}{stop} {escape_latex(board.metric.title)}, mean $\\pm$ standard "
        f"deviation over {seeds}. Bold: significantly better than {baseline} ({sides}-sided paired "
        f"$t$-test, $p \\le {LEVEL}${rule}). Underlined: best of its column."
    )
    if board.counts["lost"]:
        words = " or ".join(w for w in ("diverged", "collapsed", "failed") if board.counts[w])
        caption += rf" $^\dagger$: so many seeds {words}; the mean is over the others."
    return caption


def _head(table: Arrangement, metric: Metric) -> list[str]:
    if table.axis is None:
        return [f"    & {escape_latex(metric.title)} \\\\"]
    width = len(table.columns)
    return [
        f"    & \\multicolumn{{{width}}}{{c}}{{{escape_latex(table.title)}}} \\\\",
        f"    \\cmidrule(lr){{2-{width + 1}}}",
        f"    & {' & '.join(map(escape_latex, table.heads()))} \\\\",
    ]


def _rows(
    board: Scoreboard, table: Arrangement, group: Cell, better: set[tuple[str, Cell]]
) -> list[str]:
    cells = [table.cell(group, column) for column in table.columns]
    best = {cell: _best(board, cell) for cell in cells if cell is not None}
    rows = []
    for name in board.names():
        row = [None if cell is None else board.get(name, cell) for cell in cells]
        if any(scores is not None for scores in row):
            texts = [
                "--"
                if scores is None
                else _entry(
                    scores,
                    board.metric,
                    bold=(name, scores.variant.cell) in better,
                    best=best[scores.variant.cell],
                )
                for scores in row
            ]
            rows.append(f"    {escape_latex(name)} & {' & '.join(texts)} \\\\")
    return rows


def _best(board: Scoreboard, cell: Cell) -> str | None:
    """The best mean of a column as it is printed, so that equal numbers are underlined alike."""
    means = [s.mean for s in board.in_cell(cell) if s.mean is not None and not s.lost]
    if not means:
        return None
    return board.metric.plain(max(means) if board.experiment.higher_is_better else min(means))


def _entry(scores: Scores, metric: Metric, *, bold: bool, best: str | None) -> str:
    lost = len(scores.lost)
    if scores.mean is None:
        return next((word for word, seeds in scores.losses if seeds), "--")
    text = metric.spread(scores.mean, scores.std).replace("±", r"\pm").replace("−", "-")
    math = f"$\\mathbf{{{text}}}$" if bold else f"${text}$"
    if best is not None and not lost and metric.plain(scores.mean) == best:
        math = f"\\underline{{{math}}}"
    return f"{math}$^{{\\dagger {lost}}}$" if lost else math


# Signs, and how LaTeX sets them. Babel gives the double quote a meaning in some languages; brackets
# and stars at the begin of a row would be read as arguments of the line's end before it.
SIGNS = r"""
\ \textbackslash{}  { \{  } \}  $ \$  & \&  % \%  # \#  _ \_  ~ \textasciitilde{}
^ \textasciicircum{}  < \textless{}  > \textgreater{}  | \textbar{}  " \char34{}
` \textasciigrave{}  [ {[}  ] {]}  * {*}
− $-$  – \textendash{}  — \textemdash{}  × $\times$  · $\cdot$  ± $\pm$  ≤ $\le$  ≥ $\ge$
≈ $\approx$  → $\to$  ∞ $\infty$  √ $\surd$  ² $^2$  ³ $^3$  ° $^\circ$  … \ldots{}
’ '  “ ``  ” ''  µ $\mu$  ς $\varsigma$  ο o  Ο O
"""
PAIRS = SIGNS.split()
CHARACTERS = dict(zip(PAIRS[::2], PAIRS[1::2], strict=True)) | dict(
    # Greek letters that have no command of their own because they look like Latin ones
    zip("ΑΒΕΖΗΙΚΜΝΡΤΧ", "ABEZHIKMNPTX", strict=True)
)


def escape_latex(text: str) -> str:
    r"""For LaTeX with UTF-8; whatever it could not set is named by its code.

    >>> print(escape_latex("50% of γ_1 & <b>"))
    50\% of $\gamma$\_1 \& \textless{}b\textgreater{}
    """
    plain = "".join(map(_character, " ".join(text.split())))
    return plain.replace("--", "-{}-").replace("--", "-{}-")  # else they are one long dash


def _character(one: str) -> str:
    if one in CHARACTERS:
        return CHARACTERS[one]
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


def latex_label(name: str) -> str:
    r"""A name for \label and \ref, where escapes are not allowed."""
    return "".join(one if one.isascii() and one.isalnum() else "-" for one in name).strip("-")
