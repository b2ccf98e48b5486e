"""The run of docs/benchmark-gpu.md: parts on a CPU, how it goes on, and the pages made of it."""

from __future__ import annotations

import json
import pickle
import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import compiled, networks, page, parts, preparing
from benchmarks.gpu.networks import Case

CPU = torch.device("cpu")
SHAPE = "128x2048x7x7 channels_last"


def test_a_network_is_measured_beside_torchs_norms(monkeypatch):
    monkeypatch.setattr(networks, "build", _small)
    case = Case("none", 8, 2, ("torch-bn", "bn-fused", "wrong"))
    said = []
    base, fused, wrong = networks.measure(case, CPU, 1, said.append)
    assert base["ratio"] > 0
    assert fused["ratio"] > 0
    assert base["uncertainty"] is None  # of a single turn
    assert wrong == {"variant": "wrong", "error": "ValueError: no such norm"}
    assert said == ["none, wrong: ValueError: no such norm"]
    assert case.norms() == {"bn": ["bn-fused"], "wrong": ["wrong"]}


def _small(case: Case, variant: str) -> nn.Module:
    if variant == "wrong":
        raise ValueError("no such norm\nat all")
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 1000))


@pytest.mark.parametrize(
    ("variant", "kinds"),
    [("torch-gn", {"GroupNorm"}), ("gn-save", {"GN"}), ("torch-bn", {"BatchNorm2d"})],
)
def test_variants_of_a_network(variant, kinds):
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    model = networks.build(Case("resnet18", 32, 2, ()), variant)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__ or type(m).__name__ == "GN"]
    assert {type(m).__name__ for m in norms} == kinds
    assert len(norms) == 20


def test_blocks_of_a_convnext_are_the_same_function():
    models = pytest.importorskip("torchvision", reason="torchvision is not installed").models
    torch.manual_seed(0)
    block = models.convnext.CNBlock(6, layer_scale=0.5, stochastic_depth_prob=0.0)
    twin = nn.Sequential(models.convnext.CNBlock(6, layer_scale=0.5, stochastic_depth_prob=0.0))
    twin[0].load_state_dict(block.state_dict())
    networks._channels_on_axis_1(twin)
    x = torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(twin(x), block(x), rtol=1e-5, atol=1e-5)
    assert not any(isinstance(m, nn.Linear) for m in twin.modules())


def test_why_steps_are_not_replayed():
    nk.build_extension()
    model = nn.Sequential(nk.BN(4), nn.Conv2d(4, 4, 1), nk.GW(4), nn.Conv2d(4, 4, 1), nk.GW(4))
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    [(reason, count)] = networks.from_python(model, lambda: model(x).sum().backward()).items()
    assert count == 2
    assert reason.startswith("gw runs ")
    assert not any(layer._forward_hooks for layer in model)


def test_what_cannot_be_said_of_a_step_is_not_its_error(monkeypatch):
    """It took the row of a variant that had been measured, and hooks stayed behind."""
    layer, x = nk.GW(4), torch.randn(2, 4, 5, 5, requires_grad=True)
    [(reason, _)] = networks.from_python(layer, lambda: layer(x=x)).items()
    assert reason.startswith("gw runs ")

    def refuses(*given):
        raise ValueError("no answer\nmore")

    assert networks.from_python(layer, refuses) == {"ValueError: no answer": 1}
    monkeypatch.setattr(nk, "why", refuses)
    assert networks.from_python(layer, lambda: layer(x)) == {"ValueError: no answer": 1}
    assert not layer._forward_hooks


def test_steady_turns_are_not_repeated():
    asked = []

    def timer(count: int) -> float:
        asked.append(count)
        return 0.1 * count

    times = networks.in_turns({"a": timer, "b": timer}, turns=9)
    for name in "ab":
        assert times[name].own == times[name].first == pytest.approx([0.1] * 3)
    unsteady = iter(range(1, 100))
    times = networks.in_turns({"a": lambda count: next(unsteady)}, turns=5)
    assert len(times["a"].own) == len(times["a"].first) == 5


