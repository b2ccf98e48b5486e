"""Few-shot learning by imprinted weights: classes that were never trained on, from a few examples.

Qi, Brown & Lowe 2018. A classifier by directions is trained on base classes; in an episode of the
test a new class is the mean direction of its examples, and queries get the nearest one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import OptionError
from normkit.lab import data
from normkit.lab.data import Sets
from normkit.lab.data.sampling import generator
from normkit.lab.experiment.records import Setting
from normkit.lab.formats import ImageFormat
from normkit.lab.results import Epoch, TaskMetric
from normkit.lab.tasks.base import Evaluation, Values
from normkit.lab.tasks.classification import Classification
from normkit.lab.tasks.drawing import beside, pixels
from normkit.lab.tasks.sets import is_own

PICTURES = 2
FIRST_SCALE = 10.0  # of the cosines; learned
SURE = 1.96  # standard errors of an interval of 95 %


class FewShot(Classification):
    """Base classes to train on; the test is many episodes of novel classes.

    An episode has ``ways`` classes, 1 or 5 (``shots``) examples of each and ``queries`` more that
    are to be told apart. All networks are given the same episodes.
    """

    takes_metrics: ClassVar[bool] = False

    def __init__(
        self,
        ways: int = 5,
        shots: Sequence[int] = (1, 5),
        queries: int = 15,
        episodes: int = 600,
    ) -> None:
        for name, value, least in (
            ("ways", ways, 2),
            ("queries", queries, 1),
            ("episodes", episodes, 2),
            *(("shots", each, 1) for each in shots),
        ):
            if not isinstance(value, int) or value < least:
                raise OptionError(f"{name} is {value!r}, expected {least} or more.")
        if not shots:
            raise OptionError("shots is empty, expected numbers of examples, such as [1, 5].")
        self.ways, self.shots, self.queries, self.episodes = ways, tuple(shots), queries, episodes
        self.metrics: Mapping[str, TaskMetric] = {
            f"{shot}_shot": TaskMetric(unit="episode") for shot in self.shots
        }

    # ---------------------------------------------------------------- data and model

    def check(self, setting: Setting) -> None:
        if not is_own(setting.data.name):
            data.check_kind(setting.data, "episodes")

    def load(self, setting: Setting, device: torch.device | str) -> Sets:
        if is_own(setting.data.name):
            return super().load(setting, device)
        return data.load(setting.data, device, kind="episodes")

    def locate(self, setting: Setting) -> None:
        super().locate(setting)
        self.check_episodes(self.load(setting, "cpu"), setting.data.name)

    def attach(self, setting: Setting, sets: Sets, format: ImageFormat, seed: int) -> None:
        super().attach(setting, sets, format, seed)
        self.check_episodes(sets, setting.data.name)

    def check_episodes(self, sets: Sets, name: str) -> None:
        """Whether an episode can be drawn from the test set at all."""
        for part, loader in (("test", sets.test), ("validation", sets.validation)):
            if loader is None:
                continue
            sizes = torch.bincount(labels_of(loader, name))
            there = int((sizes > 0).sum())
            if there < self.ways:
                raise OptionError(
                    f"An episode has {self.ways} ways, and the {part} set of {name} has {there} "
                    "classes. Try fewer ways."
                )
            least, wanted = int(sizes[sizes > 0].min()), max(self.shots) + self.queries
            if least < wanted:
                raise OptionError(
                    f"An episode has {max(self.shots)} shots and {self.queries} queries of a "
                    f"class, and a class of the {part} set of {name} has {least} images. Try fewer."
                )

    def network(self, setting: Setting, classes: int, shape: tuple[int, ...]) -> nn.Module:
        return ImprintedNetwork(super().network(setting, classes, shape), classes)

    # ---------------------------------------------------------------- judging

    def evaluation(self, part: str) -> EpisodeScore:  # type: ignore[override]
        return EpisodeScore(self, part)

    @cached_property
    def _drawn(self) -> dict[tuple[str, int], Tensor]:
        return {}

    def drawn(self, part: str, shot: int) -> Tensor:
        """(episodes, ways, shots + queries): which images, the same for every run."""
        key = part, shot
        if key not in self._drawn:
            labels = labels_of(getattr(self.sets, part), self.sets.name)
            random = generator("episodes", part, self.ways, shot, self.queries)
            by_class = [(labels == each).nonzero()[:, 0] for each in labels.unique()]
            episodes = [
                [
                    by_class[c][torch.randperm(len(by_class[c]), generator=random)][
                        : shot + self.queries
                    ]
                    for c in torch.randperm(len(by_class), generator=random)[: self.ways].tolist()
                ]
                for _ in range(self.episodes)
            ]
            self._drawn[key] = torch.stack([torch.stack(each) for each in episodes])
        return self._drawn[key]

    def collapsed(self, epochs: Sequence[Epoch]) -> str | None:
        """No better than guessing, with the most examples."""
        if not epochs:
            return ""
        shot, chance = max(self.shots), 1 / self.ways
        score = statistics.median(each.test(f"{shot}_shot") for each in epochs)
        error = statistics.median(each.test(f"{shot}_shot_interval") for each in epochs)
        if score > chance + error:
            return ""
        return f"{score:.1%} right with {shot} shots is the chance level of {self.ways} ways"

    def pictures(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """The examples of an episode, and below each a query of its class."""
        shot = min(self.shots)
        for number, rows in enumerate(self.drawn("test", shot)[:PICTURES], 1):
            chosen = torch.cat([rows[:, 0], rows[:, shot]])
            loader = self.sets.test
            images = self.format(next(iter(loader.chosen(chosen, [(0, len(chosen))])))[0])
            directions = model.features(images)  # type: ignore[operator]
            new, queries = directions[: self.ways], directions[self.ways :]
            right = int(((queries @ new.T).argmax(1).cpu() == torch.arange(self.ways)).sum())
            shown = pixels(images, loader)
            lines = [beside(*shown[: self.ways]), beside(*shown[self.ways :])]
            yield (
                f"episode {number}: an example of each class, and a query of it below; "
                f"{right} of {self.ways} queries right",
                torch.cat(lines, dim=1),
            )


class EpisodeScore(Evaluation):
    """The features of all images, once; the episodes are drawn from them at the end.

    In eval mode the feature of an image does not depend on the others of its batch.
    """

    def __init__(self, task: FewShot, part: str) -> None:
        self.task, self.part, self.features = task, part, list[Tensor]()

    def add(self, model: nn.Module, batch: Any) -> None:
        images, _ = batch
        with self.task.format.autocast():
            features = model.features(images)  # type: ignore[operator]
        self.features.append(features.float())

    def values(self) -> Values:
        features = torch.cat(self.features)
        values: dict[str, float | list[float]] = {}
        for shot in self.task.shots:
            rows = self.task.drawn(self.part, shot).to(features.device)
            right = torch.stack([episode_accuracy(features[each], shot) for each in rows]).tolist()
            error = statistics.stdev(right) / math.sqrt(len(right))
            values[f"{shot}_shot"] = right
            values[f"{shot}_shot_interval"] = SURE * error  # half of it, as papers print it
        return values


def episode_accuracy(features: Tensor, shot: int) -> Tensor:
    """Of an episode (ways, shots + queries, D): the share of queries nearest to their own class."""
    classes = imprint(features[:, :shot])
    nearest = (features[:, shot:] @ classes.T).argmax(2)  # (ways, queries)
    own = torch.arange(len(classes), device=features.device)[:, None]
    return (nearest == own).double().mean()


def labels_of(loader: Any, name: str) -> Tensor:
    """The labels of a loader's samples, in their order, on the CPU."""
    labels = getattr(loader, "labels", None)
    if labels is None:
        labels = getattr(getattr(loader, "files", None), "labels", None)
    if not isinstance(labels, Tensor):
        raise OptionError(f"{name} does not tell its labels apart from its images: no episodes.")
    return labels.cpu()


