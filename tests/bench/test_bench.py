"""The benchmark's command, its counting and its writers. Nothing here asserts on time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normkit
from benchmarks import layers, report, step_cost, straightforward
from benchmarks.__main__ import COMPILED_BY_DEFAULT, main, parse
from benchmarks.layers import BASELINE, BenchmarkRun, LayerRow, LayerTable, StepCost
from normkit import timing
from normkit.timing import InputSpec

ROOT = Path(__file__).parents[2]
TINY = ["--shape", "4x8x4x4", "--repeats", "1", "--format", "contiguous"]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
    )


@pytest.fixture(autouse=True)
def _malloc_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # the command tunes malloc for its own process; this one is the test run's
    monkeypatch.setattr(timing, "keep_memory", lambda: False)


def test_command_measures_and_writes(tmp_path: Path) -> None:
    to_json, to_markdown = tmp_path / "bench.json", tmp_path / "bench.md"
    ran = command(
        *("--layers", "bn,pn", "--shape", "4x8x4x4", "6x8x4x4", "--no-compile", "--repeats", "1"),
        *("--threads", "1", "--json", str(to_json), "--markdown", str(to_markdown)),
    )
    assert ran.returncode == 0, ran.stderr
    first, *_, last = ran.stdout.strip().splitlines()
    assert f"torch {torch.__version__}" in first
    assert "threads 1" in first
    assert re.match(r"[01] of 1 family layers are within 1.5x of nn.BatchNorm2d", last)
    assert "[16/16, " in ran.stderr  # 2 layers, checked and measured, on 2 shapes in 2 formats

    written = json.loads(to_json.read_text(encoding="utf-8"))
    assert written["environment"]["threads"] == 1
    assert written["summary"] == last
    results = written["results"]
    contestants = ["normkit", "nn.BatchNorm2d", "nn.GroupNorm(8)", "straightforward"]
    assert [r["contestant"] for r in results] == contestants * 8
    assert {r["format"] for r in results} == {"contiguous", "channels_last"}
    assert {tuple(r["shape"]) for r in results} == {(4, 8, 4, 4), (6, 8, 4, 4)}
    assert {(r["layer"], r["family"]) for r in results} == {("bn", True), ("pn", False)}
    for result in results:
        assert result["seconds"] > 0
        assert result["dtype"] == "float32"
        if result["contestant"] == BASELINE:
            assert result["times_batch_norm"] == 1
        gpu_only = ("replay_seconds", "peak_bytes", "kernels", "floor_seconds")
        assert [result[field] for field in gpu_only] == [None] * 4
    table = to_markdown.read_text(encoding="utf-8")
    assert table.count("| bn | ") == 9  # at a glance; time and memory, for each spec
    assert "python -m benchmarks --layers bn,pn --shape 4x8x4x4 6x8x4x4" in table
    glance = next(line for line in table.splitlines() if line.startswith("| bn | "))
    bn = [r for r in results if r["layer"] == "bn" and r["contestant"] == "normkit"]
    shown = [float(cell) for cell in glance.strip("| ").split(" | ")[1:]]
    assert shown == pytest.approx([r["times_batch_norm"] for r in bn], abs=0.005)
    assert "4x8x4x4 · channels_last · float32" in table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "bnn"], "unknown layer 'bnn'. Did you mean 'bn'?"),
        (["--layers", ","], "no layer named"),
        (["--layers", "ws"], "unknown layer 'ws'"),
        (["--compile", "ubm"], "unknown layer 'ubm'. Did you mean 'ubn'?"),
        (["--shape", "64x64"], "expected four positive sizes NxCxHxW, got '64x64'"),
        (["--shape", "4x8x4x0"], "expected four positive sizes"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--format", "rows"], "invalid choice: 'rows'"),
        (["--repeats", "0"], "expected a positive whole number, got '0'"),
        (["--threads", "two"], "expected a positive whole number, got 'two'"),
        (["--json", "nowhere/at/all.json"], "there is no directory nowhere"),
    ],
)
def test_bad_arguments_are_explained(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_gpu_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["--device", "cuda"])
    assert stop.value.code == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_which_layers_are_compiled() -> None:
    assert parse([]).compile == set(COMPILED_BY_DEFAULT)
    assert set(COMPILED_BY_DEFAULT) <= set(parse([]).layers)
    assert parse(["--layers", "sn,pn"]).compile == {"sn", "pn"}
    assert parse(["--layers", "sn,pn", "--compile", "family"]).compile == {"sn"}
    assert parse(["--compile", "sn"]).compile == {"sn"}
    assert parse(["--no-compile"]).compile == set()
    assert parse(["--compile", "all"]).compile == set(normkit.names("activation"))


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert said.count("python -m benchmarks ") >= 4
    assert all(name in said for name in COMPILED_BY_DEFAULT)


def test_disagreement_stops_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = lambda s, x: 1.001 * x  # noqa: E731
    monkeypatch.setitem(straightforward.FORMULAS, "bn", wrong)
    assert main([*TINY, "--layers", "gn,bn", "--no-compile"]) == 1
    said = capsys.readouterr().out
    assert "bn on 4x8x4x4 · contiguous · float32: relative difference of y" in said
    assert "gn on" not in said
    assert "family layers" not in said


def test_a_layer_that_refuses_the_shape_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shape", "4x6x4x4", "--repeats", "1", "--format", "contiguous"]
    assert main([*shape, "--layers", "dn,bn", "--no-compile"]) == 0
    said = capsys.readouterr().out
    assert "dn: not measured. DN expects channels" in said
    assert "of 1 family layers" in said


def test_without_a_compiler_the_reason_is_said_once(tmp_path: Path) -> None:
    ran = command(
        *TINY,
        *("--layers", "bn,gn"),
        CXX=str(tmp_path / "no-such-compiler"),
        TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Not compiled, no working C++ compiler") == 1
    assert "straightforward, compiled" not in ran.stdout


class Kept(nn.Module):
    """exp keeps its result, a product both factors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        return y * y * self.weight