def test_a_ratio_is_of_one_moment():
    """Turns of one network lay 30 % apart, and so did ratios of turns that were seconds apart."""
    seconds, slow = iter(range(1000)), []

    def timer(factor: float):
        def timed(count: int) -> float:
            slow.append(1 + next(seconds) // 8 % 3)  # a busy host, for eight blocks at a time
            return factor * slow[-1] * count

        return timed

    timers = {"base": timer(1.0), "twice as fast": timer(0.5), "slower": timer(1.25)}
    times = networks.in_turns(timers, turns=15)
    assert len(set(slow)) == 3
    rows = [{"variant": name} for name in timers]
    networks.add_ratios(rows, times, batch=8)
    assert [row["ratio"] for row in rows] == pytest.approx([1, 2, 0.8])
    assert networks.uncertainty([1.0, 2.0, 3.0]) == pytest.approx(1.57 / 3**0.5 / 2)


def test_pairs_in_front_and_behind():
    order = []

    def timer(name: str):
        return lambda count: order.append(name) or float(len(order))

    timers = {name: timer(name) for name in "ab"}
    networks.in_turns(timers, turns=3)
    assert order[4:] == [*"aaba", *"aaab", *"aaba"]


def test_a_compiled_network_answers_from_its_process(monkeypatch):
    monkeypatch.setattr(networks, "build", _small)
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    case = Case("none", 8, 2, ("torch-bn", "wrong"))
    together = compiled.CompiledNetworks.__new__(compiled.CompiledNetworks)
    together.case, together.ends, together.processes = case, {}, []
    for variant in case.variants:  # threads in the place of processes
        together.ends[variant], there = Pipe()
        threading.Thread(
            target=compiled._serve, args=(case, variant, "cpu", there), daemon=True
        ).start()
    row, wrong = together.measure(1, 60, lambda text: None)
    assert row["images_per_second"] > 0
    assert wrong["error"] == "ValueError: no such norm"
    together.close()


def test_a_run_goes_on_and_never_mixes_versions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parts, "layer_names", lambda part: ["bn", "dn"])
    monkeypatch.setattr(command, "source_hash", lambda: "one")
    file = tmp_path / "run.json"
    common = ["--trial", "--device", "cpu", "--turns", "1", "--json", str(file)]
    layers = f"layers {parts.FIRST}"
    assert command.main([*common, "--parts", "host", layers, "--seconds", "0"]) == 1
    assert "Not measured: host, layers 128x256" in capsys.readouterr().err
    assert command.main([*common, "--parts", "host"]) == 0
    first = json.loads(file.read_text())
    assert command.main([*common, "--parts", "host", layers]) == 0
    both = json.loads(file.read_text())
    assert both["parts"]["host"] == first["parts"]["host"]
    bn = next(row for row in both["parts"][layers]["rows"] if row["layer"] == "bn")
    assert bn["straightforward_seconds"] > 0
    assert bn["difference"]["y"] < 1e-2

    monkeypatch.setattr(parts.host, "measure", _broken)
    other = str(tmp_path / "other.json")
    assert command.main([*common[:-1], other, "--parts", "host", layers]) == 1
    assert "host: RuntimeError: broken" in capsys.readouterr().err
    assert list(json.loads(Path(other).read_text())["parts"]) == [layers]

    monkeypatch.setattr(command, "source_hash", lambda: "two")
    assert command.main([*common, "--parts", "host"]) == 2
    assert "its source is one, here it is two" in capsys.readouterr().err
    assert json.loads(file.read_text()) == both


def _broken(*arguments):
    raise RuntimeError("broken")