# ------------------------------------------------------------------ the network


class ImprintedNetwork(nn.Module):
    """A network whose last linear layer compares directions (Qi, Brown & Lowe 2018).

    A class is a direction of the features; that of a new class is the mean of its examples'.
    """

    def __init__(self, network: nn.Module, classes: int) -> None:
        super().__init__()
        linear = [(path, m) for path, m in network.named_modules() if isinstance(m, nn.Linear)]
        if not linear or linear[-1][1].out_features != classes:
            raise OptionError(
                f"{type(network).__name__} does not end with a linear layer for {classes} classes: "
                "the classes of few-shot learning are directions of what goes into it."
            )
        path, last = linear[-1]
        network.set_submodule(path, nn.Identity())
        self.network = network
        self.weight = nn.Parameter(torch.empty(classes, last.in_features))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as torch starts a linear layer
        self.scale = nn.Parameter(torch.tensor(FIRST_SCALE))

    def features(self, x: Tensor) -> Tensor:
        """Directions (N, D)."""
        return F.normalize(self.network(x), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        cosines: Tensor = self.features(x) @ F.normalize(self.weight, dim=1).T
        return self.scale * cosines


def imprint(examples: Tensor) -> Tensor:
    """Directions (ways, D) of new classes, from those of their examples (ways, shots, D).

    >>> imprint(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]))
    tensor([[0.7071, 0.7071]])
    """
    return F.normalize(examples.mean(1), dim=1)
