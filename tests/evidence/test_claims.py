"""The claims: their experiments, what results mean for them, and the page that is made of both."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import random
import re
from pathlib import Path

import pytest

import normkit as nk
from claims_made_up import claim_of, made_up
from normkit.lab.experiment.checks import check_models, different_ground
from normkit.lab.experiment.reading import scales
from normkit.lab.models.build import build
from normkit.lab.models.variant import build_variant
from tools.evidence import __main__ as command
from tools.evidence.__main__ import PAGES
from tools.evidence.claims import ALL, CLAIMS, STAGES, Claim, experiment_of, ordered_runs
from tools.evidence.evidence import Evidence
from tools.evidence.figure import evidence_figure
from tools.evidence.judge import judge, rank_correlation
from tools.evidence.page import evidence_page
from tools.evidence.results import RESULTS, read_results, write_results
from tools.evidence.train import small
from tools.evidence.which import IN_CODE, not_shown_lower, which_page
from tools.evidence.words import POINTS, answer_in_words

ROOT = Path(__file__).parents[2]
FILES = sorted(path.stem for path in CLAIMS.glob("*.toml"))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_committed_results_give(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name](RESULTS), (
        f"docs/{name} differs from the committed results: run make evidence"
    )


def test_all_letters_are_there_and_all_files_are_used() -> None:
    assert {claim.letter for claim in ALL} == set("abcdefghijklmnop")
    assert {claim.file for claim in ALL if claim.file} == set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_an_experiment_can_be_read_and_says_what_it_is(file: str) -> None:
    assert scales(CLAIMS / f"{file}.toml") == ["lab"]
    experiment = experiment_of(file)
    assert experiment.scale == "lab"
    assert len(experiment.seeds) >= 5
    assert experiment.question.endswith("?")
    assert experiment.source.partition("), ")[2]  # a paper and its table
    assert len(experiment.difference) > 20
    assert different_ground(experiment) == []


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: f"{claim.letter}, {claim.text}")
def test_a_claim_names_what_its_experiment_has(claim: Claim) -> None:
    experiment = experiment_of(claim.file)
    names = {variant.name for variant in experiment.variants}
    assert {*claim.expected, claim.baseline or experiment.baseline} <= names
    there = {variant.cell for variant in experiment.variants}
    for key, value in claim.cell.items():
        values = value if isinstance(value, tuple) else (value,)
        assert {*values} <= {dict(cell).get(key) for cell in there}
    if claim.over[0] not in ("", "variant"):
        assert claim.over[0] in {key for cell in there for key, _ in cell}


def test_models_of_the_claims_can_be_made() -> None:
    check_models(experiment_of("l-weight-norms"))  # the others take as long: seconds each


def test_headlines_are_trained_first_and_nothing_twice() -> None:
    runs = ordered_runs()
    assert len({run.id for run in runs}) == len(runs)
    first = {run.id for run in experiment_of(STAGES[0].file).runs()}
    assert {run.id for run in runs[: len(first)]} == first
    seeds = [len(experiment_of(stage.file).seeds[: stage.seeds]) for stage in STAGES[:3]]
    assert ("".join(stage.file[0] for stage in STAGES[:3]), seeds) == ("agl", [15, 15, 15])
    every = {run.id for file in FILES for run in experiment_of(file).runs()}
    assert {run.id for run in runs} == every
    assert small(runs[0]).id != runs[0].id


# ------------------------------------------------------------------ made-up results


@pytest.mark.parametrize(
    ("gain", "answer"),
    [(0.02, "holds"), (-0.02, "contradicted"), (0.0, "does not hold")],
)
def test_what_a_difference_means(gain: float, answer: str) -> None:
    rows = judge(claim_of("UBN beats BN at the end"), made_up("g-ubn", {"ubn": gain}, seeds=15))
    assert [row.answer for row in rows] == [answer, answer]
    assert all(row.pairs == 15 for row in rows)


def test_equal_is_what_equal_means() -> None:
    claim = claim_of("a batch norm before the network equals offline statistics")
    rows = judge(claim, made_up("d-input-norm", {"fixed": -0.03}))
    assert {(row.variant, row.answer) for row in rows} == {
        ("offline", "holds"),
        ("fixed", "does not hold"),
    }


def test_another_baseline_than_the_experiments() -> None:
    results = made_up("l-ws-bcn", {"gn": -0.1, "gn + ws": -0.05}, seeds=15)
    [first, _] = judge(claim_of("WS helps GN"), results)
    assert (first.baseline, first.variant, first.answer) == ("gn", "gn + ws", "holds")
    assert first.difference == pytest.approx(0.05, abs=0.002)


def test_a_lost_run_is_told() -> None:
    rows = judge(claim_of("BCN + WS beats BN"), made_up("l-ws-bcn", {}, collapsed="bcn + ws"))
    assert {(row.answer, row.lost) for row in rows} == {("unstable", 1)}


@pytest.mark.parametrize(
    ("gain", "answer"), [(0.03, "does not hold"), (-0.03, "does not hold"), (0.0, "holds")]
)
def test_a_slight_difference_is_judged_by_its_size(gain: float, answer: str) -> None:
    """A1 and A2 were called contradicted: the paper has them 0.1 points above its own form."""
    claim = claim_of(
        "at a learning rate of 0.1 A1 and A2 differ only slightly from the standard form"
    )
    rows = judge(claim, made_up("e-forms-of-the-scale", {"a1": gain}))
    assert {dict(row.cell)["train.lr"] for row in rows} == {0.1}
    assert {row.answer for row in rows if row.variant == "a1"} == {answer}
    assert {row.answer for row in rows if row.variant == "a2"} == {"holds"}


def test_a_difference_that_may_be_slight_or_not_shows_neither() -> None:
    claim = claim_of(
        "at a learning rate of 0.1 A1 and A2 differ only slightly from the standard form"
    )
    rows = judge(claim, made_up("e-forms-of-the-scale", {"a1": 0.006}))
    [row, _] = [row for row in rows if row.variant == "a1"]
    assert (row.verdict, row.answer, row.said) == (
        "better", "not shown", "better, not shown whether slightly",
    )  # fmt: skip


def test_a_claim_over_values_says_how_many_were_run() -> None:
    """ "at every batch size" was said to hold from runs at 128 alone."""
    claim = claim_of("UBN beats BN at every batch size")
    rows = judge(claim, made_up("g-ubn", {"ubn": 0.02}, seeds=15))  # the same runs
    assert answer_in_words(claim, rows) == "holds (1 of 3 batch sizes run)"
    assert answer_in_words(claim, rows, whole=False) == "holds"
    assert {row.pairs for row in rows} == {0, 15}  # all seeds that there are, not this file's five
    [first, _] = judge(claim_of("UBN beats BN at the end"), made_up("g-ubn", {"ubn": 0.02}))
    every = judge(claim, made_up("g-batch-sizes", {"ubn": 0.02}))
    assert answer_in_words(claim, every) == first.answer == "holds"


def test_what_grows_with_depth_and_which_layers_are_compared() -> None:
    """BN's first layer counted against a network that has no batch norm there."""
    experiment = experiment_of("i-estimation-shift")
    results = made_up("i-estimation-shift", {})
    for variant in experiment.variants:
        shifts = [9.0, 1.0, 2.0, 3.0, 4.0] if variant.name == "bn" else [None, 0.5, None, 1.0, None]
        for run in variant.runs(experiment.seeds[:5]):
            noise = run.seed / 1000
            own = [v if v is None else v + noise * v for v in shifts]
            last = dataclasses.replace(results[run.id].epochs[-1], measures={"esm_std": own})
            results[run.id] = dataclasses.replace(results[run.id], epochs=(last,))
    small = judge(
        claim_of(
            "a group norm in every other layer keeps the estimation shift of the others small"
        ),
        results,
    )
    assert [row.answer for row in small] == ["holds"] * 3
    assert small[0].baseline_mean == pytest.approx(2.0, rel=0.01)  # of the second and the fourth
    trend = judge(claim_of("the estimation shift of BN's deviations grows with depth"), results)
    assert [row.mean for row in trend] == [pytest.approx(0.0)] * 3  # 9 first, then 1 to 4
    assert rank_correlation([1.0, 2.0, 5.0]) == pytest.approx(1.0)
    assert rank_correlation([3.0, 1.0, 1.0]) == pytest.approx(-(3**0.5) / 2)


