"""The page as text: complete, offline, small, and nothing a user gives becomes markup."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lab.report import sample
from normkit.lab.experiment import Published
from normkit.lab.report import page, report
from normkit.lab.results import METRICS
from normkit.lab.statistics import compare
from normkit.models import MissingExtra

EVIL = "\"><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;{{ 7 * 7 }}%{y}"
MADE = sample.published(sample.experiment())
FOUND = sample.results(MADE, diverged=[("bn", 3)], left_out=[("ubn", 5)])
COMPARED = sample.comparisons(MADE, FOUND)


class Reader(HTMLParser):
    """Tags, attributes and texts; an error for tags that do not match."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def usual() -> str:
    return page(MADE, FOUND, COMPARED)


def test_the_answer_comes_first(usual: str) -> None:
    text = read(usual).text
    places = [
        text.rindex(part)  # the list of the page's parts near its top names them too
        for part in (
            MADE.title,
            MADE.question,
            "bcn is better than bn at 2 samples a worker",
            "Read with care",
            "Against bn, over the seeds that both survived",
            "Learning curves",
            "Published numbers beside ours",
            "Time and memory",
            "Configuration",
            "Versions and hardware",
        )
    ]
    assert places == sorted(places)


def test_every_variant_and_cell_has_its_verdict(usual: str) -> None:
    table = re.search(r'<table class="sortable" id="verdict-table">.*?</table>', usual, re.S)[0]
    assert table.count("<tr") == 1 + 2 * 5
    assert table.count(">baseline<") == 2
    for c in COMPARED:
        assert f"{100 * c.difference:+.2f}".replace("-", "−") in table


def test_it_says_what_was_not_run_and_what_diverged(usual: str) -> None:
    text = read(usual).text
    assert "ubn at 2 samples a worker: seed 5 not run" in text
    assert "bn at 64 samples a worker, seed 3: the loss was not finite in epoch 5" in text
    assert "50 runs: 46 done, 2 diverged, 2 without a result." in text


def test_it_holds_configuration_versions_and_published_numbers(usual: str) -> None:
    text = read(usual).text
    assert "norm gn (groups=8)" in text
    assert "train.schedule" in text
    assert "CPU, 2 threads" in text
    assert "75.40 ± 0.20" in text
    assert "Ours is another protocol: " + MADE.difference in text


def test_published_numbers_of_what_this_scale_leaves_out() -> None:
    """A scale may have fewer variants and cells than the table of the paper."""
    cell = MADE.cells()[0]
    elsewhere = Published("bn", 0.777, (("train.worker_batch", 128),))
    made = replace(
        MADE, published=(Published("bn", 0.653, cell), Published("dn", 0.71, cell), elsewhere)
    )
    text = read(page(made, FOUND, COMPARED)).text
    assert "65.30" in text
    assert "77.70" in text, "shown, with nothing of ours beside it"
    assert "71.00" not in text


def test_failed_runs_say_why() -> None:
    run = MADE.variant("ubn", MADE.cells()[0]).runs(MADE.seeds)[4]
    text = read(page(MADE, FOUND, COMPARED, failures={run.id: "lost its worker 3 times"})).text
    assert "ubn at 2 samples a worker: seed 5 failed" in text
    assert "lost its worker 3 times" in text


def test_the_same_results_give_the_same_page(usual: str) -> None:
    assert page(MADE, FOUND, COMPARED) == usual


def test_nothing_is_loaded(usual: str) -> None:
    reader = read(usual)
    addresses = {v for _, name, v in reader.attributes if name in ("src", "href", "action")}
    assert all(address.startswith("#") for address in addresses)
    assert not {"link", "img", "iframe", "object"} & set(reader.tags)
    assert "@import" not in usual
    assert not re.search(r"url\(", re.search(r"<style>(.*?)</style>", usual, re.S)[1])


