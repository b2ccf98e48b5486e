"""Runs that wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from normkit.errors import OptionError
from normkit.inspection.side_by_side import current_run, run_side_by_side


def meet(key: str, what: Any, combine: Callable[[list[Any]], list[Any]]) -> Any:
    run = current_run()
    assert run is not None
    return run.meet(key, what, combine)


def alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("run ")]


def test_runs_exchange_at_meetings_in_one_order() -> None:
    said: list[str] = []

    def job(i: int) -> Callable[[], int]:
        def run() -> int:
            total = i
            for place in ("a", "b", "c"):
                said.append(f"{place}{i}")
                total += meet(place, total, lambda parts: [sum(parts)] * len(parts))
            return total

        return run

    first = run_side_by_side([job(i) for i in range(3)])
    once, said[:] = list(said), []
    assert run_side_by_side([job(i) for i in range(3)]) == first
    assert said == once  # the same order each time
    assert first == [63, 64, 65]  # 0 + 1 + 2 = 3, 3 + 4 + 5 = 12, 15 + 16 + 17 = 48
    assert alive() == []


def test_an_error_in_one_run_ends_all_and_is_raised() -> None:
    def fine() -> None:
        meet("a", 1, lambda parts: parts)

    def broken() -> None:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        run_side_by_side([fine, broken, fine])
    assert alive() == []


def test_an_error_while_combining_is_raised() -> None:
    def refuse(parts: list[Any]) -> list[Any]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_side_by_side([lambda: meet("a", 1, refuse)] * 3)
    assert alive() == []


@pytest.mark.parametrize("other", ["another place", "the end"])
def test_runs_that_part_ways_are_an_error_and_no_deadlock(other: str) -> None:
    def one() -> None:
        meet("a", 1, lambda parts: parts)

    def two() -> None:
        if other == "another place":
            meet("b", 1, lambda parts: parts)

    for jobs in ([one, two], [two, one], [one, one, two]):
        with pytest.raises(OptionError, match="different ways"):
            run_side_by_side(jobs)
    assert alive() == []


def test_each_run_has_its_own_random_numbers_and_the_callers_go_on() -> None:
    def job() -> list[float]:
        drawn = []
        for place in ("a", "b"):
            drawn.append(torch.rand(()).item())
            meet(place, None, lambda parts: parts)
            drawn.append(torch.rand(()).item())
        return drawn

    torch.manual_seed(1)
    many = run_side_by_side([job] * 3)
    after = torch.rand(())
    torch.manual_seed(1)
    torch.randint(1 << 62, (3,))  # what the seeds are drawn with
    assert torch.rand(()) == after
    assert len({x for drawn in many for x in drawn}) == 12
    torch.manual_seed(1)
    assert run_side_by_side([job] * 3) == many


def test_runs_see_the_gradient_and_autocast_mode_of_the_caller() -> None:
    def job() -> tuple[bool, bool, torch.dtype]:
        meet("a", None, lambda parts: parts)
        on = torch.is_autocast_enabled("cpu")
        return torch.is_grad_enabled(), on, torch.get_autocast_dtype("cpu")

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert run_side_by_side([job] * 2) == [(False, True, torch.bfloat16)] * 2
    assert [found[:2] for found in run_side_by_side([job] * 2)] == [(True, False)] * 2


def test_one_graph_over_all_runs() -> None:
    x = torch.randn(4, requires_grad=True)

    def job(i: int) -> Callable[[], torch.Tensor]:
        return lambda: meet("sum", x[i] * 2, lambda parts: [sum(parts) ** 2] * len(parts)) * x[i]

    loss = torch.stack(run_side_by_side([job(i) for i in range(4)])).sum()
    (found,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad((x * 2).sum() ** 2 * x.sum(), x)
    torch.testing.assert_close(found, expected)