def test_what_processes_call_can_be_imported_by_them():
    """It stood in __main__, which a process that is spawned cannot import: no run could prepare."""
    called = (preparing._alone, preparing._prepared, compiled._serve)
    assert [pickle.loads(pickle.dumps(each)) for each in called] == list(called)
    assert not any("__main__" in each.__module__ for each in called)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "hots"], "unknown part 'hots'. Did you mean 'host'?"),
        (["--device", "cpu"], "Try --trial"),
        (["--page", "--json", "nowhere.json"], "there is no nowhere.json"),
        (["--trial", "--turns", "0"], "got 0, expected a whole number from 1 on"),
        (["--trial", "--seconds", "-5"], "got -5, expected seconds"),
        (["--trial", "--device", "martian"], "invalid choice: 'martian'"),
        (["--trial", "--json", "no/folder/x.json"], "there is no folder no/folder"),
        (["--trial", "--json", "list.json"], "list.json is not the file of a run"),
        (["--trial", "--json", "text.json"], "text.json cannot be read"),
        (["--trial", "--json", "."], "cannot be read"),
    ],
)
def test_bad_arguments_are_explained(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[]")
    Path("text.json").write_text("no JSON")
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


HOST_ROW = {"layer": "bn", "microseconds": 87.4, "uncertainty": 0.05, "ratio": 0.8}


def _run(tmp_path: Path) -> Path:
    rates = {"torch-bn": 100.0, "bn": 120.0, "bn-fused": 150.0, "bn-save": 135.0}
    rows = [
        {"variant": v, "images_per_second": r, "ratio": r / 100, "uncertainty": 0.02, "gib": 10.0}
        for v, r in rates.items()
    ]
    rows[-1] |= {"gib": 6.0, "memory": 0.6, "from_python": {"bn runs on triton.": 3}}
    rows.append({"variant": "in", "error": "ShapeError: one position"})
    layers = [{"layer": name, "replay_seconds": 2e-5, "seconds": 1e-4} for name in ("bn", "rms")]
    document = {
        "commit": "c0ffee",
        "environment": dict.fromkeys(("device", "torch", "triton", "Python", "cores"), "this"),
        "copy_rate": 4e12,
        "parts": {
            "network resnet50-256": {"rows": rows},
            f"layers {SHAPE}": {"rows": layers},
            "host": {"rows": [HOST_ROW]},
        },
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    return path


def test_the_page_says_what_the_file_says(tmp_path):
    text = page.gpu_page(_run(tmp_path))
    assert "commit c0ffee" in text
    assert "| ResNet-50 | 256 | nn.BatchNorm2d | 100 | 1.00 | 0.02 | 10.00 | – |" in text
    assert '|  |  | bn, fused, save="inputs" | 135 | 1.35 | 0.03 | 6.00 | 0.60 |' in text
    assert "| ResNet-50 | 256 | bn | 0.60 | 1.35 | 0.90 | 1.7 |" in text  # 135 of 150 when fused
    assert '- ResNet-50, bn, fused, save="inputs", 3 of its layers: bn runs on triton.' in text
    assert "| bn | 87 | 5 % | 0.80 |" in text
    floor = 8 * 2 * 128 * 2048 * 7 * 7 / 4e12
    assert f"| rms | {2e-5 / floor:.2f} |" in text
    assert "- network resnet50-256: in: ShapeError: one position" in text
    assert "torch.compile" not in text  # not measured


def test_the_page_says_how_much_of_a_step_the_host_works(tmp_path):
    path = _run(tmp_path)
    document = json.loads(path.read_text())
    [rows] = [found["rows"] for name, found in document["parts"].items() if "network" in name]
    rows[1]["host_seconds"] = 0.64  # of the 256 / 120 s of a step
    path.write_text(json.dumps(document))
    assert "|  |  | bn | 120 | 0.30 | 1.20 |" in page.gpu_page(path)


def test_the_readme_has_a_place_for_figures(tmp_path):
    path = _run(tmp_path)
    written = page.with_block(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n", path)
    assert written.startswith(f"before\n{page.BEGIN}\n")
    assert written.endswith(f"{page.END}\nafter\n")
    assert "| bn | 120 | 150 | 135 |\n" in written  # nothing was compiled
    assert "old" not in written
    assert page.with_block(written, path) == written
    with pytest.raises(ValueError, match="lacks the lines"):
        page.with_block("no place", path)


def test_the_pages_are_what_the_committed_run_gives():
    file = command.ROOT / "docs" / "benchmark-gpu.json"
    pages = {"docs/benchmark-gpu.md": page.gpu_page(file)}
    readme = (command.ROOT / "README.md").read_text(encoding="utf-8")
    pages["README.md"] = page.with_block(readme, file)
    for name, text in pages.items():
        assert (command.ROOT / name).read_text(encoding="utf-8") == text, (
            f"{name} differs from the committed run: run python -m benchmarks.gpu --page"
        )
    assert json.loads(file.read_text(encoding="utf-8"))["trial"] is False
