"""diagnose: what it accepts, what it leaves alone, what it refuses; and the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normkit as nk
from normkit.cli import parser
from normkit.commands import diagnose as command
from normkit.diagnosis.diagnose import diagnose
from normkit.diagnosis.diagnosis import Diagnosis
from normkit.errors import NormkitError, NothingToDo, OptionError, ShapeError
from subjects import Net, images, portrait
from subjects import trained as with_values


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def pairs(count: int = 3, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(size, 3, 9, 9), torch.randint(4, (size,))) for _ in range(count)]


def poisoned() -> nn.Sequential:
    model = small()
    model[1].running_var[2] = float("nan")
    return model


# ---------------------------------------------------------------- messages that name the argument


@pytest.mark.parametrize("labels", [(1, 2, 3, 4), (0, -1, 2, 3)])
def test_labels_out_of_range_are_named(labels: tuple[int, ...]) -> None:
    """Labels from 1 were taken for a model without a loss, which was then asked for; in a later
    batch they were "Cross-entropy cannot be computed", and on a GPU the process died."""
    x, wrong = torch.randn(4, 3, 9, 9), torch.tensor(labels)
    for data in ([(x, wrong)], [(x, torch.arange(4)), (x, wrong)]):
        with pytest.raises(
            OptionError, match=r"loader: labels of batch \d go from -?\d to \d, but"
        ):
            diagnose(small(), data)
    diagnose(small(), [(x, torch.tensor([0, -100, 2, 3]))])  # torch's sign for: leave it out


@pytest.mark.parametrize("method", ["to_html", "to_json"])
def test_a_folder_that_is_not_there_is_named(method: str, tmp_path: Path) -> None:
    """An hour's diagnosis ended in a bare FileNotFoundError."""
    diagnosis = diagnose(small(), pairs(1))
    with pytest.raises(OptionError, match=f"{method}.path=.*there is no folder .*results"):
        getattr(diagnosis, method)(tmp_path / "results" / "page")
    with pytest.raises(OptionError, match="is a folder"):
        getattr(diagnosis, method)(tmp_path)
    getattr(diagnosis, method)(tmp_path / "page")
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


