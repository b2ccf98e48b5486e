"""The data behind the charts: right, short, and without what users typed becoming markup."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest

from lab.report import sample
from normkit.lab.report.curves import LOST_SHOWN, learning_curves, points_each, watched_measures
from normkit.lab.report.figures import Figure, Panel, View, short_number, thinned
from normkit.lab.report.score_charts import paired_differences, scores_over_axes, time_trade_off
from normkit.lab.report.scores import Scoreboard
from normkit.lab.statistics import compare

MADE = sample.experiment(("bn", "bcn"))
FOUND = sample.results(MADE, diverged=[("bcn", 4)])
BOARD = Scoreboard(MADE, FOUND)


def marks(figure: Figure, view: int = 0, panel: int = 0) -> list[dict]:
    return list(figure.views[view].panels[panel].marks)


def test_a_curve_is_the_mean_over_seeds_with_their_deviation() -> None:
    line = next(m for m in marks(learning_curves(BOARD)) if m["v"] == 0)
    assert line["x"] == list(range(13))
    at_five = [
        100 * epoch.test_accuracy
        for result in BOARD.baseline(MADE.cells()[0]).results.values()
        for epoch in result.epochs
        if epoch.epoch == 5
    ]
    assert len(at_five) == 5
    assert line["y"][5] == pytest.approx(statistics.fmean(at_five), rel=1e-4)
    assert line["s"][5] == pytest.approx(statistics.stdev(at_five), rel=1e-3)


def test_an_epoch_that_one_seed_lacks_is_left_out() -> None:
    """Else the mean would jump there, and a reader would take it for learning."""
    run = MADE.variants[0].runs(MADE.seeds)[0].id
    epochs = list(FOUND[run].epochs)
    epochs[5] = replace(epochs[5], test_accuracy=math.nan)
    del epochs[7]
    found = {**FOUND, run: replace(FOUND[run], epochs=tuple(epochs))}
    line = next(m for m in marks(learning_curves(Scoreboard(MADE, found))) if m["v"] == 0)
    assert line["x"] == [0, 1, 2, 3, 4, 6, 8, 9, 10, 11, 12]


def test_a_run_that_diverged_is_drawn_apart() -> None:
    own = [m for m in marks(learning_curves(BOARD)) if m["v"] == 1]
    assert [m["k"] for m in own] == ["line", "ended"]
    assert max(own[1]["x"]) == 4
    assert max(own[0]["x"]) == 12


def test_not_all_of_many_that_diverged_are_drawn() -> None:
    found = sample.results(MADE, diverged=[("bcn", seed) for seed in MADE.seeds])
    own = [m for m in marks(learning_curves(Scoreboard(MADE, found))) if m["v"] == 1]
    assert [m["k"] for m in own] == ["ended"] * LOST_SHOWN


def test_what_was_not_measured_has_no_view() -> None:
    titles = [view.title for view in learning_curves(BOARD).without_empty().views]
    assert "Test accuracy (%)" in titles
    assert "Validation accuracy (%)" not in titles  # the sample has no validation set


def test_long_trainings_are_thinned() -> None:
    assert thinned(5, 10) == [0, 1, 2, 3, 4]
    kept = thinned(1000, 7)
    assert len(kept) == 7
    assert (kept[0], kept[-1]) == (0, 999)
    assert points_each(1) == 200
    assert points_each(10**6) == 8


def test_paired_differences_are_those_of_the_seeds() -> None:
    mark = marks(paired_differences(BOARD, sample.comparisons(MADE, FOUND)))[0]
    ours, theirs = BOARD.get("bcn", MADE.cells()[0]), BOARD.baseline(MADE.cells()[0])
    seeds = [each[0] for each in mark["both"]]
    assert seeds == [1, 2, 3, 5]  # 4 diverged
    for x, seed in zip(mark["x"], seeds, strict=True):
        assert x == pytest.approx(100 * (ours.by_seed[seed] - theirs.by_seed[seed]), rel=1e-4)


def test_differences_of_error_are_turned_round() -> None:
    made = replace(MADE, metric="error")
    board = Scoreboard(made, FOUND)
    mine = board.differences(board.get("bcn", made.cells()[0]))
    accuracy = BOARD.differences(BOARD.get("bcn", made.cells()[0]))
    for seed, difference in mine.items():
        assert difference == pytest.approx(accuracy[seed])


def test_an_axis_of_batch_sizes_is_logarithmic() -> None:
    figure = scores_over_axes(BOARD)[0]
    axis = figure.views[0].panels[0].layout["xaxis"]
    assert (axis["type"], axis["tickvals"]) == ("log", [2, 64])
    assert [m["x"] for m in marks(figure)] == [[2, 64], [2, 64]]


def test_names_are_an_axis_where_there_are_no_numbers() -> None:
    made = sample.experiment(("bn", "gn"), {"model.name": ("timm:a", "timm:b")})
    board = Scoreboard(made, sample.results(made))
    figure = scores_over_axes(board)[0]
    assert figure.views[0].panels[0].layout["xaxis"]["type"] == "category"
    assert marks(figure)[0]["x"] == ["a", "b"]


def test_published_numbers_are_a_view_of_their_own() -> None:
    made = sample.published(MADE, ["bn"])
    figure = scores_over_axes(Scoreboard(made, FOUND))[0]
    assert {m["k"] for m in marks(figure, view=0)} == {"points"}
    assert {m["k"] for m in marks(figure, view=1)} == {"points", "published"}


def test_a_measure_of_layers_is_shown_over_depth() -> None:
    figures = {figure.id: figure for figure in watched_measures(BOARD)}
    assert set(figures) == {"watched-condensation", "watched-esm_std"}
    depth = marks(figures["watched-esm_std"])[0]
    assert depth["x"] == list(range(1, 10))
    last = [
        result.epochs[-1].measures["esm_std"][3]
        for result in BOARD.baseline(MADE.cells()[0]).results.values()
    ]
    assert depth["y"][3] == pytest.approx(statistics.fmean(last), rel=1e-4)
    assert len(figures["watched-condensation"].views) == 1


def test_a_disturbance_is_shown_over_its_size() -> None:
    values = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    found = {
        run: replace(
            result,
            epochs=(
                *result.epochs[:-1],
                replace(result.epochs[-1], measures={"disturbance": values}),
            ),
        )
        for run, result in FOUND.items()
    }
    figure = next(
        f for f in watched_measures(Scoreboard(MADE, found)) if f.id == "watched-disturbance"
    )
    assert marks(figure)[0]["x"] == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert marks(figure)[0]["y"] == values
    assert len(figure.views) == 1


def test_time_against_score() -> None:
    dots = marks(time_trade_off(BOARD))
    assert [m["x"] for m in dots] == [[2.4], [3.12]]


def test_numbers_are_short_and_json_stays_json() -> None:
    assert short_number(0.123456789) == 0.12346
    assert json.dumps(short_number(12.0)) == "12"
    assert short_number(math.nan) is None
    assert short_number(math.inf) is None


def test_texts_of_charts_are_no_markup() -> None:
    assert short_number("<b>&</b>") == "&lt;b&gt;&amp;&lt;/b&gt;"


def test_what_all_marks_share_is_said_once() -> None:
    panel = Panel("", ({"x": [1, 2], "y": [3]}, {"x": [1, 2], "y": [4]}, {"x": [1], "y": [5]}), {})
    plain = panel.plain()
    assert plain["x"] == [1, 2]
    assert [m.get("x") for m in plain["marks"]] == [None, None, [1]]


def test_empty_panels_and_views_are_left_out() -> None:
    full = Panel("full", ({"x": [1], "y": [1]},), {})
    figure = Figure("f", "", "", (View("a", (Panel("", (), {}),)), View("b", (full,))))
    assert [view.title for view in figure.without_empty().views] == ["b"]
    assert Figure("f", "", "", (View("a", ()),)).without_empty() is None


def test_layers_without_a_measure_leave_no_gap() -> None:
    """A group norm between batch norms has no estimation shift; its neighbours' line goes on."""
    found = {
        run: replace(
            result,
            epochs=(
                *result.epochs[:-1],
                replace(result.epochs[-1], measures={"esm_std": [None, 0.1, None, 0.2]}),
            ),
        )
        for run, result in FOUND.items()
    }
    (figure,) = (f for f in watched_measures(Scoreboard(MADE, found)) if f.id == "watched-esm_std")
    depth = marks(figure)[0]
    assert depth["x"] == [2, 4]
    assert depth["y"] == [0.1, 0.2]


