"""The observation engine: batches are read, models run and watched, and nothing has happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subjects
from normkit.errors import NothingToDo, OptionError, ShapeError
from normkit.inspection.batches import NO_TARGET, BatchReader, ModelCall, read_batch
from normkit.inspection.flow import KEPT, OUTPUT, Use, record_flow
from normkit.inspection.run import call_counts, progressive, undisturbed, watch_inputs
from normkit.inspection.statistics import MergedMoments, NormStatistics


def data(*sizes: int) -> list[Tensor]:
    return [torch.randn(size, 3) for size in sizes]


# -------------------------------------------------------------------- batches


def test_what_of_a_batch_is_input_and_what_target() -> None:
    x, y = torch.randn(4, 3), torch.arange(4)
    assert read_batch(x).target is NO_TARGET
    assert read_batch((x,)).target is NO_TARGET
    assert read_batch((x, y)).target is y
    assert read_batch((x, y, y)).target == (y, y)
    mapping = {"x": x}
    assert read_batch(mapping).inputs is read_batch(mapping).target is mapping
    given = read_batch((x, y), forward=lambda model, batch: model(batch[0]))
    assert isinstance(given.inputs, ModelCall)
    assert given.size == 4
    again = read_batch(read_batch((x, y)).as_given())
    assert again.inputs is x
    assert again.target is y


def test_reading_ends_when_there_is_enough() -> None:
    model = nn.Identity()
    assert [b.size for b in BatchReader(model, data(4, 2, 3), max_batches=2)] == [4, 2]
    assert [b.size for b in BatchReader(model, data(4, 2, 3), max_samples=5)] == [4, 2]
    assert [b.size for b in BatchReader(model, data(4, 2, 3), max_samples=99)] == [4, 2, 3]


def test_an_iterator_can_be_kept() -> None:
    reader = BatchReader(nn.Identity(), iter(data(1, 2, 3)), max_batches=2)
    reader.keep()
    assert [b.size for b in reader] == [b.size for b in reader] == [1, 2]


@pytest.mark.parametrize("given", [torch.ones(2, 3), {"x": 1}, "text", 3])
def test_what_is_no_series_of_batches(given: Any) -> None:
    with pytest.raises(OptionError, match=r"Try \[batch\]"):
        BatchReader(nn.Identity(), given)


@pytest.mark.parametrize("limit", [{"max_batches": 0}, {"max_batches": True}, {"max_samples": 0}])
def test_limits_are_positive_numbers(limit: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="number"):
        BatchReader(nn.Identity(), [], **limit)  # type: ignore[arg-type]


def test_no_batches_are_an_error() -> None:
    with pytest.raises(NothingToDo, match="no batches"):
        list(BatchReader(nn.Identity(), []))


def test_a_batch_that_the_model_does_not_take_is_named() -> None:
    reader = BatchReader(nn.Linear(3, 2), [torch.ones(2, 3), torch.ones(2, 4)])
    first, second = reader
    reader.run(first, 1)
    with pytest.raises(ShapeError, match=r"batch 2, \(2, 4\).*forward=lambda"):
        reader.run(second, 2)


# -------------------------------------------------------------------- watching


def test_listeners_get_every_input_and_leave_no_hooks() -> None:
    model = subjects.Net()
    before = subjects.portrait(model)
    seen: list[torch.Size] = []
    listeners = {
        m: lambda x: seen.append(x.shape) for m in model.modules() if isinstance(m, nn.BatchNorm2d)
    }
    reader = BatchReader(model, [subjects.images(), subjects.images(2)])
    with undisturbed(model), watch_inputs(listeners):
        for number, batch in enumerate(reader, 1):
            reader.run(batch, number)
    assert len(seen) == 2 * sum(call_counts(reader, list(listeners)).values()) == 8
    assert subjects.portrait(model) == before


def test_a_forward_can_be_stopped() -> None:
    late: list[Tensor] = []
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    reader = BatchReader(model, data(4))
    with undisturbed(model), watch_inputs(dict.fromkeys(model, late.append), stop_at=model[1]):
        assert reader.run(next(iter(reader)), 1) is None
    assert len(late) == 2  # the one it stops at has got its input
    assert reader.run(next(iter(reader)), 1) is not None


def test_inputs_without_statistics_are_left_out() -> None:
    seen: list[Tensor] = []
    model = nn.Identity()
    with watch_inputs({model: seen.append}):
        for x in (torch.ones(3), torch.ones(0, 3), torch.ones(2, 3, dtype=torch.long), "text"):
            model(x)
    assert not seen


class Twice(nn.Module):
    """Norms in another order than they are registered in; the first of them runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.never, self.first = (nn.BatchNorm1d(3) for _ in range(3))
        for norm in (self.last, self.first):
            nn.init.constant_(norm.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x)) + 2)