def test_only_its_own_scripts_may_run(usual: str) -> None:
    reader = read(usual)
    policy = next(v for t, n, v in reader.attributes if n == "content" and "script-src" in v)
    assert policy.startswith("default-src 'none'")
    data, *scripts = re.findall(r"<script[^>]*>(.*?)</script>", usual, re.S)
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.count("sha256-") == 2
    json.loads(data)


def test_it_stays_below_six_megabytes(usual: str) -> None:
    """Plotly alone has 4.8; the rest of a usual page should not be seen beside it."""
    assert len(usual.encode()) < 5.2e6
    many = sample.experiment(
        ("bn", "ubn"),
        {"model.name": tuple("abcdefgh"), "train.worker_batch": (32, 64, 128, 256, 512)},
        seeds=15,
        epochs=30,
    )
    found = sample.results(many)
    large = page(many, found, sample.comparisons(many, found))
    assert len(large.encode()) < 6e6
    assert "1,200 are too many for a page" in read(large).text


def wicked() -> tuple[Any, Any, Any]:
    made = sample.experiment(("bn", EVIL), {EVIL: ("a", EVIL), "train.worker_batch": (2, 64)})
    made = replace(
        made, title=EVIL, question=EVIL, source=EVIL, scale=EVIL, difference=EVIL, name=EVIL
    )
    made = sample.published(made, ("bn", EVIL))
    made = replace(made, published=tuple(replace(p, note=EVIL) for p in made.published))
    found = {
        run: replace(result, note=EVIL, environment={EVIL: EVIL})
        for run, result in sample.results(made, diverged=[(EVIL, 2)]).items()
    }
    return made, found, sample.comparisons(made, found)


def test_whatever_a_user_typed_is_text() -> None:
    made, found, compared = wicked()
    failures = {run.id: EVIL for run in made.runs()}
    text = page(made, found, compared, failures=failures)
    reader = read(text)
    assert reader.tags.count("script") == 3  # the data, plotly, the page's own
    assert "img" not in reader.tags
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    assert EVIL in reader.text
    assert "49%{y}" not in text, "a name is no template"
    charts = json.loads(reader.scripts[0])
    assert "<" not in json.dumps(charts["styles"])


def test_an_experiment_that_was_not_run_says_how_to_run_it() -> None:
    made = replace(MADE, path=Path("some/where/small-batches.toml"))
    text = read(page(made, {}, sample.comparisons(made, {}))).text
    assert "Nothing has been run yet" in text
    assert "normkit lab run small-batches.toml --scale desk" in text
    assert "50 runs are planned" in text
    assert "some/where" not in text, "where it lies on a machine is nobody's business"
    assert len(page(made, {}, [])) < 200_000, "without charts there is no need for plotly"


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_give_a_page(seeds: int) -> None:
    made = sample.experiment(seeds=seeds)
    found = sample.results(made)
    text = page(made, found, compare(made, found))
    assert "nan" not in read(text).text.lower().replace("tenant", "")
    assert "NaN" not in re.search(r'id="charts">(.*?)</script>', text, re.S)[1]


def test_everything_may_diverge() -> None:
    made = sample.experiment(("bn", "gn"))
    pairs = [(name, seed) for name in ("bn", "gn") for seed in made.seeds]
    found = sample.results(made, diverged=pairs)
    text = read(page(made, found, compare(made, found))).text
    assert "bn diverged, and nothing can be compared with it." in text
    assert "bn diverged: every seed at 2 samples a worker" in text


def test_a_loss_that_is_not_finite_in_the_end_is_counted_as_a_divergence() -> None:
    """Training may go well, and evaluation not: the tests counted it, the page did not."""
    made = sample.experiment(("bn", "gn"), {"train.worker_batch": (2,)}, seeds=3, metric="loss")
    found = sample.results(made)
    run = made.variant("gn", made.cells()[0]).runs(made.seeds)[1].id
    last = replace(found[run].epochs[-1], test_loss=math.inf)
    found[run] = replace(found[run], epochs=(*found[run].epochs[:-1], last))
    text = read(page(made, found, compare(made, found))).text
    assert "6 runs: 5 done, 1 diverged." in text
    assert "gn diverged: seed 2 at 2 samples a worker." in text
    assert "gn at 2 samples a worker, seed 2: the score is not finite" in text
    assert "it diverged at 1 of 3 seeds" in text