def test_few_epochs_have_whole_ticks() -> None:
    """There were ticks at 0.5 and 1.5 epochs."""
    for epochs, ticks in ((2, 1), (30, None)):
        made = sample.experiment(("bn", "bcn"), epochs=epochs)
        board = Scoreboard(made, sample.results(made))
        made_up = [learning_curves(board), *watched_measures(board)]
        figures = [kept for figure in made_up if (kept := figure.without_empty()) is not None]
        over = [p.layout for f in figures for v in f.views for p in v.panels]
        axes = [each["xaxis"] for each in over if each["xaxis"]["title"]["text"] == "epoch"]
        assert len(axes) > 4
        assert {each.get("dtick") for each in axes} == {ticks}


def test_only_what_is_in_the_chart_is_explained() -> None:
    assert "diverged" in learning_curves(BOARD).about
    short = sample.experiment(("bn", "bcn"), epochs=3)
    plain = learning_curves(Scoreboard(short, sample.results(short))).about
    assert "diverged" not in plain
    assert "double click" not in plain
    assert "double click" in learning_curves(BOARD).about


def test_a_variant_without_a_measure_is_named() -> None:
    """A reader of the estimation shift looked for gn, which has no running statistics."""
    found = {
        run: replace(
            each, epochs=tuple(replace(e, measures={"condensation": 0.4}) for e in each.epochs)
        )
        if run in {r.id for v in MADE.variants if v.name == "bcn" for r in v.runs(MADE.seeds)}
        else each
        for run, each in FOUND.items()
    }
    figures = {figure.id: figure.about for figure in watched_measures(Scoreboard(MADE, found))}
    assert figures["watched-esm_std"].endswith("Nothing to measure: bcn.")
    assert "Nothing to measure" not in figures["watched-condensation"]


