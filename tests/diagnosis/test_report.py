"""The page and the JSON: complete, strict, offline, and nothing a user gives becomes markup."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normkit.diagnosis.attribution import GapAttribution
from normkit.diagnosis.diagnose import diagnose
from normkit.diagnosis.diagnosis import Diagnosis, LayerNumbers
from normkit.diagnosis.findings import KINDS, Undecided
from normkit.diagnosis.observe.passes import Losses
from normkit.diagnosis.report import MEASURES, page

EVIL = "\"><script>alert(1)</script><img src=x onerror='y'>&amp;"
VOID = {"meta", "path", "rect", "circle", "br", "img", "link", "wbr"}


class Reader(HTMLParser):
    """Collects tags and attributes; an error for tags that do not match."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "img", "br", "link", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def finding(**more: Any) -> Any:
    given = {"remedy": "nk.calibrate(model, loader)", "share": 0.5, **more}
    return KINDS["stale-statistics"].finding("serious", ["a", "b"], "Two norms are off.", **given)


def gap(shares: dict[str, float], eval_loss: float = 2.0) -> GapAttribution:
    sizes = (4, 4)
    return GapAttribution(
        Losses((1.0, 1.0), sizes), Losses((eval_loss, eval_loss), sizes), shares, shares, "swap"
    )


def layers(count: int, **numbers: float) -> tuple[LayerNumbers, ...]:
    return tuple(LayerNumbers(f"layer{k}.bn", "bn", "", 8, dict(numbers)) for k in range(count))


def full() -> Diagnosis:
    """Everything that a page can show."""
    numbers = dict.fromkeys(MEASURES, 0.2) | {"esm_mean": 1.0, "esm_std": 2.0}
    return Diagnosis(
        "Net",
        (finding(missing="Give train_loader=."),),
        (Undecided("Whether it is old.", "train_loader="),),
        layers(5, **numbers),
        {"layer0.bn": [[1.0, -0.5], [-0.5, 1.0]], "layer3.bn": [[1.0, 0.9], [0.9, 1.0]]},
        gap({"layer0.bn": 0.8, "layer1.bn": 0.2}),
        {"samples": 8, "batches": 2, "kinds": {"bn": 5}, "loss_eval": 2.0, "loss_batch": 1.0},
    )


# ---------------------------------------------------------------- the page


def test_the_page_has_all_parts() -> None:
    text = read(page(full())).text
    for part in (
        "Diagnosis of Net",
        "1 serious",
        "Running statistics do not fit the training data",
        "nk.calibrate(model, loader)",
        "Give train_loader=.",
        "Not decided",
        "Estimation shift over depth",
        "Where the gap enters",
        "Feature condensation",
        "All norms, measure by measure",
    ):
        assert part in text
    for measure in MEASURES.values():
        assert measure.title in text


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    text = page(full())
    reader = read(text)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(reader.tags)
    names = {name for _, name, _ in reader.attributes}
    assert not {"src", "href", "srcset", "action"} & names
    assert not [name for name in names if name.startswith("on")]
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?:", text)


def test_it_needs_neither_plotly_nor_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    text = page(full())
    assert any("script-src 'none'" in value for _, _, value in read(text).attributes)
    assert len(text) < 100_000


def test_whatever_a_user_gives_is_escaped() -> None:
    evil = KINDS["stale-statistics"].finding(
        "serious", [EVIL, "b"], EVIL, remedy=EVIL, missing=EVIL, word=EVIL, **{EVIL: 1.0}
    )
    numbers = {**dict.fromkeys(MEASURES, 0.5), "esm_mean": 1.0, "esm_std": math.inf, EVIL: 1.0}
    found = Diagnosis(
        EVIL,
        (evil,),
        (Undecided(EVIL, EVIL),),
        (LayerNumbers(EVIL, EVIL, EVIL, 8, numbers),),
        {EVIL: [[1.0]]},
        gap({EVIL: 1.0}),
        {"kinds": {EVIL: 1}, "torch": EVIL, "samples": 1, "batches": 1},
    )
    text = page(found)
    reader = read(text)
    assert "script" not in reader.tags
    assert "img" not in reader.tags
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    assert "<script" not in text
    assert EVIL in reader.text  # it is there, as text


def test_names_of_modules_reach_the_page_escaped() -> None:
    model = nn.Sequential()
    model.add_module("<b>bold</b>", nn.BatchNorm1d(4))
    found = diagnose(model, [torch.randn(16, 4)])
    text = found.to_html()
    assert "<b>" not in text
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert json.loads(found.to_json())["layers"][0]["path"] == "<b>bold</b>"


def test_light_dark_paper_and_phones() -> None:
    text = page(full())
    assert 'content="width=device-width, initial-scale=1"' in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_charts_scale_with_the_page() -> None:
    for tag, name, value in read(page(full())).attributes:
        if tag == "svg" and name in ("width", "height"):
            pytest.fail(f"a chart has a fixed {name} of {value}")


def test_a_page_without_anything_to_show() -> None:
    text = read(page(Diagnosis("Net", ()))).text
    assert "Nothing was found." in text
    assert "no alarm" in text
    assert "Estimation shift over depth" not in text


def test_many_layers() -> None:
    found = Diagnosis("Net", (), (), layers(300, error=0.5, error_in_eval=2.0, dead=0.1))
    text = page(found)
    assert read(text).text.count("layer299.bn") >= 3
    assert len(text) < 1_000_000


def test_files_are_written(tmp_path: Path) -> None:
    found = full()
    assert (tmp_path / "a.html", found.to_html(tmp_path / "a.html"))[0].read_text("utf-8") == page(
        found
    )
    found.to_json(str(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == found.to_dict()


# ---------------------------------------------------------------- JSON


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_json_is_strict() -> None:
    numbers = {"error": math.nan, "dead": math.inf}
    found = Diagnosis(
        "Net", (finding(share=math.nan),), (), layers(1, **numbers), {}, gap({"a": 1.0}, math.inf)
    )
    read_back = json.loads(found.to_json(), parse_constant=refuse)
    assert read_back["findings"][0]["numbers"]["share"] is None
    assert read_back["layers"][0]["numbers"] == {"error": None, "dead": None}
    assert read_back["gap"]["eval_loss"] is None


def test_json_has_everything() -> None:
    read_back = json.loads(full().to_json())
    assert read_back["healthy"] is False
    assert read_back["worst"] == "serious"
    (found,) = read_back["findings"]
    wanted = {"kind", "severity", "path", "paths", "said", "numbers", "why", "paper", "remedy"}
    assert wanted <= set(found)
    assert found["paths"] == ["a", "b"]
    assert len(read_back["layers"]) == 5
    assert read_back["gap"]["shares"] == {"layer0.bn": 0.8, "layer1.bn": 0.2}
    assert read_back["undecided"][0]["give"] == "train_loader="


def test_a_real_diagnosis_survives_both_forms() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))
    model[1].running_var[0] = math.nan
    found = diagnose(model, [torch.randn(8, 1, 6, 6)])
    read(found.to_html())
    assert json.loads(found.to_json(), parse_constant=refuse)["worst"] == "serious"


def test_an_error_that_one_batch_cannot_show_is_not_said() -> None:
    gap = GapAttribution(Losses((1.0,), (8,)), Losses((3.0,), (8,)), {"1": 1.0}, {"1": 2.0}, "swap")
    text = page(Diagnosis("Net", (), (), (), gap=gap))
    assert "a gap of 2." in text
    assert "standard error" not in text
