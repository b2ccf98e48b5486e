"""Exported files: complete, typed, and escaped for what reads them."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from lab.report import sample
from normkit.errors import OptionError, UnknownName
from normkit.lab.experiment import Experiment
from normkit.lab.export import latex, write
from normkit.lab.export.columns import fitting
from normkit.lab.export.latex import escape_latex, latex_label
from normkit.lab.statistics import compare

MADE = sample.experiment()
FOUND = sample.results(MADE, diverged=[("bn", 3)], left_out=[("ubn", 5)])
COMPARED = sample.comparisons(MADE, FOUND)
ODD = 'a, "b"\n; =1+1\r{}\\%_γ'


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))


def test_csv_has_a_row_for_each_run(tmp_path: Path) -> None:
    rows = read_csv(write(MADE, FOUND, COMPARED, tmp_path / "runs.csv"))
    assert len(rows) == 2 * 5 * 5
    assert len({(r["variant"], r["train.worker_batch"], r["seed"]) for r in rows}) == 50
    states = [row["status"] for row in rows]
    assert {state: states.count(state) for state in states} == {
        "done": 46,
        "diverged": 2,
        "not run": 2,
    }
    row = next(
        r for r in rows if (r["variant"], r["train.worker_batch"], r["seed"]) == ("gn", "2", "4")
    )
    result = FOUND[row["run"]]
    assert float(row["score"]) == result.score("accuracy")  # not rounded
    assert json.loads(row["selected"]) == [12]
    assert float(row["test_top5_accuracy"]) == (1 + float(row["test_accuracy"])) / 2
    assert json.loads(row["steps"]) == [{"kind": "norm", "name": "gn", "options": {"groups": 8}}]
    assert row["environment.torch"] == "2.15.0"
    assert row["baseline"] == "false"


def test_what_is_not_known_is_empty(tmp_path: Path) -> None:
    rows = read_csv(write(MADE, FOUND, COMPARED, tmp_path / "runs.csv"))
    for row in rows:
        assert (row["score"] == "") == (row["status"] != "done")


def test_what_runs_have_found_is_a_column(tmp_path: Path) -> None:
    first = next(iter(FOUND))
    found = {**FOUND, first: replace(FOUND[first], texts={"cells": ODD})}
    rows = read_csv(write(MADE, found, COMPARED, tmp_path / "runs.csv"))
    assert {row["texts.cells"] for row in rows if row["run"] == first} == {ODD}
    assert {row["texts.cells"] for row in rows if row["run"] != first} == {""}


def test_csv_has_a_row_for_each_epoch(tmp_path: Path) -> None:
    rows = read_csv(write(MADE, FOUND, COMPARED, tmp_path / "epochs.csv", per="epoch"))
    assert len(rows) == sum(len(result.epochs) for result in FOUND.values())
    last = [row for row in rows if row["selected"] == "true"]
    assert len(last) == 46
    assert {row["epoch"] for row in last} == {"12"}
    assert len(json.loads(rows[0]["measures.esm_std"])) == 9
    assert float(rows[0]["measures.condensation"]) == pytest.approx(0.7)


@pytest.mark.parametrize("name", [ODD, "a\rb", "a\nb", '"', " padded ", "'"])
def test_any_name_comes_back_from_csv(tmp_path: Path, name: str) -> None:
    made = sample.experiment(("bn", name))
    found = sample.results(made)
    rows = read_csv(write(made, found, [], tmp_path / "odd.csv"))
    assert {row["variant"] for row in rows} == {"bn", name}
    assert len(rows) == 20


def test_parquet_is_typed_and_equal_to_csv(tmp_path: Path) -> None:
    table = parquet.read_table(write(MADE, FOUND, COMPARED, tmp_path / "runs.parquet"))
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds["seed"] == kinds["train.worker_batch"] == kinds["parameters"] == "int64"
    assert kinds["score"] == kinds["seconds"] == "double"
    assert kinds["baseline"] == "bool"
    assert kinds["selected"].startswith("list<")
    rows = read_csv(write(MADE, FOUND, COMPARED, tmp_path / "runs.csv"))
    assert table.column_names == list(rows[0])
    scores = table.column("score").to_pylist()
    assert scores == [float(row["score"]) if row["score"] else None for row in rows]
    about = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert (about["experiment"], about["metric"]) == ("small-batches", "accuracy")


def test_parquet_has_epochs_with_lists(tmp_path: Path) -> None:
    path = write(MADE, FOUND, COMPARED, tmp_path / "epochs.parquet", per="epoch")
    table = parquet.read_table(path)
    assert str(table.schema.field("measures.condensation").type) == "double"
    assert len(table.column("measures.esm_std")[0].as_py()) == 9
    assert table.num_rows == sum(len(result.epochs) for result in FOUND.values())


@pytest.mark.parametrize("per", ["run", "epoch"])
def test_without_results_files_have_their_columns(tmp_path: Path, per: str) -> None:
    table = parquet.read_table(write(MADE, {}, [], tmp_path / "none.parquet", per=per))
    assert {"variant", "seed", "train.worker_batch"} <= set(table.column_names)
    assert table.num_rows == (50 if per == "run" else 0)


def test_columns_are_of_the_narrowest_kind() -> None:
    assert fitting("x", [True, None]).kind == "flag"
    assert fitting("x", [1, None]).kind == "integer"
    assert fitting("x", [1, 2.5]).kind == "number"
    assert fitting("x", [0.5, [1.0, None], None]).values == [[0.5], [1.0, None], None]
    assert fitting("x", [1, True, "a"]).values == ["1", "true", "a"]
    assert fitting("x", [None]).kind == "text"


def test_not_finite_numbers_do_not_break_json(tmp_path: Path) -> None:
    run, result = next(iter(FOUND.items()))
    epochs = [
        replace(e, train_loss=math.inf, measures={"esm": [math.nan, 1.0]}) for e in result.epochs
    ]
    found = {run: replace(result, epochs=tuple(epochs))}
    rows = read_csv(write(MADE, found, [], tmp_path / "epochs.csv", per="epoch"))
    assert json.loads(rows[0]["measures.esm"]) == [None, 1.0]
    assert rows[0]["train_loss"] == "inf"


# LaTeX


def body(text: str) -> list[list[str]]:
    """The cells of the table's rows, between the rules."""
    inner = text.split(r"\toprule")[1].split(r"\bottomrule")[0]
    rows = [line.strip() for line in inner.splitlines() if line.strip().endswith(r"\\")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)&", row[:-2])] for row in rows]


