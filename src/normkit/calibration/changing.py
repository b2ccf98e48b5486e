"""Measure, write, judge: what calibrate and adapt have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from normkit.calibration.feeding import Feed
from normkit.calibration.fingerprint import Fingerprint, of_state, of_weights
from normkit.calibration.measured import Measured
from normkit.calibration.result import Calibration, LayerChange
from normkit.calibration.snapshot import Snapshot
from normkit.calibration.statistics import Source, Statistics
from normkit.calibration.subjects import Subjects
from normkit.calibration.verdict import Metric, judged, score
from normkit.calibration.writing import Writer
from normkit.errors import NothingToDo
from normkit.inspection.keepers import Keeper


def change_statistics(
    model: nn.Module,
    feed: Feed,
    subjects: Subjects,
    *,
    sweep: Callable[..., list[Measured]],
    mode: str,
    until: float | None = None,
    prior: float = 0.0,
    metric: Metric | None = None,
    higher_is_better: bool = True,
    note: str = "",
    what: str = "calibrated",
    check: Callable[[Sequence[LayerChange]], str | None] | None = None,
) -> Calibration:
    """Measure, write, judge; if anything fails, the model is what it was.

    ``check`` looks at what has changed and gives a reason to take it back, or None.
    """
    keepers = subjects.keepers
    before = Snapshot(keeper.norm for keeper in keepers)
    writer, print_of = Writer(keepers, prior), Fingerprint()
    # what merging has to know; progressive statistics have changed what they depend on
    state = of_state(model.state_dict().items()) if mode == "layerwise" else ""
    try:
        first = None if metric is None else score(model, metric)
        measured = sweep(feed, keepers, writer, until, print_of)
        result = _result(model, subjects, writer, measured, before)
        result.statistics.sources = (Source.now(str(print_of), print_of.images, note),)
        result.statistics.mode, result.statistics.state = mode, state
        result.statistics.weights = of_weights(model)
        result.mode, result.until, result.what = mode, until, what
        if until is not None:
            result.sure = all(
                e is not None and e <= until for e in (x.error for x in result.layers)
            )
        last = None if metric is None else score(model, metric)
        reason = check(result.layers) if check is not None else None
    except BaseException:
        before.restore()
        raise
    if first is not None and last is not None:
        result.metric = (first, last)
        reason = reason or judged(first, last, higher_is_better)
    if reason:
        result.why_not = reason
        result.undo()
    return result


def _result(
    model: nn.Module,
    subjects: Subjects,
    writer: Writer,
    measured: Sequence[Measured],
    before: Snapshot,
) -> Calibration:
    done = [one for one in measured if one.tally is not None]
    if not done:
        raise NothingToDo(
            "No batch reached a norm with finite values, so there is nothing to calibrate."
        )
    left = dict(subjects.left)
    left |= {one.keeper.path: "no batch reached it" for one in measured if one.tally is None}
    tallies = {one.keeper.path: one.tally for one in done if one.tally is not None}
    kinds = {one.keeper.path: one.keeper.kind for one in done}
    layers = tuple(_change(one.keeper, writer, one) for one in done)
    return Calibration(
        model,
        layers,
        Statistics(tallies, kinds, model=type(model).__name__),
        before,
        images=max(one.images for one in done),
        batches=max(one.batches for one in done),
        left=left,
        unsettled=tuple(one.keeper.path for one in done if not one.settled),
    )


def _change(keeper: Keeper, writer: Writer, one: Measured) -> LayerChange:
    assert one.tally is not None
    old = tuple(t.cpu() for t in writer.start[keeper])
    new = tuple(t.detach().cpu().clone() for t in keeper.held())
    return LayerChange(
        keeper.path,
        keeper.kind,
        int(one.tally.count.min()),
        (old[0], old[1]),
        (new[0], new[1]),
        one.uncertainty().cpu(),
        keeper.eps,
    )