def test_saved_bytes_count_each_storage_once() -> None:
    x = torch.randn(4, 8, 4, 4, requires_grad=True)
    assert step_cost.saved_bytes(nn.Identity(), x) == 0
    assert step_cost.saved_bytes(Kept(), x) == 2 * x.nbytes  # y and y², not the weight
    assert step_cost.saved_bytes(nn.BatchNorm2d(8), x) == x.nbytes + 2 * 8 * 4  # x, mean, 1/std


def test_counting_saved_bytes_leaves_no_graph_behind() -> None:
    # it once did, and the nodes left on another stream broke the capture of CUDA graphs
    x = torch.randn(4, 8, 4, 4, requires_grad=True)
    step_cost.saved_bytes(Kept(), x)
    node = torch.autograd.graph.get_gradient_edge(x).node
    node.metadata["seen"] = True
    del node  # now only a graph could keep it
    assert "seen" not in torch.autograd.graph.get_gradient_edge(x).node.metadata


def test_contestants_take_turns() -> None:
    seen: list[str] = []
    steps = [lambda: seen.append("a"), lambda: seen.append("b")]
    times = timing.seconds(steps, repeats=3, device=torch.device("cpu"))
    assert len(times) == 2
    assert re.fullmatch("a+b+a+b+(a+b+){3}", "".join(seen))


def test_a_step_reaches_the_input_and_every_trained_parameter() -> None:
    spec = InputSpec((4, 8, 4, 4), "channels_last", torch.float32, torch.device("cpu"))
    row = layers.measure("input_norm", spec, 1, None)  # its bias is not trained
    assert set(row.cells) == {"normkit", BASELINE, "nn.GroupNorm(8)", "straightforward"}
    layer = layers.make("input_norm", spec)
    x, dy = torch.randn(2, 4, 8, 4, 4).requires_grad_().unbind()
    y, dx, dweight = timing.training_step(layer, x, dy)()
    assert (y.shape, dx.shape, dweight.shape) == (x.shape, x.shape, (8,))


def test_summary_names_the_layers_above_the_limit() -> None:
    spec = InputSpec((4, 8, 4, 4), "contiguous", torch.float32, torch.device("cpu"))
    cells = {
        name: {"normkit": StepCost(taken, 1.0), BASELINE: StepCost(1.0, 1.0)}
        for name, taken in (("quick", 1.4), ("slow", 1.6), ("outside", 9.0))
    }
    rows = [
        LayerRow("quick", True, cells["quick"]),
        LayerRow("slow", True, cells["slow"]),
        LayerRow("outside", False, cells["outside"]),
        LayerRow("refused", True, note="not measured"),
    ]
    run = BenchmarkRun({"torch": "2"}, [LayerTable(spec, rows)])
    assert run.summary() == (
        "1 of 2 family layers are within 1.5x of nn.BatchNorm2d in every setting. "
        "Above: slow 1.60x."
    )
    said = report.text(run.tables[0])
    assert re.search(r"slow +1600\.000  1\.60x +1000\.000  1\.00x", said)
    assert "outside*" in said
    assert "refused: not measured" in said