def test_accuracy_left_is_judged_beside_accuracy_lost(tmp_path: Path) -> None:
    """A network that starts 15 points lower loses less and has less left: that is no gain."""
    experiment = experiment_of("k-disturbed-statistics")
    results = made_up("k-disturbed-statistics", {})
    for variant in experiment.variants:
        ends = {"bn": (0.8, 0.7), "xbn, gn": (0.78, 0.75)}.get(variant.name, (0.65, 0.64))
        for run in variant.runs(experiment.seeds[:5]):
            noise = random.Random(f"{variant.name} {run.seed}").uniform(0, 0.004)
            measures = {"disturbance": [ends[0], ends[1] + noise]}
            last = dataclasses.replace(results[run.id].epochs[-1], measures=measures)
            results[run.id] = dataclasses.replace(results[run.id], epochs=(last,))
    write_results(experiment, results, tmp_path)
    [line] = [
        line
        for line in evidence_page(tmp_path).splitlines()
        if "| with a batch-free norm in" in line
    ]
    assert line.endswith("**holds**; accuracy left: higher in 2 of 4; lower in 2 of 4 |")


def test_training_that_fails_is_worse() -> None:
    claim = claim_of("channels of spread 4 cost accuracy too, or training fails")
    [row, _] = judge(claim, made_up("o-singularities", {}, collapsed="shifted"))
    assert (row.verdict, row.lost, row.answer) == ("unstable", 1, "holds")
    [row, _] = judge(claim, made_up("o-singularities", {}, collapsed="bn"))
    assert (row.verdict, row.baseline_lost, row.answer) == ("unstable", 1, "unstable")