def test_latex_is_as_in_the_papers() -> None:
    text = latex(MADE, FOUND, COMPARED)
    rows = {cells[0]: cells[1:] for cells in body(text)}
    assert len(rows) == 6  # five variants and the heading
    verdicts = {(c.variant, c.cell[0][1]): c.verdict for c in COMPARED}
    for place, batch in enumerate((2, 64)):
        for name in ("bcn", "gn", "ubn", "bgn"):
            bold = r"\mathbf" in rows[name][place]
            assert bold == (verdicts[name, batch] == "better")
    scores = [100 * s for s in by_variant("bcn", 2)]
    shown = f"{statistics.fmean(scores):.2f} \\pm {statistics.stdev(scores):.2f}"
    assert rows["bcn"][0] == f"\\underline{{$\\mathbf{{{shown}}}$}}"
    assert sum(r"\underline" in cells[0] for cells in rows.values()) == 1
    assert rows["bn"][0].endswith(r"$^{\dagger 1}$"), "a seed diverged"


def by_variant(name: str, batch: int) -> list[float]:
    variant = MADE.variant(name, (("train.worker_batch", batch),))
    runs = [FOUND[run.id] for run in variant.runs(MADE.seeds) if run.id in FOUND]
    return [score for run in runs if (score := run.score("accuracy")) is not None]


def test_equal_numbers_are_underlined_alike_and_survivors_are_not() -> None:
    made = sample.experiment(("bn", "a", "b"), {}, seeds=2)
    found = sample.results(made)
    same = {
        run: replace(r, epochs=tuple(replace(e, test_accuracy=0.5) for e in r.epochs))
        for run, r in found.items()
    }
    text = latex(made, same, [])
    assert text.count(r"\underline") == 3
    for run in made.variants[2].runs(made.seeds)[:1]:
        same[run.id] = replace(same[run.id], status="diverged", selected=())
    assert latex(made, same, []).count(r"\underline") == 2


