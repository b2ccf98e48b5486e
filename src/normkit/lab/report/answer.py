"""The answer in plain sentences: what was shown, what was not, and what to beware of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normkit.core.messages import counted
from normkit.lab.experiment import Cell
from normkit.lab.report.scores import VERDICTS, Scoreboard, Scores, ranked, verdict_of
from normkit.lab.report.tables import environments
from normkit.lab.report.words import at
from normkit.lab.results import COLLAPSED, DIVERGED, FAILED, Comparison
from normkit.lab.statistics import ALPHA, UNSTABLE, reached_look
from normkit.reporting.text import is_finite, listed, rough

MANY = 4  # cells; with more of them, verdicts are counted


@dataclass(frozen=True)
class Statement:
    """A verdict, what it is about, and the numbers behind it."""

    verdict: str
    name: str
    numbers: str


@dataclass(frozen=True)
class VerdictCounts:
    """A variant in many cells: in how many of them each verdict holds."""

    name: str
    counts: tuple[tuple[str, int], ...]  # verdicts in the order of VERDICTS
    cells: int


@dataclass(frozen=True)
class Answer:
    """The shortest answer; then one for every cell, or counts where there are many cells."""

    lead: str
    tone: str  # verdict of the lead
    groups: tuple[tuple[str, tuple[Statement, ...]], ...] = ()
    tallies: tuple[VerdictCounts, ...] = ()


def answer(board: Scoreboard, comparisons: Sequence[Comparison]) -> Answer:
    lead, tone = _lead(board, comparisons)
    if not board.counts["finished"] or len(comparisons) < 2:
        return Answer(lead, tone)  # which has said it
    if len(board.cells) > MANY:
        return Answer(lead, tone, tallies=_tallies(comparisons))
    groups = []
    for cell in board.cells:
        statements = tuple(
            Statement(verdict_of(c), c.variant, _numbers(c, board))
            for c in ranked([c for c in comparisons if c.cell == cell])
        )
        if statements:
            title = at(cell).strip()
            groups.append((title[:1].upper() + title[1:], statements))
    return Answer(lead, tone, tuple(groups))


def _tallies(comparisons: Sequence[Comparison]) -> tuple[VerdictCounts, ...]:
    """Those that are better in most cells come first."""
    there = {verdict_of(c) for c in comparisons}
    there.add(VERDICTS[0])  # that nothing is better has to be said
    columns = [verdict for verdict in (*VERDICTS, DIVERGED, COLLAPSED, FAILED) if verdict in there]
    tallies = []
    for name in dict.fromkeys(c.variant for c in comparisons):
        verdicts = [verdict_of(c) for c in comparisons if c.variant == name]
        counts = tuple((verdict, verdicts.count(verdict)) for verdict in columns)
        tallies.append(VerdictCounts(name, counts, len(verdicts)))

    def rank(tally: VerdictCounts) -> tuple[int, int]:
        counts = dict(tally.counts)
        return -counts["better"], counts.get("worse", 0)

    return tuple(sorted(tallies, key=rank))


def _lead(board: Scoreboard, comparisons: Sequence[Comparison]) -> tuple[str, str]:
    """The sentence with which a page begins, and the verdict that gives the page its colour."""
    base = board.experiment.baseline
    if not board.counts["finished"] and board.counts["failed"]:
        return "No run has a result, and some failed: there is no answer yet.", "not shown"
    if not board.counts["finished"]:
        return "Nothing has been run yet, so there is no answer yet.", "not shown"
    if not comparisons:
        return f"There is nothing to compare with {base} yet.", "not shown"
    if not any(c.pairs for c in comparisons) and any(c.baseline_lost for c in comparisons):
        # which variants can be trained at all is an answer, too
        lost = {c.variant for c in comparisons if c.lost}
        stable = dict.fromkeys(c.variant for c in comparisons if c.variant not in lost)
        without = f" Without a loss: {listed(stable)}." if stable else ""
        words = {word for c in comparisons for word, count in c.baseline_losses if count}
        word = next(word for word in (DIVERGED, COLLAPSED, FAILED) if word in words)
        return f"{base} {word}, and nothing can be compared with it.{without}", word
    steady = [c for c in comparisons if c.verdict != UNSTABLE]
    if len(steady) < len(comparisons) and len(comparisons) > 1:
        first = _stability(board)
        if not steady:
            return first, UNSTABLE
        rest, tone = _lead(board, steady)
        return f"{first} {rest}", tone
    order = ranked(comparisons)
    best = order[0]
    if best.verdict == "better" or len(comparisons) == 1:
        others = [c for c in order if c.verdict == "better" and c is not best]
        elsewhere = any(c.cell != best.cell for c in others)
        names = [c.variant + (at(c.cell) if elsewhere else "") for c in others]
        also = f" Also better: {listed(names, most=3)}." if names else ""
        return _sentence(best, board) + also, best.verdict
    verdicts = {c.verdict for c in comparisons}
    if verdicts == {"equivalent"}:
        return f"Everything compared is equivalent to {base}.", "equivalent"
    if verdicts == {"worse"}:
        return f"Everything compared is worse than {base}.", "worse"
    if not any(c.pairs for c in comparisons):
        return f"No seed was finished by {base} and by another variant.", "not shown"
    # what would be better if it were all that had been asked: Holm's correction is in its way
    near = [
        c
        for c in comparisons
        if c.verdict == "not shown" and c.p_difference <= ALPHA and c.difference > 0
    ]
    nearest = ""
    if near:
        c = min(near, key=lambda each: each.p_difference)
        nearest = f" Nearest to it is {c.variant}{at(c.cell)}: {_numbers(c, board)}."
    return f"Nothing was shown to be better than {base}.{nearest}", "not shown"


def _stability(board: Scoreboard) -> str:
    """Stable with every seed: bn and gn. Not stable: bcn + ws (1 of 3 seeds collapsed)."""
    lost = {}
    for name in board.names():
        own = [scores for scores in board if scores.variant.name == name]
        ended = sum(scores.tried for scores in own)
        words = [
            f"{count} of {counted(ended, 'seed' if len(board.cells) == 1 else 'run')} {word}"
            for word in (DIVERGED, COLLAPSED, FAILED)
            if (count := sum(len(dict(scores.losses)[word]) for scores in own))
        ]
        if words:
            lost[name] = f"{name} ({', '.join(words)})"
    stable = [name for name in board.names() if name not in lost]
    steady = f"Stable with every seed: {listed(stable)}. " if stable else ""
    return f"{steady}Not stable: {listed(lost.values())}."


def _sentence(c: Comparison, board: Scoreboard) -> str:
    """bcn is better than bn at 2 samples a worker: +3.1 points, 95 % interval 2.2 to 4.0, …"""
    metric = board.metric
    if not c.pairs:
        verb = f"cannot be compared with {c.baseline}"
    elif c.verdict in ("better", "worse"):
        verb = f"is {c.verdict} than {c.baseline}"
    elif c.verdict == "equivalent":
        margin = f"{metric.scaled(board.experiment.equivalence):g}"
        verb = f"is equivalent to {c.baseline}, within {margin}{' points' * metric.percent}"
    elif c.verdict == UNSTABLE:
        verb = f"cannot be judged against {c.baseline}, since not every seed survived"
    else:
        verb = f"is not shown to differ from {c.baseline}"
    return f"{c.variant} {verb}{at(c.cell)}: {_numbers(c, board)}."


def _numbers(c: Comparison, board: Scoreboard) -> str:
    """+3.1 points, 95 % interval 2.2 to 4.0, 5 seeds; and what is to be said about the seeds."""
    text = "no seed was finished by both"
    if c.pairs:
        text = board.metric.difference(c.difference, c.low, c.high)
        if is_finite(c.low) and is_finite(c.high):
            text += f", 95 % interval {board.metric.between(c.low, c.high)}"
        text += f", {counted(c.pairs, 'seed')}"
    if c.verdict == "not shown":
        if c.pairs == 1:
            text += "; a verdict needs at least 2, better 5"
        elif c.more_seeds:
            text += f"; about {counted(rough(c.more_seeds), 'more seed')} would decide"
    losses = [
        f"it {word} at {_share(count, c.variant, c.cell, board)}"
        for word, count in c.losses
        if count
    ]
    if not c.pairs or not losses:  # else the baseline's would stand in every line
        losses += [
            f"{c.baseline} {word} at {_share(count, c.baseline, c.cell, board)}"
            for word, count in c.baseline_losses
            if count
        ]
    if c.verdict == UNSTABLE and c.pairs:
        return f"{'; '.join(losses)}; the survivors alone: {text}"
    return "; ".join([text, *losses])


def _share(diverged: int, name: str, cell: Cell, board: Scoreboard) -> str:
    scores = board.get(name, cell)
    if scores is None:
        return counted(diverged, "seed")
    return f"{diverged} of {counted(scores.tried, 'seed')}"


def cautions(board: Scoreboard) -> list[str]:
    """What a reader has to know before believing the numbers; none where nothing has been run."""
    experiment, counts = board.experiment, board.counts
    sentences = []
    if counts["missing"] and counts["finished"]:
        failed = counts["failed"]
        state = "failed" if failed == counts["missing"] else "are not finished"
        why = f", {failed:,} of them failed" if 0 < failed < counts["missing"] else ""
        sentences.append(
            f"{counts['missing']:,} of {counted(counts['all'], 'run')} {state}{why}: "
            "this is what can be said without them."
        )
    for name in board.names():
        for word in (DIVERGED, COLLAPSED):
            own = [scores for scores in board if scores.variant.name == name]
            lost = [(scores, seeds) for scores in own if (seeds := getattr(scores, word))]
            if lost:
                places = "; ".join(_where(*each) for each in lost[:MANY])
                more = f"; and {len(lost) - MANY} more cells" if len(lost) > MANY else ""
                sentences.append(
                    f"{name} {word}: {places}{more}. Such seeds are counted, not compared: "
                    "differences are those of the survivors."
                )
    if len(experiment.seeds) == 1:
        sentences.append(
            "1 seed: nothing can be shown with it, however large a difference looks. Try 5 or "
            "more; what has been trained is kept."
        )
    elif len(experiment.seeds) < 5:
        sentences.append(
            f"{counted(len(experiment.seeds), 'seed')}: too few to show small differences."
        )
    sentences += _rules(board)
    if len(environments(board.all_results())) > 1:
        sentences.append(
            "The runs were not all made with the same versions and hardware: times may differ for "
            "that reason. See Versions and hardware."
        )
    return sentences


def _rules(board: Scoreboard) -> list[str]:
    """What the file asks for beside the usual test."""
    experiment = board.experiment
    sentences = []
    if experiment.overrides:
        sentences.append(
            f"The file was changed on the command line: {', '.join(experiment.overrides)}."
        )
    comparisons = sum(variant.name != experiment.baseline for variant in experiment.variants)
    if experiment.multiplicity == "none" and comparisons > 1:
        wrong = f"{100 * (1 - (1 - ALPHA) ** comparisons):.0f} %"
        sentences.append(
            f"The {comparisons} comparisons are not corrected for their number, as the file asks "
            f'(multiplicity = "none"): where nothing differs, up to {wrong} of such experiments '
            "have a wrong verdict somewhere."
        )
    if experiment.losses == "survivors" and board.counts["lost"]:
        sentences.append(
            'Verdicts are about survivors, as the file asks (losses = "survivors"): that seeds '
            "were lost is not part of them."
        )
    if experiment.looks:
        reached = reached_look(
            experiment, {r.run: r for r in board.all_results()}, board.failures()
        )
        further = [look for look in experiment.looks if look > reached]
        now = f"These are the verdicts after {reached} seeds"
        if not reached:
            now = f"Verdicts wait for the first look, after {experiment.looks[0]} seeds"
        then = f"; the next look is after {further[0]}" if reached and further else ""
        sentences.append(
            f"Looks are planned after {listed(experiment.looks)} seeds. {now}{then}. Seeds between "
            "two looks are shown, and not tested yet."
        )
    return sentences


def _where(scores: Scores, lost: Sequence[int]) -> str:
    seeds = f"{'seed' if len(lost) == 1 else 'seeds'} {listed(lost)}"
    if len(lost) == len(scores.runs) > 1:
        seeds = "every seed"
    return seeds + at(scores.variant.cell)
