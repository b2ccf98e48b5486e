"""Which epochs count, and what an evaluation tells."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.errors import OptionError
from normkit.lab.experiment import Train
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.tasks.classification import ClassificationScore
from normkit.lab.train.evaluate import check_selection, is_evaluated, selected


def epochs(*validation: float) -> list[Epoch]:
    return [
        Epoch(i, validation_accuracy=value, test_accuracy=i / 10)
        for i, value in enumerate(validation, 1)
    ]


def test_the_last_epoch_counts() -> None:
    assert selected(Train(epochs=3), epochs(0.9, 0.8, 0.7)) == (3,)


def test_only_a_strict_improvement_replaces_the_best() -> None:
    train = Train(epochs=5, select="best_validation")
    assert selected(train, epochs(0.1, 0.6, 0.6, 0.5, 0.6)) == (2,)
    assert selected(train, epochs(0.1, 0.6, 0.6, 0.5, 0.61)) == (5,)


def test_an_epoch_before_training_never_counts() -> None:
    watched = [Epoch(0), *epochs(0.5, 0.4)]
    assert selected(Train(epochs=2, select="best_validation"), watched) == (1,)
    assert selected(Train(epochs=2, select="median_last_5"), watched) == (1, 2)


def test_the_median_of_the_last_five() -> None:
    train = Train(epochs=7, select="median_last_5")
    found = [
        Epoch(i, test_accuracy=a) for i, a in enumerate((0.1, 0.9, 0.3, 0.7, 0.5, 0.2, 0.4), 1)
    ]
    chosen = selected(train, found)
    assert chosen == (3, 4, 5, 6, 7)
    result = Result("id", DONE, chosen, tuple(found), 1.0, 1)
    assert result.score("accuracy") == 0.4  # of 0.3, 0.7, 0.5, 0.2, 0.4


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("last", [3, 6, 8]),
        ("best_validation", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("median_last_5", [3, 4, 5, 6, 7, 8]),
    ],
)
def test_what_may_count_is_evaluated(select: str, expected: list[int]) -> None:
    train = Train(epochs=8, evaluate_every=3, select=select)
    assert [e for e in range(1, 9) if is_evaluated(train, e)] == expected


def test_what_cannot_be_selected_is_refused() -> None:
    with pytest.raises(OptionError, match=r"data\.validation = 0\.1"):
        check_selection(Train(select="best_validation"), validation=False)
    with pytest.raises(OptionError, match="median_last_5"):
        check_selection(Train(select="median_last5"), validation=True)


def test_a_network_that_gives_one_answer_is_told() -> None:
    """At chance level, a dead network looked like one that had learned little."""
    images, labels = torch.randn(12, 4), torch.arange(12) % 3
    for model, share in ((nn.Linear(4, 3), None), (nn.Linear(4, 3), 1.0)):
        if share:
            nn.init.zeros_(model.weight)
        scores = [
            ClassificationScore(torch.device("cpu"), 3, part=p) for p in ("test", "validation")
        ]
        with torch.no_grad():
            for score in scores:
                score.add(model, (images[:7], labels[:7]))
                score.add(model, (images[7:], labels[7:]))
            answers = model(images).argmax(1).bincount(minlength=3)
        test, validation = (score.values() for score in scores)
        assert scores[0].answers.tolist() == answers.tolist()
        assert test["one_class"] == (share or answers.max().item() / 12)
        assert test["accuracy"] == validation["accuracy"]