def test_the_best_is_not_one_that_diverged() -> None:
    made = sample.experiment(("bn", "lucky", "steady"), {}, seeds=3)
    final = {"bn": 0.5, "lucky": 0.9, "steady": 0.7}
    found = sample.results(made, final=final, diverged=[("lucky", 2)])
    rows = {cells[0]: cells[1] for cells in body(latex(made, found, []))}
    assert [name for name, text in rows.items() if r"\underline" in text] == ["steady"]


def test_the_rule_of_the_paper_is_not_corrected() -> None:
    compared = [replace(c, verdict="not shown", p_better=0.03) for c in COMPARED]
    assert r"\mathbf" not in latex(MADE, FOUND, compared)
    paper = latex(MADE, FOUND, compared, corrected=False)
    assert paper.count(r"\mathbf") == 8
    assert "not corrected" in paper
    unknown = [replace(c, p_better=math.nan) for c in compared]
    assert r"\mathbf" not in latex(MADE, FOUND, unknown, corrected=False)


def test_lower_error_is_best() -> None:
    made = replace(MADE, metric="error")
    rows = {cells[0]: cells[1:] for cells in body(latex(made, FOUND, []))}
    assert r"\underline" in rows["bcn"][0]


def test_groups_of_rows_for_the_other_axes() -> None:
    made = sample.experiment(
        ("bn", "gn"), {"model.name": ("timm:a_1", "timm:b"), "train.worker_batch": (2, 64, 128)}
    )
    found = sample.results(made)
    text = latex(made, found, [])
    assert r"\multicolumn{4}{l}{\emph{a\_1}}" in text
    assert text.count(r"\midrule") == 2
    assert r"\begin{tabular}{lccc}" in text
    turned = latex(made, found, [], columns="model.name")
    assert r"\begin{tabular}{lcc}" in turned
    with pytest.raises(UnknownName, match=r"train\.worker_batch"):
        latex(made, found, [], columns="train.workerbatch")


def test_missing_and_diverged_cells() -> None:
    made = sample.experiment(("bn", "gn", "ln"), {}, seeds=2)
    found = sample.results(made, diverged=[("gn", 1), ("gn", 2)], left_out=[("ln", 1), ("ln", 2)])
    rows = {cells[0]: cells[1:] for cells in body(latex(made, found, []))}
    assert rows["gn"] == ["diverged"]
    assert rows["ln"] == ["--"]


def balanced(text: str) -> bool:
    depth = 0
    for one in re.sub(r"\\[{}\\$&%#_]", "", text):
        depth += {"{": 1, "}": -1}.get(one, 0)
        assert depth >= 0
    return depth == 0


@pytest.mark.parametrize(
    "name", [ODD, "50% & more_#1 ~^|<>$x$", r"\input{secret}", "γ → ∞ ±", "日本"]
)
def test_names_cannot_break_the_table(name: str) -> None:
    made = sample.experiment(("bn", name), title=name)
    text = latex(made, sample.results(made), [])
    assert balanced(text)
    assert re.sub(r"\\\$", "", text).count("$") % 2 == 0
    assert {len(cells) for cells in body(text)[1:]} == {3}
    assert r"\input" not in text


def test_escapes() -> None:
    assert escape_latex("a_b") == r"a\_b"
    assert escape_latex("\\") == r"\textbackslash{}"
    assert escape_latex("γ < 1") == r"$\gamma$ \textless{} 1"
    assert escape_latex("Ω Α λ") == r"$\Omega$ A $\lambda$"
    assert escape_latex("a---b") == "a-{}-{}-b"
    assert escape_latex("café, naïve, Łódź") == "café, naïve, Łódź"
    assert escape_latex("a\n\tb\x00") == "a b"
    assert escape_latex("日") == "{[}U+65E5{]}"
    assert latex_label("my exp_1/é") == "my-exp-1"


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_comparisons_have_every_number_behind_a_verdict(tmp_path: Path, format: str) -> None:
    path = write(MADE, FOUND, [], tmp_path / f"a.{format}", per="comparison")
    rows = read_csv(path) if format == "csv" else parquet.read_table(path).to_pylist()
    expected = compare(MADE, FOUND)
    assert len(rows) == len(expected) == 8
    for row, each in zip(rows, expected, strict=True):
        assert (row["variant"], row["verdict"]) == (each.variant, each.verdict)
        assert int(row["train.worker_batch"]) == dict(each.cell)["train.worker_batch"]
        for name in ("difference", "low", "high", "p_difference", "p_sign_flip", "effect"):
            assert float(row[name]) == getattr(each, name)
        assert int(row["diverged"]) == each.diverged


