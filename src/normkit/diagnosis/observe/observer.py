"""Watching the norms of a model while it trains."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normkit.core.optional_dependencies import require
from normkit.core.recomputation import is_recomputation
from normkit.diagnosis.observe.collect import norms_of, wanted_measures
from normkit.diagnosis.observe.step import StepRecord
from normkit.errors import OptionError, nearest

EVERY = 100
# without a pass over what comes out of the layers, and one over what goes in at most
CHEAP = (
    *("esm_mean", "esm_std", "output_error", "stat_diff", "under_represented"),
    *("gradient_factor", "gate_saturation", "frozen", "score", "condensation"),
    *("weight_drift", "bias_drift"),
)
DEARER = ("beyond_6", "dead", "saturated")
MODES = ("train", "eval", "both")


def observe(
    model: nn.Module,
    every: int = EVERY,
    *,
    measures: Iterable[str] | None = None,
    where: Any = None,
    when: str = "train",
    start: Mapping[str, Tensor] | None = None,
) -> Observer:
    """Record measures of every norm while a model trains.

    A step is a forward of ``model`` in train mode (``when="eval"`` or "both" for others); every
    ``every``-th is measured, the first included. In between only one empty hook runs, and at the
    default the whole costs less than one part in a hundred of the training. ``measures`` are some
    of ``MEASURES``; by default those that need no pass over the output, and for layers of normkit,
    which have their moments already, none over the input (but for the condensation score, which
    looks at 32 samples before the first norm). Estimation shift is of the running statistics
    before the batch enters them. Drift is measured from ``start``, a state_dict, or from the
    beginning of the observation.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), nk.BN(8))
    >>> with nk.observe(model, every=1) as observer:
    ...     y = model(torch.randn(16, 4))
    >>> sorted({record.measure for record in observer.records})[:2]
    ['bias_drift', 'condensation']
    """
    return Observer(model, every, measures, where, when, start)


class Observer:
    """What ``observe`` gives: a context manager, and the records it has made.

    ``records`` are (step, path, measure, value); the path "" is the model. Outside of the ``with``
    block nothing of it is left on the model.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = EVERY,
        measures: Iterable[str] | None = None,
        where: Any = None,
        when: str = "train",
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"observe expects every to be a number of at least 1, got {every!r}.")
        if when not in MODES:
            raise OptionError(f"Unknown when={when!r}. {nearest(str(when), MODES)}")
        self.sites = norms_of(model, where)
        _refuse_compiled(model)
        self.model, self.every, self.when, self.start = model, every, when, start
        self.wanted = wanted_measures(measures, CHEAP, DEARER)
        self.step = 0  # forwards so far that count
        self._passed = 0  # and that do not
        self._hooks: list[RemovableHandle] = []
        self._step: StepRecord | None = None
        self._done: list[Observed] = []
        self._refused: dict[str, dict[str, str]] = {}  # at the last step that was measured
        self._waiting: list[tuple[int, str, str, Tensor | float]] = []  # may still be on a device

    def __enter__(self) -> Self:
        if self._hooks:
            raise OptionError("This observation is running already. Try a second observe(model).")
        if self.start is None:
            self.start = {
                f"{site.path}.{name}".lstrip("."): parameter.detach().clone()
                for site in self.sites
                for name, parameter in site.module.named_parameters()
            }
        hook = _Hook(self)
        self._hooks = [
            self.model.register_forward_pre_hook(hook.before),
            self.model.register_forward_hook(hook.after, always_call=True),
        ]
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._end()
        if kind is None and self.step == 0:
            other = "in the other mode" if self._passed else "that a hook could see"
            count = f"{self._passed} forwards {other}" if self._passed else f"no forward {other}"
            warnings.warn(
                f"observe has recorded nothing: it saw {count}. It counts calls of the model "
                f"itself with when={self.when!r}.",
                stacklevel=2,
            )

    # ---------------------------------------------------------------- what was seen

    @property
    def running(self) -> bool:
        """Whether it is inside of its ``with`` block."""
        return bool(self._hooks)

    @property
    def records(self) -> list[Observed]:
        """All records so far, in the order of steps."""
        self._settle()
        return list(self._done)

    def series(self, path: str, measure: str) -> list[tuple[int, float]]:
        """One measure of one layer over the steps."""
        return [(r.step, r.value) for r in self.records if r[1:3] == (path, measure)]

    def why_not(self, path: str, measure: str) -> str | None:
        """Why a layer has no value of a measure, such as "it has no gate"; None if it has one."""
        return self._refused.get(path, {}).get(measure)

    def save(self, path: str | Path) -> None:
        """Write the records to a .csv file, or .parquet if pyarrow is installed."""
        save(self.records, path)

    def to_tensorboard(self, writer: Any) -> None:
        """Hand the records to a SummaryWriter, or anything that has ``add_scalar``."""
        for step, path, measure, value in self.records:
            writer.add_scalar(f"{measure}/{path}" if path else measure, value, step)

    def __repr__(self) -> str:
        state = "running" if self._hooks else "ended"
        return f"<Observer of {len(self.sites)} norms: {self.step} steps, {state}>"

    # ---------------------------------------------------------------- around a forward

    def _begin(self) -> None:
        if is_recomputation() or torch.compiler.is_compiling():
            return
        self._end()  # of a forward that was left by an error no hook has seen
        mode = "train" if self.model.training else "eval"
        if self.when not in (mode, "both"):
            self._passed += 1
            return
        if self.step % self.every == 0:
            self._settle()
            assert self.start is not None
            self._step = StepRecord(self.model, self.sites, self.wanted, self.start)
        self.step += 1

    def _finish(self) -> None:
        if self._step is not None and not is_recomputation():
            self._waiting += [(self.step - 1, *number) for number in self._step.numbers()]
            self._refused = self._step.refused
            self._end()

    def _end(self) -> None:
        if self._step is not None:
            self._step.end()
            self._step = None

    def _settle(self) -> None:
        """Bring what is still on a device to the host, in one transfer a device and type."""
        alike: dict[Any, list[Tensor]] = {}
        for *_, value in self._waiting:
            if isinstance(value, Tensor):
                scalar = value.reshape(()) if value.dim() else value
                alike.setdefault((value.device, value.dtype), []).append(scalar)
        numbers = {kind: iter(torch.stack(values).tolist()) for kind, values in alike.items()}
        for step, path, measure, value in self._waiting:
            if isinstance(value, Tensor):
                value = next(numbers[value.device, value.dtype])
            self._done.append(Observed(step, path, measure, float(value)))
        self._waiting = []