def test_a_measure_of_runs_that_were_all_lost_is_not_called_not_run() -> None:
    claim = claim_of("WS keeps the channels of a group alike (StatDiff)")
    rows = judge(claim, made_up("l-ws-bcn", {}, seeds=1, collapsed="gn + ws"))
    assert {row.answer for row in rows} == {"unstable"}


def test_measures_are_compared_like_scores() -> None:
    claim = claim_of("WS keeps the channels of a group alike (StatDiff)")
    rows = judge(claim, made_up("l-ws-bcn", {"gn + ws": 0.1}))
    assert [row.answer for row in rows] == ["holds", "holds"]
    assert rows[0].baseline_mean == pytest.approx(0.2, abs=0.002)


def test_the_page_says_what_held_and_how_training_went_where_a_claim_is_contradicted(
    tmp_path: Path,
) -> None:
    experiment = experiment_of("a-small-start-scale")
    results = made_up("a-small-start-scale", {"γ 0.1, c 100": -0.05})
    for run, result in results.items():
        last = dataclasses.replace(result.epochs[-1], train_loss=0.25)
        results[run] = dataclasses.replace(result, epochs=(*result.epochs[:-1], last))
    write_results(experiment, results, tmp_path)
    text = evidence_page(tmp_path)
    short = text[: text.index("## (a) ")]
    assert re.search(
        r"narrow ResNet-20 γ .* \| 5 \| -[45].*, -[45].* \| \*\*contradicted\*\* \|", short
    )
    assert re.search(r"\| contradicted \| 0.250 to 0.250; 0.250 to 0.250 \|\n", text)
    assert re.search(r"\| slow .* \|  \|  \| \*\*not run\*\* \|", short)
    assert "- **Contradicted here** (1)\n  - [(a)](#a) in a narrow ResNet-20" in short
    assert "γ 0.1, c 1 against γ 1" not in text  # no table for a claim without a pair


def test_a_verdict_needs_a_pair(tmp_path: Path) -> None:
    """Group norms are run once for all workers; "not shown" stood where no bn was run."""
    results = made_up("m-worker-batch", {"gn": 0.05})
    experiment = experiment_of("m-worker-batch")
    for variant in experiment.variants:
        if variant.name == "bn":
            for run in variant.runs(experiment.seeds):
                results.pop(run.id, None)
    write_results(experiment, results, tmp_path)
    assert re.search(r"\| gn \|( 85.\d\d ± 0.\d\d \|){4}", which_page(tmp_path))