def test_a_collapsed_seed_does_not_flatten_the_others() -> None:
    """One seed at chance level was averaged in, and made one line of all curves and differences."""
    bcn = MADE.variant("bcn", MADE.cells()[0]).runs(MADE.seeds)[0].id
    epochs = [
        replace(epoch, test_accuracy=0.1, test_top5_accuracy=0.5, test_loss=1e9)
        for epoch in FOUND[bcn].epochs
    ]
    found = {**FOUND, bcn: replace(FOUND[bcn], epochs=tuple(epochs))}
    board = Scoreboard(MADE, found)
    assert board.get("bcn", MADE.cells()[0]).collapsed == [1]
    figure = learning_curves(board)
    assert "runs that diverged or collapsed" in figure.about
    assert "of the runs that survived" in figure.about
    views = {view.title: view.panels[0] for view in figure.views}
    panel = views["Test accuracy (%)"]
    assert [m["k"] for m in panel.marks if m["v"] == 1] == ["line", "ended", "ended"]
    assert panel.layout["yaxis"]["range"][0] > 50
    loss = views["Test loss"].layout["yaxis"]
    assert loss["type"] == "log"
    assert loss["range"][1] < 1  # of log10
    paired = paired_differences(board, compare(MADE, found)).views[0].panels[0]
    low, high = paired.layout["xaxis"]["range"]
    assert -30 < low < high < 30


def test_one_variant_far_out_does_not_flatten_the_differences() -> None:
    final = {"bn": 0.9, "bcn": 0.905, "gn": 0.91, "ubn": 0.5}
    made = sample.experiment(tuple(final), {})
    found = sample.results(made, final=final)
    paired = paired_differences(Scoreboard(made, found), compare(made, found)).views[0].panels[0]
    assert paired.layout["xaxis"]["range"][0] > -20
    assert min(x for m in paired.marks for x in m["x"]) < -30  # a double click shows it


def test_the_band_of_a_seed_far_out_does_not_flatten_the_others() -> None:
    """One seed at two thirds of the others' accuracy, which is no collapse, made a band over the
    whole axis of which the other variants were a line."""
    names = ("bn", "bcn", "gn", "ubn")
    made = sample.experiment(names, grid={}, epochs=40)
    found = sample.results(made)
    run = made.variant("gn").runs(made.seeds)[2].id
    epochs = tuple(replace(e, test_accuracy=0.6 * e.test_accuracy) for e in found[run].epochs)
    usual = Scoreboard(made, found)
    board = Scoreboard(made, {**found, run: replace(found[run], epochs=epochs)})
    for chart, most in ((learning_curves, 3.0), (time_trade_off, 12.0)):
        heights = []
        for each in (usual, board):
            panel = chart(each).views[0].panels[0]
            low, high = panel.layout["yaxis"].get("range", (95.0, 97.0))
            heights.append(high - low)
            means = [y for m in panel.marks for x, y in zip(m["x"], m["y"], strict=True) if x > 30]
            assert all(low < mean < high for mean in means if chart is time_trade_off)
        assert heights[1] < most * heights[0]
    low, high = learning_curves(board).views[0].panels[0].layout["yaxis"]["range"]
    assert high <= 101  # no accuracy is higher


def test_a_measure_is_shown_from_its_beginning_beside_a_lost_run() -> None:
    """What falls in the first epochs was cut off where a run had diverged."""
    [watched] = [each for each in watched_measures(BOARD) if each.id == "watched-condensation"]
    panel = watched.views[0].panels[0]
    first = max(mark["y"][0] for mark in panel.marks)
    assert panel.layout["yaxis"]["range"][0] <= 0
    assert panel.layout["yaxis"]["range"][1] > first


def test_pages_of_very_many_seeds_say_less_of_each() -> None:
    made = sample.experiment(("bn", "bcn", "gn"), grid={}, seeds=20, epochs=2)
    found = sample.results(made)
    comparisons = compare(made, found)
    few = paired_differences(Scoreboard(made, found), comparisons)
    assert len(marks(few)[0]["both"]) == 20
    many = [replace(c, pairs=2000) for c in comparisons]
    assert "both" not in marks(paired_differences(Scoreboard(made, found), many))[0]