def test_a_variant_that_is_only_in_some_cells() -> None:
    made = sample.experiment(("bn", "gn"))
    kept = tuple(v for v in made.variants if v.name == "bn" or v.cell == made.cells()[0])
    made = replace(made, variants=kept)
    found = sample.results(made)
    text = page(made, found, compare(made, found))
    assert re.search(r'<td class="none">–</td>', text)


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric(metric: str) -> None:
    made = sample.experiment(("bn", "gn"), metric=metric)
    found = sample.results(made)
    text = read(page(made, found, compare(made, found))).text
    assert f"Test {metric.replace('top5_', 'top-5 ')}" in text
    assert ("a lower" in text) == (metric in ("error", "loss", "top5_error"))


def test_statistics_and_page_fit_together() -> None:
    """From the lab's own comparisons: no number is lost on the way to the table."""
    compared = compare(MADE, FOUND)
    text = page(MADE, FOUND, compared)
    assert compared[0].pairs == 4
    for c in compared:
        assert math.isfinite(c.difference)
        assert f"{100 * c.low:.2f} to {100 * c.high:.2f}".replace("-", "−") in text


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"needs {package}.*normkit\[lab\]"):
        page(MADE, FOUND, COMPARED)


def test_a_file_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "page.html"
    assert report(MADE, FOUND, COMPARED, target) == target
    before = target.read_bytes()
    assert before.decode().startswith("<!DOCTYPE html>")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        report(MADE, {}, [], target)
    assert target.read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]


def test_a_full_disk_names_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *given: Any, **options: Any) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    made = sample.experiment(("bn", "gn"), grid={}, seeds=2, epochs=2)
    found = sample.results(made)
    target = tmp_path / "answer.html"
    target.write_text("the old one")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*answer\.html'"):
        report(made, found, sample.comparisons(made, found), target)
    assert [file.name for file in tmp_path.iterdir()] == ["answer.html"]
    assert target.read_text() == "the old one"


def test_pictures_that_runs_have_left_stand_on_the_page() -> None:
    assert "Pictures" not in page(MADE, FOUND, COMPARED)
    variant = MADE.variants[0]
    first = variant.runs(MADE.seeds)[0].id
    left = ({"caption": f"a test image {EVIL}", "png": "iVBORw0KGgo="},)
    with_pictures = {**FOUND, first: replace(FOUND[first], pictures=left)}
    text = page(MADE, with_pictures, COMPARED)
    reader = Reader()
    reader.feed(text)
    images = [value for tag, name, value in reader.attributes if (tag, name) == ("img", "src")]
    assert images == ["data:image/png;base64,iVBORw0KGgo="]
    captions = [value for tag, name, value in reader.attributes if (tag, name) == ("img", "alt")]
    assert captions == [f"a test image {EVIL}"]


def test_what_runs_have_found_stands_on_the_page_for_every_seed() -> None:
    assert "What was found" not in page(MADE, FOUND, COMPARED)
    runs = MADE.variants[0].runs(MADE.seeds)[:2]
    left = {run.id: replace(FOUND[run.id], texts={"cells": f"a cell {EVIL}"}) for run in runs}
    text = page(MADE, {**FOUND, **left}, COMPARED)
    assert text.count("<h4>cells</h4>") == 2
    for run in runs:
        assert re.search(rf"<summary>[^<]*, seed {run.seed}</summary>", text)
    reader = Reader()
    reader.feed(text)
    assert EVIL not in text
