"""Unsupervised domain adaptation: labels of a source domain, images of a target domain.

Every norm with running statistics keeps a set of them for each domain (domain-specific batch norm,
Chang et al. 2019), by ``normkit.Profiles``: images of a domain are normalized among themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from normkit import Profiles
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.lab import data
from normkit.lab.data import Sets
from normkit.lab.data.domains import DomainSets, domain_listing, load_domains
from normkit.lab.data.sampling import counts
from normkit.lab.experiment.records import Setting
from normkit.lab.tasks.base import Losses
from normkit.lab.tasks.classification import Classification, correct, loss_of

if TYPE_CHECKING:
    from normkit.lab.train.batches import EpochPlan
    from normkit.lab.train.step import Trainer

METHODS = ("source", "statistics", "coral")
SOURCE, TARGET = "start", "target"  # profiles


class Adaptation(Classification):
    """From ``source`` to ``target``, judged on the target.

    ``method`` "source" never sees the target; "statistics" lets it give running statistics of its
    own; "coral" also draws the covariances of the two domains' logits together (Sun & Saenko 2016),
    with ``weight``.
    """

    takes_metrics: ClassVar[bool] = False
    profiles: Profiles | None = None
    model: nn.Module

    def __init__(
        self, source: str, target: str, method: str = "statistics", weight: float = 1.0
    ) -> None:
        if method not in METHODS:
            raise OptionError(f"method is {method!r}. {nearest(str(method), METHODS)}")
        if source == target:
            raise OptionError(f"source and target are both {source!r}, expected two domains.")
        if weight < 0:
            raise OptionError(f"weight is {weight:g}, expected 0 or more.")
        self.source, self.target, self.method, self.weight = source, target, method, weight

    # ---------------------------------------------------------------- data

    def check(self, setting: Setting) -> None:
        data.check_kind(setting.data, "domains")
        if setting.data.mixup:
            raise OptionError("data.mixup is not for two domains. Leave it out.")

    def load(self, setting: Setting, device: torch.device | str) -> Sets:
        return load_domains(setting.data, self.source, self.target, device)

    def locate(self, setting: Setting) -> None:
        domain_listing(setting.data, self.source, self.target)

    def training_samples(self, setting: Setting) -> int:
        """Listed for it: it depends on the domain."""
        spec = setting.data
        listing = domain_listing(spec, self.source, self.target)
        total = len(listing.domains[self.source])
        return counts(total, spec.validation, spec.subset, spec.name)[0]

    def batches(self, plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[Any, ...]]:
        given = super().batches(plan, epoch, start)
        if self.method == "source":
            yield from ((images, labels, None) for images, labels in given)
            return
        for (images, labels), (other, _) in zip(
            given, self._others(plan, epoch, start), strict=False
        ):
            yield images, labels, other

    def _others(self, plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the target, as often as the source's epoch needs them."""
        assert isinstance(self.sets, DomainSets)
        loader = self.sets.target
        assert loader is not None
        size = min(plan.batch, len(loader))
        each = len(loader) // size
        turn, first = divmod(start, each)
        while True:
            yield from loader.batches(
                size,
                seed=self.seed + 1,
                epoch=epoch * (1 + plan.batches // each) + turn,
                shuffle=True,
                drop_last=True,
                augment=True,
                start=first,
            )
            turn, first = turn + 1, 0

    def read(self, *given: Any) -> Any:
        return self.format.nested(tuple(given))

    # ---------------------------------------------------------------- training

    def begin(self, trainer: Trainer) -> None:
        """The model has the target's statistics, but for source images in training."""
        self.model, self.recordable = trainer.model, False
        if self.method == "source":
            return
        try:
            self.profiles = Profiles(trainer.model)
        except NothingToDo:  # no norm keeps statistics
            return
        self.profiles.add(TARGET)
        self.profiles.use(TARGET)

    def of_source(self) -> AbstractContextManager[object]:
        """Where images of the source go through the model."""
        return nullcontext() if self.profiles is None else self.profiles.using(SOURCE)

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        images, labels, other = batch
        with self.of_source(), self.format.autocast():
            logits = model(images)
        loss = loss_of(logits, labels, self.setting.train.label_smoothing)
        if other is not None:
            with self.format.autocast(), torch.set_grad_enabled(self.method == "coral"):
                theirs = model(other)
            if self.method == "coral":
                loss = loss + self.weight * coral(logits.float(), theirs.float())
        return {"loss": loss, "accuracy": correct(logits.detach(), labels)}

    def state_dict(self) -> dict[str, Any]:
        if self.profiles is None:
            return {}
        with self.profiles.using(SOURCE):
            return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.profiles is not None:
            with self.profiles.using(SOURCE), torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(state[name])


def coral(first: Tensor, second: Tensor) -> Tensor:
    """The squared distance of two covariances (D, D), over 4·D².

    >>> coral(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]]))
    tensor(9.)
    """
    difference = torch.cov(first.T) - torch.cov(second.T)
    return difference.square().sum() / (4 * first.shape[1] ** 2)