def test_modules_are_counted_in_the_order_of_calls() -> None:
    model = Twice()
    counts = call_counts(BatchReader(model, data(4)), [model.last, model.never, model.first])
    assert list(counts.items()) == [(model.first, 2), (model.last, 1)]


def test_progressively_each_norm_sees_the_ones_below_corrected() -> None:
    model = Twice().double()
    x = 3 + 2 * torch.randn(64, 3, dtype=torch.float64)
    reader = BatchReader(model, iter(x.split(16)))
    norms = [NormStatistics(n, getattr(model, n), "bn") for n in ("last", "first", "never")]
    passes = []

    def measure(norm: NormStatistics, stop_at: nn.Module | None) -> bool:
        merged: list[MergedMoments] = []
        passes.append((norm.path, stop_at))
        with (
            undisturbed(model),
            watch_inputs(
                {norm.norm: lambda x: merged.append(MergedMoments.of(norm.table(x)))}, stop_at
            ),
        ):
            for number, batch in enumerate(reader, 1):
                reader.run(batch, number)
        total = merged[0]
        for part in merged[1:]:
            total = total.merged(part)
        norm.write(total, 1)
        return True

    done = [(norm.path, settled) for norm, settled in progressive(reader, norms, measure)]
    assert done == [("first", True), ("last", True)]
    assert passes[-1] == ("last", model.last)
    assert len(passes) > 3  # the first depends on itself, so it takes several
    model.eval()
    first = model.first(x)
    both = torch.cat([x, first])
    torch.testing.assert_close(model.first.running_mean, both.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.last.running_mean, (model.first(first) + 2).mean(0))


# -------------------------------------------------------------------- who feeds whom


def test_every_use_of_an_output_is_recorded() -> None:
    kept = []

    class Wired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.user = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            kept.append(self.b(y.relu_()))
            return self.user(y) + y.mul(2)

    model = Wired()
    sources, users = {"a": model.a, "b": model.b}, {"user": model.user}
    x = torch.ones(2, 3)
    flow = record_flow(model, lambda: model(x), sources, users)
    assert flow.uses == [
        Use("a", "relu_"),
        Use("a", "linear", changed=True),
        Use("a", "user", changed=True),
        Use("a", "mul", changed=True),
        Use("b", KEPT),
    ]
    (call,) = flow.calls
    assert (call.path, call.source, call.axes, call.arguments) == ("user", "a", 2, 1)


def test_functions_can_be_looked_through() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3))
    x = torch.ones(2, 3)

    def flow(through: bool) -> list[Use]:
        norms = {"2": model[2]}
        return record_flow(
            model, lambda: model(x), {"0": model[0]}, norms, lambda name: through
        ).uses

    assert flow(False) == [Use("0", "relu")]
    assert flow(True) == [Use("0", "relu"), Use("0", "2", direct=False)]
    named = record_flow(model[0], lambda: model[0](x), {"0": model[0]}, {})
    assert named.uses == [Use("0", OUTPUT)]


def test_a_tensor_that_is_written_into_comes_from_both() -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.user = nn.Linear(3, 3), nn.Linear(3, 1), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y[:, :1] = self.b(x)
            return self.user(y)

    model, x = Writer(), torch.ones(2, 3)
    sources = {"a": model.a, "b": model.b}
    flow = record_flow(model, lambda: model(x), sources, {"user": model.user}, lambda name: True)
    assert {(use.source, use.direct) for use in flow.uses if use.user == "user"} == {
        ("a", False),
        ("b", False),
    }