def test_why_tells_lost_runs_and_a_measure_by_epoch(tmp_path: Path) -> None:
    results = made_up("g-ubn", {"ubn": -0.05}, collapsed="ubn")
    write_results(experiment_of("g-ubn"), results, tmp_path)
    text = evidence_page(tmp_path)
    assert "Lost: ubn, no warm-up, seed 1: " in text
    assert re.search(r"By epoch, .*, no warm-up: ubn (0.\d{3}, ){4}0.\d{3}; bn 0.10", text)


@pytest.mark.parametrize(
    ("name", "file", "variant"),
    [
        ("bn + ws", "l-ws-bcn", "bn + ws"),
        ("gn + ws", "m-worker-batch", "gn + ws"),
        ("bcn + ws", "l-ws-bcn", "bcn + ws"),
        ("ubn", "g-ubn", "ubn"),
        ("bnet", "g-rectifications", "bn + affine"),
    ],
)
def test_code_that_the_page_shows_builds_what_was_measured(
    name: str, file: str, variant: str
) -> None:
    """GN and BCN of the last stage had 32 groups instead of 16, kernels of UBN another start."""
    setting = next(v for v in experiment_of(file).variants if v.name == variant).setting
    there = build_variant(setting, 10, (3, 32, 32), seed=1)
    model = build(setting.model, 10, (3, 32, 32))
    for line in IN_CODE[name][0].split("; then "):  # a loop takes in what follows on its line
        exec(line, {"nk": nk, "model": model, "widths": (16, 32, 64)})
    shapes = [{k: v.shape for k, v in each.state_dict().items()} for each in (there, model)]
    assert shapes[0] == shapes[1]
    groups = [[getattr(m, "groups", 0) for m in each.modules()] for each in (there, model)]
    assert groups[0] == groups[1]
    kernels = [
        float(each.get_parameter("layer3.2.bn2.weight").data.std()) for each in (there, model)
    ]
    assert kernels[0] == pytest.approx(kernels[1], rel=0.3)  # one start, other draws


def test_code_that_the_page_shows_names_what_is_there() -> None:
    code = " ".join(code for code, *_ in IN_CODE.values())
    for path in re.findall(r"nk\.([\w.]+)\(", code):
        assert operator.attrgetter(path)(nk), path


def test_a_norm_that_may_be_as_good_as_the_best_is_named_beside_it() -> None:
    """bn stood second at 128 images: ubn and bn + ws, which were better, were left out."""
    seeds = range(6)
    found = {
        "a": {s: 0.80 + s / 1000 for s in seeds},
        "b": {s: 0.80 + (s % 2) / 100 - 0.005 for s in seeds},
        "c": {s: 0.70 + (s % 2) / 100 for s in seeds},
        "d": {99: 0.9},
    }
    assert not_shown_lower(found, "a", 0.005) == ["d", "b"]  # d has no pair


def test_means_of_other_seeds_have_the_paired_difference_beside_them() -> None:
    """Of bcn + ws 15 seeds stood beside 5 of bnet, which is higher on those five."""
    short = which_page().partition("## By the number")[0]
    assert "| bcn + ws 80.8 (n 15) | bnet 80.4 (+0.10, n 5); ubn 80.3 (-0.48, n 15); " in short
    assert "| bn + ws 79.5 (-1.26, n 15) | bn 78.5 (-2.30, n 15) |" in short
    assert "*not shown* is not *equal*" in short


def test_lost_runs_and_what_was_timed_without_ws_are_told() -> None:
    """ "+2.37, unstable, n 2" hid that three of five were lost."""
    text = which_page()
    assert "+2.37, unstable, 3 lost of bcn + ws, n 2 |" in text
    assert ", unstable, 5 lost of bcn + ws, micro, n 0 |" in text
    rows = [line for line in text.splitlines() if "nk.standardize(model)" in line]
    assert len(rows) == 4
    for row in rows:
        assert row.endswith("without ws |") or row.endswith("| – | – | – |")
    assert any(row.startswith("| gn + ws |") and "without ws" in row for row in rows)


