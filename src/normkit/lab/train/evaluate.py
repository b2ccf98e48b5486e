"""The numbers of an epoch's batches, kept on the device, and which epochs count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from normkit.errors import OptionError, nearest
from normkit.lab.experiment import Train
from normkit.lab.experiment.rules import CHOICES
from normkit.lab.results import Epoch
from normkit.lab.train.cuda_graph import WARM_UP

LAST = 5  # epochs of median_last_5


class History:
    """The loss of every batch of an epoch, and what else its task records, on the device.

    Without names they are those of the first batch, which then cannot be recorded as a graph.
    ``on_host`` reads each number at once, where nobody has to wait for it: a few tensor operations
    less, which a small network on a CPU would feel.
    """

    def __init__(
        self,
        batches: int,
        device: torch.device,
        names: Sequence[str] | None = ("loss",),
        on_host: bool = False,
    ) -> None:
        self.batches, self.device, self.on_host = batches, device, on_host
        self.unwritten: list[list[float]] = []  # rows on the host
        self.next = torch.zeros(1, dtype=torch.long, device=device)
        self.names: tuple[str, ...] = ()
        self.rows = torch.zeros(0, 0, dtype=torch.float64, device=device)
        if names is not None:
            self.open(names)

    def open(self, names: Sequence[str]) -> None:
        """Make room for numbers of these names; the loss comes first."""
        self.names = tuple(names)
        # and room for the steps that are done to record one
        rows = self.batches + WARM_UP + 2
        self.rows = torch.zeros(rows, len(names), dtype=torch.float64, device=self.device)

    def add(self, values: Mapping[str, Tensor]) -> None:
        if not self.names:
            self.open(list(values))
        numbers = (values[name] for name in self.names)
        if self.on_host:
            self.unwritten.append([x.item() for x in numbers])
            return
        row = torch.stack([(x.detach() if x.requires_grad else x).double() for x in numbers])
        self.rows.index_copy_(0, self.next, row[None])
        self.next.add_(1)

    def skip(self) -> None:
        """A batch without numbers."""
        if self.on_host:
            self.unwritten.append([0.0] * len(self.names))
            return
        self.rows.index_fill_(0, self.next, 0.0)
        self.next.add_(1)

    def restart(self) -> None:
        self.unwritten.clear()
        self.next.zero_()

    def written(self) -> Tensor:
        """All rows, with those that were on the host."""
        if self.unwritten:
            first = int(self.next)
            new = torch.tensor(self.unwritten, dtype=torch.float64)
            self.rows[first : first + len(new)] = new
            self.next.add_(len(new))
            self.unwritten.clear()
        return self.rows

    def losses(self, batches: int) -> list[float]:
        """Of the first so many batches; waits for the device."""
        losses: list[float] = self.written()[:batches, 0].tolist()
        return losses

    def read(self) -> dict[str, list[float]]:
        """Of an epoch that is complete; waits for the device."""
        rows = self.written()[: self.batches].T.tolist()
        return dict(zip(self.names, rows, strict=True))

    def state_dict(self) -> dict[str, object]:
        return {"rows": self.written(), "next": self.next, "names": list(self.names)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not self.names:
            self.open(list(state["names"]))
        self.unwritten.clear()
        self.rows.copy_(state["rows"])
        self.next.copy_(state["next"])


# ------------------------------------------------------------------ which epochs count


def is_evaluated(train: Train, epoch: int) -> bool:
    """Whether an epoch, counted from 1, is evaluated: as often as asked, and where it may count."""
    if train.select == "best_validation" or train.stop_after:
        return True
    counts = LAST if train.select == "median_last_5" else 1
    return epoch > train.epochs - counts or epoch % train.evaluate_every == 0


def selected(
    train: Train, epochs: Sequence[Epoch], metric: str = "accuracy", higher_is_better: bool = True
) -> tuple[int, ...]:
    """The epoch that counts, or the last five, of which the median will.

    Of equally good validation scores the first counts: only a strict improvement replaces it.

    >>> epochs = [Epoch(e, validation_accuracy=a) for e, a in ((1, 0.5), (2, 0.7), (3, 0.7))]
    >>> selected(Train(epochs=3, select="best_validation"), epochs)
    (2,)
    """
    if train.select == "best_validation":
        scores = {e.epoch: e.value(metric, "validation") for e in epochs}
        sign = 1 if higher_is_better else -1
        evaluated = {epoch: sign * score for epoch, score in scores.items() if score is not None}
        return (max(evaluated, key=lambda epoch: (evaluated[epoch], -epoch)),)
    counts = LAST if train.select == "median_last_5" else 1
    last = max((e.epoch for e in epochs), default=0)  # training may have stopped early
    return tuple(e.epoch for e in epochs if e.epoch > max(0, last - counts))


def is_out_of_patience(
    train: Train, epochs: Sequence[Epoch], metric: str = "accuracy", higher_is_better: bool = True
) -> bool:
    """Whether the validation score has not become better for so many epochs as are granted.

    >>> epochs = [Epoch(e, validation_accuracy=a) for e, a in ((1, 0.5), (2, 0.7), (3, 0.7))]
    >>> [is_out_of_patience(Train(stop_after=n), epochs) for n in (0, 1, 2)]
    [False, True, False]
    """
    if not train.stop_after or not epochs:
        return False
    best = selected(replace(train, select="best_validation"), epochs, metric, higher_is_better)
    return epochs[-1].epoch - best[0] >= train.stop_after


def check_selection(train: Train, validation: bool) -> None:
    """Refuse a selection that cannot be made, before anything is trained."""
    if train.select not in CHOICES["train.select"]:
        hint = nearest(train.select, CHOICES["train.select"])
        raise OptionError(f"train.select is {train.select!r}. {hint}")
    if train.select == "best_validation" and not validation:
        raise OptionError(
            'train.select = "best_validation" needs a validation set. Try data.validation = 0.1.'
        )
    if train.stop_after and not validation:
        raise OptionError("train.stop_after needs a validation set. Try data.validation = 0.1.")
