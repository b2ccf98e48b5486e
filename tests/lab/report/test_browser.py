"""The page in a browser: it draws, sorts, hides, prints, and runs nothing but its own scripts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lab.report import sample
from lab.report.browser import Browser, found
from normkit.diagnosis.diagnose import diagnose
from normkit.lab.report import report

EVIL = "<script>window.stolen = 1</script>"
IMAGE = '"><img src=x onerror="window.stolen = 2">'

pytestmark = pytest.mark.skipif(
    found() is None, reason="needs Chromium or Chrome, and there is none on the path"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(str(found()), tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = sample.published(sample.experiment())
    results = sample.results(made, diverged=[("bn", 3)], left_out=[("ubn", 5)])
    path = tmp_path_factory.mktemp("page") / "usual.html"
    return report(made, results, sample.comparisons(made, results), path)


@pytest.fixture
def opened(browser: Browser, usual: Path) -> Browser:
    browser.window(1280, 900)
    browser.open(usual)
    return browser


def settled(condition: Callable[[], bool]) -> bool:
    """Whether something becomes true soon: pages answer to events in their own time."""
    until = time.monotonic() + 10
    while not (done := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return done


def test_it_loads_without_a_complaint_and_without_a_network(opened: Browser, usual: Path) -> None:
    assert opened.evaluate("document.documentElement.dataset.ready") == "yes"
    assert opened.console == []
    assert opened.asked_for == [usual.as_uri()]


def test_the_page_of_a_diagnosis_has_the_same_style_and_no_script(
    browser: Browser, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8))
    path = tmp_path / "diagnosis.html"
    diagnose(model, [torch.randn(16, 3, 6, 6)]).to_html(path)
    browser.window(390, 844, phone=True)
    browser.open(path)
    assert browser.console == []
    assert browser.asked_for == [path.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.evaluate("document.scripts.length") == 0
    assert browser.evaluate("document.querySelectorAll('svg circle').length") > 0
    colour = "getComputedStyle(document.querySelector('.bar')).backgroundColor"
    light = browser.evaluate(colour)
    browser.window(390, 844, phone=True, dark=True)
    assert settled(lambda: browser.evaluate(colour) != light)


def test_every_chart_is_drawn(opened: Browser) -> None:
    drawn = opened.evaluate(
        """[...document.querySelectorAll('.figure')].map(figure => [
            figure.dataset.figure,
            [...figure.querySelectorAll('.chart')].map(
                chart => chart.querySelectorAll('.scatterlayer .trace').length)])"""
    )
    counts = dict(drawn)
    assert {"paired", "over-train.worker_batch", "curves", "trade"} < set(counts)
    assert {"watched-condensation", "watched-esm_std"} < set(counts)
    assert all(panels and all(count > 0 for count in panels) for panels in counts.values())
    assert len(counts["curves"]) == 2  # a panel for each cell
    assert counts["paired"] == [12, 12]  # four variants: interval, dots and mean
    dots = opened.evaluate(
        "document.querySelector('[data-figure=paired] .chart').data.map(trace => trace.y)"
    )[1]
    assert len(set(dots)) == len(dots) > 2, "dots of different seeds do not hide each other"


def test_a_chart_says_what_it_is_to_those_who_cannot_see_it(opened: Browser) -> None:
    said = opened.evaluate(
        "[...document.querySelectorAll('.chart')].map(chart => chart.getAttribute('aria-label'))"
    )
    assert "Learning curves, Test accuracy (%), 2 samples a worker" in said
    assert len(set(said)) == len(said)


def column(browser: Browser, index: int) -> list[str]:
    return browser.evaluate(
        f"""[...document.querySelectorAll('#verdict-table tbody tr')].map(
            row => row.cells[{index}].dataset.v ?? row.cells[{index}].textContent)"""
    )


def click(browser: Browser, heading: str) -> str:
    return browser.evaluate(
        f"""(() => {{ const head = [...document.querySelectorAll('#verdict-table th')].find(
            each => each.textContent.trim() === {heading!r});
            head.querySelector('button').click(); return head.getAttribute('aria-sort'); }})()"""
    )


def test_the_verdict_table_sorts(opened: Browser) -> None:
    assert click(opened, "Difference") == "ascending"
    rising = [float(text) for text in column(opened, 3)]
    assert rising == sorted(rising)
    assert len(set(rising)) == 9  # eight comparisons; the baselines are 0
    assert click(opened, "Difference") == "descending"
    assert [float(text) for text in column(opened, 3)] == rising[::-1]

    assert click(opened, "Variant") == "ascending"
    names = column(opened, 0)
    assert [name.strip() for name in names] == sorted(2 * list(sample.NAMES))

    assert click(opened, "95 % interval") == "ascending"
    lows = column(opened, 4)
    assert lows[-2:] == ["", ""], "rows without a value come last"
    assert click(opened, "95 % interval") == "descending"
    assert column(opened, 4)[-2:] == ["", ""]
    assert opened.evaluate("document.querySelectorAll('[aria-sort]').length") == 1


def test_a_variant_can_be_hidden_in_all_charts(opened: Browser) -> None:
    count = "document.querySelectorAll('.figure[data-figure=paired] .scatterlayer .trace').length"
    assert opened.evaluate(count) == 24
    opened.evaluate("document.querySelector('.chip[data-variant=\"1\"]').click()")
    assert settled(lambda: opened.evaluate(count) == 18)
    opened.evaluate("document.querySelector('.chip[data-variant=\"1\"]').click()")
    assert settled(lambda: opened.evaluate(count) == 24)


def test_charts_fit_what_is_left(browser: Browser, tmp_path: Path) -> None:
    """One variant far below the others made them all one line, hidden or not."""
    made = sample.experiment(("bn", "bcn", "in"), {"train.worker_batch": (2,)}, seeds=3)
    results = sample.results(made, final={"in": 0.4})
    path = report(made, results, sample.comparisons(made, results), tmp_path / "page.html")
    browser.window(1280, 900)
    browser.open(path)
    heights = """[...document.querySelectorAll('[data-figure=curves] .chart')].map(
        chart => chart._fullLayout.yaxis.range[0])"""
    widths = """[...document.querySelectorAll('[data-figure=paired] .chart')].map(
        chart => chart._fullLayout.xaxis.range[0])"""
    before = browser.evaluate(heights), browser.evaluate(widths)
    assert before[0][0] < 40
    assert before[1][0] < -40
    browser.evaluate("document.querySelector('.chip[data-variant=\"2\"]').click()")
    assert settled(lambda: browser.evaluate(heights)[0] > 50)
    assert browser.evaluate(widths)[0] > -10
    browser.evaluate("document.querySelector('.chip[data-variant=\"2\"]').click()")
    assert settled(lambda: (browser.evaluate(heights), browser.evaluate(widths)) == before)
    assert browser.console == []


def test_another_view_can_be_chosen(opened: Browser) -> None:
    title = "document.querySelector('.figure[data-figure=curves] .ytitle').textContent"
    assert opened.evaluate(title) == "Test accuracy (%)"
    opened.evaluate(
        """(() => { const select = document.querySelector('.figure[data-figure=curves] select');
        select.value = [...select.options].find(o => o.text === 'Training loss').value;
        select.dispatchEvent(new Event('change')); })()"""
    )
    assert settled(lambda: opened.evaluate(title) == "Training loss")
    assert opened.console == []


def test_light_and_dark_follow_the_reader(browser: Browser, usual: Path) -> None:
    colours = """[getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('.chart .xtick text')).fill]"""
    browser.window(1280, 900)
    browser.open(usual)
    light = browser.evaluate(colours)
    browser.window(1280, 900, dark=True)
    assert settled(lambda: browser.evaluate(colours)[1] != light[1]), "drawn again when it changes"
    dark = browser.evaluate(colours)
    assert _brightness(light[0]) > 200 > 80 > _brightness(dark[0])
    assert _brightness(light[1]) < 130 < _brightness(dark[1])


def _brightness(colour: str) -> float:
    numbers = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, usual: Path) -> None:
    browser.window(390, 844, phone=True)
    browser.open(usual)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    widest = (
        "Math.max(...[...document.querySelectorAll('.chart .main-svg')].map(s => s.clientWidth))"
    )
    assert 250 < browser.evaluate(widest) < 390
    assert browser.console == []


def test_paper_is_white_and_has_its_own_width(
    browser: Browser, usual: Path, tmp_path: Path
) -> None:
    browser.window(1600, 900, dark=True)
    browser.open(usual)
    widest = (
        "Math.max(...[...document.querySelectorAll('.chart .main-svg')].map(s => s.clientWidth))"
    )
    tick = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    on_screen = browser.evaluate(widest)
    assert on_screen > 690
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert settled(lambda: browser.evaluate(widest) <= 690)
    assert settled(lambda: _brightness(browser.evaluate(tick)) < 130)
    assert browser.evaluate("document.querySelector('details[data-print]').open")
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert settled(lambda: browser.evaluate(widest) == on_screen)
    assert not browser.evaluate("document.querySelector('details[data-print]').open")
    pages = browser.paper(tmp_path / "page.pdf").read_bytes()
    assert pages.startswith(b"%PDF-")
    assert browser.console == []


def test_many_cells_are_chosen_from_a_list(browser: Browser, tmp_path: Path) -> None:
    made = sample.experiment(("bn", "gn"), {"train.worker_batch": (2, 4, 8, 16, 64)}, seeds=2)
    results = sample.results(made)
    path = report(made, results, sample.comparisons(made, results), tmp_path / "page.html")
    browser.window(1280, 900)
    browser.open(path)
    head = "document.querySelector('.figure[data-figure=trade] h4').textContent"
    assert browser.evaluate(head) == "2 samples a worker"
    browser.evaluate(
        """(() => { const select = document.querySelector('.figure[data-figure=trade] select');
        select.value = '3'; select.dispatchEvent(new Event('change')); })()"""
    )
    assert settled(lambda: browser.evaluate(head) == "16 samples a worker")
    assert browser.evaluate("document.querySelectorAll('[data-figure=trade] .chart').length") == 1


def test_a_variant_named_like_a_script_does_nothing(browser: Browser, tmp_path: Path) -> None:
    wide = {"train.worker_batch": (2,)}  # one chart, with room for the names
    made = sample.experiment(("bn", EVIL, IMAGE, "<b>bold</b>"), wide, seeds=3)
    made = replace(made, title=EVIL, question=IMAGE, difference=EVIL)
    results = sample.results(made)
    path = report(made, results, sample.comparisons(made, results), tmp_path / "page.html")
    browser.window(1280, 900)
    browser.open(path)
    assert browser.evaluate("window.stolen ?? null") is None
    assert browser.console == []
    assert browser.evaluate("document.title") == EVIL
    assert browser.evaluate("document.scripts.length") == 3
    assert browser.evaluate("document.images.length") == 0
    labels = browser.evaluate(
        """[...document.querySelectorAll('.figure[data-figure=paired] .chart')].flatMap(
            chart => [...chart.querySelectorAll('.ytick text')].map(each => each.textContent))"""
    )
    assert set(labels) == {EVIL, IMAGE, "<b>bold</b>"}, "charts show names as they were typed"
    # and if anything had got through, the browser would have refused to run it
    browser.evaluate(
        """document.body.append(Object.assign(document.createElement('script'),
            {textContent: 'window.stolen = 3'}))"""
    )
    assert browser.evaluate("window.stolen ?? null") is None


def test_long_names_leave_room_for_the_numbers(browser: Browser, tmp_path: Path) -> None:
    """On a phone they were cut off in the answer, and left a third of the chart for the data."""
    names = [f"{word}_{'x' * 60}<&>{word}" for word in ("first", "second")]
    made = sample.experiment(("bn", *names), {"train.worker_batch": (2,)}, seeds=3)
    results = sample.results(made)
    path = report(made, results, sample.comparisons(made, results), tmp_path / "page.html")
    browser.window(390, 844, phone=True)
    browser.open(path)
    labels = browser.evaluate(
        "[...document.querySelectorAll('[data-figure=paired] .ytick text')].map(e => e.textContent)"
    )
    half = len(labels[0]) // 2
    assert 4 < half < 15
    assert set(labels) == {f"{name[:half]}…{name[-half:]}" for name in names}
    shares = browser.evaluate(
        """[...document.querySelectorAll('[data-figure=paired] .chart')].map(
            chart => chart._fullLayout._size.w / chart.clientWidth)"""
    )
    assert all(share > 0.5 for share in shares)
    hidden = (
        "[...document.querySelectorAll('.beside > div')].some(e => e.scrollWidth > e.clientWidth)"
    )
    assert browser.evaluate(hidden) is False


def test_bars_of_one_batch_size_stand_beside_each_other(opened: Browser) -> None:
    drawn = opened.evaluate(
        """document.querySelector('[data-figure="over-train.worker_batch"] .chart').data.map(
            trace => [trace.x[0], trace.customdata[0][0]])"""
    )
    assert len(drawn) == 5
    assert len({x for x, _ in drawn}) == 5, "or they would hide each other"
    assert {said for _, said in drawn} == {2}, "what is said is the batch size"
    assert all(1.8 < x < 2.2 for x, _ in drawn)


def test_a_page_without_results_works(browser: Browser, tmp_path: Path) -> None:
    made = sample.experiment()
    path = report(made, {}, [], tmp_path / "page.html")
    browser.window(1280, 900)
    browser.open(path)
    assert browser.console == []
    assert browser.evaluate("document.documentElement.dataset.ready") == "yes"
    assert browser.evaluate("document.querySelectorAll('.chart').length") == 0