def test_a_comparison_without_pairs_has_empty_numbers(tmp_path: Path) -> None:
    path = write(MADE, {}, [], tmp_path / "a.csv", per="comparison")
    row = read_csv(path)[0]
    assert (row["pairs"], row["verdict"], row["p_better"], row["more_seeds"]) == (
        "0", "not shown", "", "",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["[bn]", "*gn", "日"])
def test_a_name_is_no_argument_of_the_line_before(name: str) -> None:
    """LaTeX takes a bracket or a star after \\\\ or \\midrule for its argument, and stops."""
    made = sample.experiment(("bn", name), {"train.worker_batch": (2,)})
    found = sample.results(made)
    rows = [
        line.strip()
        for line in latex(made, found, sample.comparisons(made, found)).splitlines()
        if " & $" in line or r"\underline" in line
    ]
    assert len(rows) == 2
    assert not any(row.startswith(("[", "*")) for row in rows)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex, and there is none")
def test_latex_sets_it(tmp_path: Path) -> None:
    names = ("bn", "[a]", "*b", r"50% & more_#1 ~^|<>$x$ \\input{secret}", "γ → ∞ ± “é”", "日本")
    made = sample.experiment(names, {"train.lr": (0.1, 0.3), "train.worker_batch": (2, 64)})
    found = sample.results(made, diverged=[("[a]", 3)])
    table = latex(made, found, sample.comparisons(made, found))
    assert r"\mathbf" in table
    head = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    text = f"{head}\n{table}\\end{{document}}"
    (tmp_path / "table.tex").write_text(text, encoding="utf-8")
    ran = subprocess.run(
        ["pdflatex", "-draftmode", "-interaction=nonstopmode", "-halt-on-error", "table.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert ran.returncode == 0, ran.stdout[-1500:]


def test_a_caption_that_ends_with_a_question_has_no_other_stop() -> None:
    for title, begin in (("Why?", "Why? Test"), ("Because", "Because. Test"), ("So.", "So. Test")):
        made = replace(MADE, title=title)
        assert rf"\caption{{{begin} accuracy" in latex(made, FOUND, [])


# the call


def test_the_ending_says_the_format(tmp_path: Path) -> None:
    assert write(MADE, FOUND, COMPARED, tmp_path / "a.tex").read_text().startswith("% Made by")
    with pytest.raises(OptionError, match=r"\.csv, \.parquet, \.tex"):
        write(MADE, FOUND, COMPARED, tmp_path / "a.xlsx")
    with pytest.raises(UnknownName, match="parquet"):
        write(MADE, FOUND, COMPARED, tmp_path / "a", "parket")
    with pytest.raises(UnknownName, match="epoch"):
        write(MADE, FOUND, COMPARED, tmp_path / "a.csv", per="epochs")
    with pytest.raises(OptionError, match="csv or parquet"):
        write(MADE, FOUND, COMPARED, tmp_path / "a.tex", per="epoch")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tex"]


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write(MADE, FOUND, COMPARED, tmp_path / "a.parquet")
    before = target.read_bytes()

    def full(table: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        write(MADE, {}, [], target)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_shared_runs_have_a_row_for_each_variant(tmp_path: Path) -> None:
    """Two names for one setting are one run, and two rows."""
    twin = replace(MADE.variants[0], name="twin")
    made = Experiment("e", "t", (MADE.variants[0], twin), (1,), "bn")
    rows = read_csv(write(made, FOUND, [], tmp_path / "a.csv"))
    assert [row["variant"] for row in rows] == ["bn", "twin"]
    assert rows[0]["run"] == rows[1]["run"]


def test_the_caption_says_which_test() -> None:
    """Bold was said to be one-sided, whatever decided it."""
    compared = compare(MADE, FOUND)
    assert "two-sided paired $t$-test, $p \\le 0.05$ after Holm's" in latex(MADE, FOUND, compared)
    paper = latex(MADE, FOUND, compared, corrected=False)
    assert "one-sided paired $t$-test, $p \\le 0.05$, not corrected" in paper
    plain = latex(replace(MADE, multiplicity="none"), FOUND, compared)
    assert "two-sided paired $t$-test, $p \\le 0.05$, not corrected" in plain