def test_runs_that_a_large_network_lost_are_told_beside_the_best(tmp_path: Path) -> None:
    for file in ("m-worker-batch", "l-resnet18"):
        results = made_up(file, {"gn": 0.05}, collapsed="bcn + ws" if file == "l-resnet18" else "")
        write_results(experiment_of(file), results, tmp_path)
    short = which_page(tmp_path).partition("## By the number")[0]
    assert "of bcn + ws 1 of 5 without warm-up, 1 of 5 with an epoch of it." in short
    assert short.count("| 2 | gn 8") == 2  # with warm-up and without
    assert "in a ResNet-18 with warm-up" in short
    assert "BCN + WS beats BN in a ResNet-18: Without" in which_page(tmp_path)


def test_claims_without_results_are_not_run() -> None:
    assert judge(claim_of("WS helps GN"), {}) == []


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    experiment, results = experiment_of("g-ubn"), made_up("g-ubn", {"ubn": 0.01}, seeds=2)
    assert write_results(experiment, {}, tmp_path) is None
    write_results(experiment, results, tmp_path)
    plain = json.loads((tmp_path / "g-ubn.json").read_text(encoding="utf-8"))["runs"]
    told = [(run["of"][0]["variant"], run["of"][0]["train.warmup"], run["seed"]) for run in plain]
    assert told == [(v, w, seed) for seed in (1, 2) for w in (0, 1) for v in ("bn", "ubn")]
    again = read_results(experiment, tmp_path)
    assert again.keys() == results.keys()
    for run, result in results.items():
        assert again[run].score("accuracy") == pytest.approx(result.score("accuracy"), abs=1e-6)
        assert again[run].collapse() == result.collapse()
    write_results(
        experiment_of("m-worker-batch"), made_up("m-worker-batch", {"gn": 0.05}), tmp_path
    )
    which = which_page(tmp_path)
    assert re.search(r"\| gn \|( 85.\d\d ± 0.\d\d, better \|){4}", which)
    assert re.search(
        r"\| 2 \| gn 8[45].\d \(n 5\) \| – \| .* \| bn (79|80).\d \(-[45].\d\d, n 5\) \|\n", which
    )
    text = evidence_page(tmp_path)
    assert "| [g](#g) | UBN beats BN at the end | UBN, table 4 and figure 1 | 2 |" in text
    assert "Not run." in text
    assert "UBN beats BN at the end †" in text  # two of its seeds


def test_reports_leave_the_pages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--reports FOLDER wrote docs/ too, and always reports of all experiments."""
    asked: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(command, "write_reports", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(command, "write_text", lambda *_: pytest.fail("a page was written"))
    command.main(["--reports", str(tmp_path), "g-ubn"])
    assert asked == [(tmp_path, ["g-ubn"])]
    with pytest.raises(SystemExit):
        command.main(["--reports", str(tmp_path), "g-unb"])
    assert "no experiment g-unb; there are a-longer" in capsys.readouterr().err


def test_a_report_says_that_its_title_is_a_claim_and_which_experiments_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Titles are the papers' words: "GN and BGN hold" stood above their contradiction."""
    evidence = Evidence(tmp_path)
    evidence.results["g-ubn"] = made_up("g-ubn", {})
    monkeypatch.setattr(command, "Evidence", lambda: evidence)
    command.write_reports(tmp_path, ["g-ubn", "m-worker-batch"])
    assert "<h1>Claim: UBN beats BN" in (tmp_path / "g-ubn.html").read_text(encoding="utf-8")
    assert "m-worker-batch was not run: no page." in capsys.readouterr().out


def test_the_picture_has_a_line_for_each_interval(tmp_path: Path) -> None:
    """Of no results none; beyond the scale a number says how far."""
    empty, whole = evidence_figure(tmp_path), evidence_figure()
    assert "against" not in empty
    points = [claim for claim in ALL if not claim.measure or claim.measure in POINTS]
    rows = [
        row
        for claim, rows in zip(ALL, Evidence().rows, strict=True)
        for row in rows
        if claim in points and row.pairs and math.isfinite(row.low) and math.isfinite(row.high)
    ]
    assert whole.count("against") == len(rows) > 0
    most = max(rows, key=lambda row: abs(row.difference))
    assert f">{100 * most.difference:+.1f}  (n {most.pairs})<" in whole
    labels = re.findall(r">([^<]* against [^<]*)<", whole)
    assert len({*labels}) == len(labels)  # of damaged images, adapted or not, they were the same
