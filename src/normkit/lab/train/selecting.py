"""Which epochs count, and which have to be evaluated for that."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.errors import OptionError, nearest
from normkit.lab.experiment import Train
from normkit.lab.results import Epoch

SELECTIONS = ("last", "best_validation", "median_last_5")
LAST = 5


def is_evaluated(train: Train, epoch: int) -> bool:
    """Whether an epoch, counted from 1, is evaluated: as often as asked, and where it may count."""
    if train.select == "best_validation":
        return True
    counts = LAST if train.select == "median_last_5" else 1
    return epoch > train.epochs - counts or epoch % train.evaluate_every == 0


def selected(train: Train, epochs: Sequence[Epoch]) -> tuple[int, ...]:
    """The epoch that counts, or the last five, of which the median will.

    Of equally good validation accuracies the first counts: only a strict improvement replaces it.

    >>> found = [Epoch(e, validation_accuracy=a) for e, a in ((1, 0.5), (2, 0.7), (3, 0.7))]
    >>> selected(Train(epochs=3, select="best_validation"), found)
    (2,)
    """
    if train.select == "best_validation":
        known = [e for e in epochs if e.validation_accuracy is not None]
        return (max(known, key=lambda e: (e.validation_accuracy, -e.epoch)).epoch,)
    counts = LAST if train.select == "median_last_5" else 1
    return tuple(e.epoch for e in epochs if e.epoch > max(0, train.epochs - counts))


def check_selection(train: Train, validation: bool) -> None:
    """Refuse a selection that cannot be made, before anything is trained."""
    if train.select not in SELECTIONS:
        raise OptionError(f"train.select is {train.select!r}. {nearest(train.select, SELECTIONS)}")
    if train.select == "best_validation" and not validation:
        raise OptionError(
            'train.select = "best_validation" needs a validation set. Try data.validation = 0.1.'
        )