class _Hook:
    """The two hooks on the model. A copy or a pickle of the model gets some that do nothing."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer

    def before(self, *_: Any) -> None:
        if self.observer is not None:
            self.observer._begin()

    def after(self, *_: Any) -> None:
        if self.observer is not None:
            self.observer._finish()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Hook, ()


def _refuse_compiled(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None:
            raise OptionError(
                f"The model{f'’s {path}' if path else ''} is compiled, and compiled code does not "
                "run hooks that come later. Try observing the model before compile()."
            )


class Observed(NamedTuple):
    """One number: at which step, of which layer ("" for the model), which measure, how much."""

    step: int
    path: str
    measure: str
    value: float


def save(records: Sequence[Observed], path: str | Path) -> None:
    """Write records to a .csv or .parquet file, one row a number."""
    path = Path(path)
    if path.suffix in (".csv", ".parquet"):  # a training is not to be lost for want of a directory
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(Observed._fields)
            writer.writerows(records)
    elif path.suffix == ".parquet":
        arrow = require("pyarrow", "lab", "A .parquet file")
        parquet = require("pyarrow.parquet", "lab", "A .parquet file")
        columns = {name: [row[i] for row in records] for i, name in enumerate(Observed._fields)}
        parquet.write_table(arrow.table(columns), path)
    else:
        raise OptionError(f"Records are saved as .csv or .parquet, got {path.name!r}.")
