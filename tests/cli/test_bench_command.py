"""normkit bench: what it measures, prints and refuses. Nothing here asserts on time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from normkit import timing

Run = Callable[..., Any]
TINY = ("--shape", "4x8x4x4", "--repeats", "1")


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # the command tunes malloc and threads for its own process; this one is the test run's
    monkeypatch.setattr(timing, "keep_memory", lambda: False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rows(out: str) -> dict[str, list[float]]:
    """The numbers of the table by the first word of their line."""
    lines = [line for line in out.splitlines() if re.search(r"\d\.\d{3} +\d+\.\d\d", line)]
    return {line.split()[0]: [float(n) for n in line.split()[1:]] for line in lines}


def test_layers_beside_those_of_torch(normkit: Run) -> None:
    ran = normkit("bench", "bn", "gn", *TINY, "--no-compile", "--threads", "1")
    assert ran.status == 0, ran.err
    assert ran.out.startswith("4x8x4x4 · contiguous · float32 · cpu\n")
    assert f"torch {torch.__version__}, 1 threads" in ran.out
    table = rows(ran.out)
    assert list(table) == ["nn.BatchNorm2d", "nn.GroupNorm(8)", "bn", "gn"]
    base = table["nn.BatchNorm2d"]
    assert base[1] == 1.0
    for milliseconds, times in table.values():
        assert milliseconds > 0
        # both are rounded: 0.0005 ms and 0.005
        assert times == pytest.approx(milliseconds / base[0], abs=0.005 + 0.001 * times / base[0])


def test_every_layer_without_names(normkit: Run) -> None:
    from normkit import names

    ran = normkit("bench", *TINY, "--format", "channels_last", "--dtype", "bfloat16")
    assert ran.status == 0, ran.err
    assert "channels_last · bfloat16" in ran.out
    measured = set(rows(ran.out)) - {"nn.BatchNorm2d", "nn.GroupNorm(8)"}
    assert measured == set(names("activation"))


def test_compiled(normkit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that knows one of two: the other has no number, and the reason is said."""

    class Half(timing.Compiler):
        def __call__(self, module: Any, name: str, spec: Any) -> Any:
            if name == "gn":
                self.reasons.append("Not compiled, gn: no reason")
                return None
            return module

    monkeypatch.setattr(timing, "Compiler", Half)
    ran = normkit("bench", "bn", "gn", *TINY)
    assert ran.status == 0, ran.err
    table = rows(ran.out)
    assert {name: len(numbers) for name, numbers in table.items()} == {
        "nn.BatchNorm2d": 4,
        "nn.GroupNorm(8)": 4,
        "bn": 4,
        "gn": 2,
    }
    assert ran.out.endswith("Not compiled, gn: no reason\n")
    assert "compiled" not in normkit("bench", *TINY).out  # not for all layers, unless asked


def test_a_layer_that_refuses_the_shape_is_left_out(normkit: Run) -> None:
    ran = normkit("bench", "dn", "bn", "--shape", "4x6x4x4", "--repeats", "1", "--no-compile")
    assert ran.status == 0, ran.err
    assert "dn is left out. DN expects channels" in ran.out
    assert "bn" in rows(ran.out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bnn",), "Did you mean 'bn'?"),
        (("ws",), "no activation layer 'ws'"),
        (("--shape", "4x8x4"), "expected four sizes"),
        (("--shape", "4x8x4x0"), "expected four sizes"),
        (("--repeats", "0"), "expected a positive whole number"),
        (("--dtype", "int8"), "invalid choice: 'int8'"),
    ],
)
def test_refused(normkit: Run, arguments: tuple[str, ...], said: str) -> None:
    ran = normkit("bench", *arguments)
    assert ran.status == 2
    assert said in ran.err


def test_a_missing_gpu_is_explained(normkit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = normkit("bench", "--device", "cuda")
    assert ran.status == 2
    assert "no CUDA device here" in ran.err