# ---------------------------------------------------------------- nothing is changed


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = with_values(Net()).train(training)
    model.bn.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(images(), torch.randint(4, (4,))) for _ in range(3)]
    other = Net()
    before, random = portrait(model), torch.get_rng_state()
    diagnose(
        model,
        data,
        train_loader=data * 2,
        steps=9,
        ranks=[model.state_dict(), other.state_dict()],
        ema_of=other,
        optimizer=optimizer,
        attribution="swap",
    )
    assert portrait(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()


def test_the_model_is_left_as_it_was_by_a_failure() -> None:
    model = with_values(Net()).train()
    before = portrait(model)

    def breaks() -> Iterator[Tensor]:
        yield images()
        raise KeyError("the disk is full")

    with pytest.raises(KeyError, match="disk"):
        diagnose(model, breaks())
    with pytest.raises(ShapeError):
        diagnose(model, [images(), torch.randn(4, 5, 8, 8)])
    with pytest.raises(OptionError, match="loss= fails on batch 1 with ZeroDivisionError"):
        diagnose(model, [(images(), images())], loss=lambda output, target: 1 / 0)
    assert portrait(model) == before


def test_data_are_not_changed() -> None:
    data = pairs()
    copies = [(x.clone(), y.clone()) for x, y in data]
    diagnose(small(), data)
    assert all(
        torch.equal(x, a) and torch.equal(y, b) for (x, y), (a, b) in zip(data, copies, strict=True)
    )


# ---------------------------------------------------------------- what it accepts


class Named(nn.Module):
    """Keyword arguments in, a mapping out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, image: Tensor, flag: Tensor | None = None) -> dict[str, Tensor]:
        return {"out": self.inner(image)}


def kinds_of(found: Diagnosis) -> set[str]:
    return {finding.kind for finding in found}


@pytest.mark.parametrize(
    "loader",
    [
        lambda: [torch.randn(8, 3, 9, 9)],
        lambda: iter([torch.randn(8, 3, 9, 9)] * 2),
        lambda: ((x, y) for x, y in pairs()),
        lambda: torch.utils.data.DataLoader(torch.randn(20, 3, 9, 9), batch_size=8),
        lambda: [torch.randn(8, 3, 9, 9), torch.randn(3, 3, 12, 12)],
        lambda: [torch.randn(1, 3, 9, 9)],
        lambda: [torch.randn(0, 3, 9, 9), torch.randn(2, 3, 9, 9)],
        lambda: [(torch.randn(4, 3, 9, 9), [{"boxes": torch.randn(2, 4)}])],
    ],
    ids=["list", "iterator", "generator", "loader", "sizes", "one", "empty", "boxes"],
)
def test_forms_of_data(loader: Callable[[], Any]) -> None:
    assert "poisoned-statistics" in kinds_of(diagnose(poisoned(), loader()))


def test_keyword_arguments_and_a_loss_of_ones_own() -> None:
    model, data = Named(), [{"image": torch.randn(8, 3, 9, 9)}] * 2
    assert diagnose(model, data).gap is None
    found = diagnose(model, data, loss=lambda output, batch: output["out"].square().mean())
    assert found.gap is not None


def test_an_iterator_is_read_once_and_no_further_than_needed() -> None:
    given = iter(pairs(9))
    diagnose(small(), given, max_batches=3)
    assert len(list(given)) == 5  # one more was read, to see whether these are all


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_number_types(dtype: torch.dtype) -> None:
    model = poisoned().to(dtype)
    assert "poisoned-statistics" in kinds_of(
        diagnose(model, [torch.randn(8, 3, 9, 9, dtype=dtype)])
    )


def test_a_norm_alone_and_one_that_never_runs() -> None:
    assert diagnose(nn.BatchNorm2d(3), [torch.randn(8, 3, 4, 4)]).layers[0].path == ""
    model = small()
    model.spare = nn.BatchNorm2d(5)  # in no forward
    model.forward = lambda x: nn.Sequential.forward(nn.Sequential(*list(model)[:6]), x)
    found = diagnose(model, pairs())
    assert [layer.path for layer in found.layers] == ["1", "spare"]
    assert all("spare" not in finding.paths for finding in found)


def test_norms_that_cannot_use_the_batch_here() -> None:
    """As a SyncBatchNorm without its processes: what they keep is judged in eval mode."""

    class Elsewhere(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("no processes")
            return super().forward(x)

    model = small()
    model[1] = Elsewhere(8)
    with torch.no_grad():
        model[1].weight.mul_(1.1)
    model[1].num_batches_tracked += 100
    model[1].running_mean += 9
    found = diagnose(model.eval(), pairs(), train_loader=pairs())
    assert "estimation-shift" in kinds_of(found)


def test_layers_come_in_the_order_in_which_they_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    found = diagnose(Backwards(), [torch.randn(9, 3)])
    assert [layer.path for layer in found.layers] == ["first", "second"]


def test_models_of_other_libraries() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("mobilenetv3_small_050", pretrained=False, num_classes=4)
    bad = model.blocks[1][0].bn2  # a norm with an activation inside
    bad.running_mean[0] = float("inf")
    found = diagnose(model, [(torch.randn(4, 3, 32, 32), torch.randint(4, (4,)))])
    assert found.findings[0].kind == "poisoned-statistics"
    assert found.findings[0].path == "blocks.1.0.bn2"


def test_the_gap_is_attributed() -> None:
    model = small()
    with torch.no_grad():
        for x, _ in pairs(60):
            model(x)
        model[1].running_var[:4] *= 100
    found = diagnose(model, pairs(), loss=lambda o, y: F.cross_entropy(o, y), attribution="swap")
    assert found.gap is not None
    assert found.gap.method == "swap"
    assert found.gap.worst == "1"
    assert diagnose(model, pairs(), attribution=None).gap is None


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("model", "loader", "error", "match"),
    [
        (small, [], NothingToDo, "no batches"),
        (small, [torch.randn(0, 3, 9, 9)], NothingToDo, "without any samples"),
        (small, torch.randn(4, 3, 9, 9), OptionError, r"Try \[batch\]"),
        (small, [torch.randn(4, 5, 9, 9)], ShapeError, "batch 1"),
        (lambda: nn.Linear(3, 3), [torch.randn(4, 3)], NothingToDo, "no norms"),
        (lambda: nn.DataParallel(small()), pairs(), OptionError, "model.module"),
        (lambda: torch.compile(small()), pairs(), OptionError, "_orig_mod"),
        (lambda: nn.Sequential(nn.LazyBatchNorm2d()), pairs(), ShapeError, "lazy"),
        (lambda: "resnet50", pairs(), OptionError, "nn.Module"),
    ],
    ids=["empty", "samples", "tensor", "shape", "norms", "wrapped", "compiled", "lazy", "text"],
)
def test_bad_input(model: Any, loader: Any, error: type[NormkitError], match: str) -> None:
    with pytest.raises(error, match=match):
        diagnose(model(), loader)


@pytest.mark.parametrize(
    ("argument", "value", "match"),
    [
        ("steps", -1, "got -1"),
        ("steps", True, "got True"),
        ("ranks", [3], "state_dict"),
        ("ema_of", {}, "state_dict"),
        ("optimizer", "sgd", "torch optimizer"),
        ("attribution", "swaps", "Did you mean 'swap'"),
        ("max_batches", 0, "at least 1"),
        ("train_loader", [], "no batches"),
        ("loss", lambda output, target: output, "one number"),
    ],
)
def test_bad_arguments(argument: str, value: Any, match: str) -> None:
    with pytest.raises(NormkitError, match=match):
        diagnose(small(), pairs(), **{argument: value})


# ---------------------------------------------------------------- what it says


def test_what_is_missing_is_said() -> None:
    bare = diagnose(small(), [torch.randn(16, 3, 9, 9)])
    assert [each.give for each in bare.undecided] == [
        "train_loader=",
        "batches (x, y), or loss=",
        "steps=",
    ]
    full = diagnose(small(), pairs(), train_loader=pairs(4), steps=3)
    assert full.undecided == ()
    group = nn.Sequential(nk.GN(3, groups=1))
    assert diagnose(group, [torch.randn(16, 3, 9, 9)]).undecided == ()


def test_a_loss_that_fails_is_said_and_not_asked_for() -> None:
    """A loss= that raised ended in its own traceback, and a cross-entropy that cannot be computed
    was dropped in silence: the diagnosis then asked for "batches (x, y)", which it had been given.
    """

    def wrong(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(output, target)

    with pytest.raises(OptionError, match=r"loss= fails on batch 1 with .*target, a Tensor"):
        diagnose(small(), pairs(), loss=wrong)
    model = small()
    x, _ = pairs()[0]
    floats = [(x, torch.randn(len(x), 7))]
    question = diagnose(model, floats, train_loader=pairs(), steps=3).undecided[-1]
    assert "Cross-entropy cannot be computed" in question.question
    assert "(16, 7)" in question.question
    assert question.give == "batches (x, y), or loss="


@pytest.mark.parametrize(("given", "limit"), [(3, 16), (6, 3)])
def test_too_few_training_batches_are_said(given: int, limit: int) -> None:
    """With fewer than four training batches tiny and sorted ones were not judged, without a
    word."""
    few = diagnose(small(), pairs(), train_loader=pairs(given), steps=3, max_batches=limit)
    (question,) = few.undecided
    assert question.kinds == ("tiny-batch", "unshuffled-batches")
    assert "4 are needed" in question.question
    assert "too small or sorted" in str(few)


def test_the_page_says_when_what_and_with_which_versions() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*pairs()[0]), 8)
    diagnosis = diagnose(small(), loader)
    page = diagnosis.to_html()
    assert diagnosis.facts["date"][:10] in page
    for text in (
        "DataLoader of TensorDataset, 16 samples",
        f"normkit {nk.__version__}",
        f"torch {torch.__version__}",
        "float32",
        "Sequential",
        "parameters",
    ):
        assert text in page, text
    assert diagnosis.to_dict()["facts"]["data"] == "DataLoader of TensorDataset, 16 samples"


def test_severities_are_a_gate() -> None:
    found = diagnose(poisoned(), pairs())
    assert found.worst == "serious"
    assert not found.healthy
    assert [f.kind for f in found.at_least("serious")] == ["poisoned-statistics"]
    assert found.at_least("note") == found.findings
    with pytest.raises(OptionError, match="Unknown severity"):
        found.at_least("fatal")
    fine = Diagnosis("Net", ())
    assert (fine.worst, fine.healthy, len(fine), fine.verdict) == (None, True, 0, "nothing found")


def test_print_says_what_why_and_what_to_do() -> None:
    said = str(diagnose(poisoned(), pairs()))
    for part in ("1 serious", "[poisoned-statistics]", "Why it matters:", "See:", "Not decided"):
        assert part in said
    assert "   Try: nk.calibrate(model, loader)\n" in said
    prose = [line for line in said.splitlines() if "Try:" not in line]
    assert max(map(len, prose)) <= 120


# ---------------------------------------------------------------- the commands

NETS = """
import torch
from torch import nn

def net(bad=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    if bad:
        model[1].running_var[0] = float("inf")
    return model

def loader():
    return [(torch.randn(8, 3, 9, 9), torch.randint(4, (8,))) for _ in range(3)]

def number():
    return 3

def fails():
    raise RuntimeError("no disk")
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs one of the two commands in a directory of its own; gives its status and output."""
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(which: Any, *arguments: str) -> tuple[int, str]:
        import argparse

        made = argparse.ArgumentParser()
        which.add_arguments(made)
        status = which.run(made.parse_args(arguments))
        return status, capsys.readouterr().out

    yield call
    sys.modules.pop("nets", None)


def test_the_command_is_a_gate(run: Callable[..., tuple[int, str]]) -> None:
    given = ("nets:net", "--data", "nets:loader")
    assert run(command, *given)[0] == 0
    assert run(command, *given, "--fail-on", "warning")[0] == 0  # an untrained model is a note
    status, said = run(command, *given, "--fail-on", "note")
    assert status == 1
    assert "note or worse" in said
    bad = (*given, "--build", "bad=true")
    assert run(command, *bad)[0] == 0
    assert run(command, *bad, "--fail-on", "serious")[0] == 1


def test_the_command_writes_both_files(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    given = ("nets:net", "--data", "nets:loader", "--html", "a.html", "--json", "a.json")
    status, said = run(command, *given)
    assert status == 0
    assert "Written: a.html and a.json" in said
    assert (tmp_path / "a.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["model"] == "Sequential"
    with pytest.raises(OptionError, match="exists already"):
        run(command, *given)
    assert run(command, *given, "--force")[0] == 0


@pytest.mark.parametrize("form", ["pair", "mapping", "tensor", "npz", "safetensors"])
def test_the_command_reads_files(
    form: str, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    x, y = torch.randn(20, 3, 9, 9), torch.randint(4, (20,))
    if form == "npz":
        numpy = pytest.importorskip("numpy")
        numpy.savez(tmp_path / "data.npz", images=x.numpy(), labels=y.numpy())
    elif form == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(
            {"x": x, "y": y}, tmp_path / "data.safetensors"
        )
    else:
        saved = {"pair": (x, y), "mapping": {"inputs": x, "targets": y}, "tensor": x}[form]
        torch.save(saved, tmp_path / "data.pt")
    ending = form if form in ("npz", "safetensors") else "pt"
    data = f"data.{ending}"
    status, said = run(command, "nets:net", "--data", data, "--train-data", data, "--batch", "8")
    assert status == 0
    assert "20 samples in 3 batches" in said
    assert ("loss=" in said) == (form == "tensor")  # without classes the gap is not decided


def test_the_command_asks_for_its_own_options(run: Callable[..., tuple[int, str]]) -> None:
    status, said = run(command, "nets:net", "--data", "nets:loader")
    assert status == 0
    assert "Give --train-data." in said
    assert "Give --steps." in said
    assert "train_loader=" not in said


def test_the_command_takes_ranks_and_averages(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    sys.path.insert(0, str(tmp_path))
    try:
        import nets
    finally:
        sys.path.remove(str(tmp_path))
    one, other = nets.net(), nets.net()
    with torch.no_grad():
        other[0].weight += 1
    torch.save(one.state_dict(), tmp_path / "0.pt")
    torch.save(other.state_dict(), tmp_path / "1.pt")
    given = ("nets:net", "--data", "nets:loader", "--ranks", "0.pt", "1.pt", "--ema-of", "1.pt")
    status, said = run(command, *given, "--attribution", "none", "--fail-on", "serious")
    assert status == 1
    assert "[rank-weights-differ]" in said


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("nowhere.pt", "There is no file or directory nowhere.pt"),
        ("nets:number", "gave a int, expected batches"),
        ("nets:fails", "RuntimeError: no disk"),
        ("nets:nothing", "Did you mean|Known"),
        ("nets.py", "expected .pt, .pth, .npz or .safetensors"),
    ],
)
def test_the_command_refuses(data: str, match: str, run: Callable[..., tuple[int, str]]) -> None:
    with pytest.raises(NormkitError, match=match):
        run(command, "nets:net", "--data", data)


def test_the_command_is_on_the_command_line() -> None:
    assert "diagnose" in parser().format_help()


@pytest.mark.gpu
def test_a_model_on_an_accelerator() -> None:
    """Batches and states on the CPU meet a model on the device."""
    data = pairs(6)
    model = with_values(Net()).cuda()
    wide = [(x.repeat(1, 1, 2, 2)[..., :8, :8], y) for x, y in data]
    live = with_values(Net())
    found = diagnose(
        model,
        wide,
        train_loader=wide,
        ranks=[live.state_dict(), model.state_dict()],
        ema_of=live,
        steps=7,
        attribution="swap",
    )
    assert "rank-weights-differ" in kinds_of(found)
    found.to_html()
    found.to_json()
    model.bn.running_mean[0] = float("nan")
    assert "poisoned-statistics" in kinds_of(diagnose(model, wide))
