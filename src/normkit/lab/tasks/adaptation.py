"""Unsupervised domain adaptation: labels of a source domain, images of a target domain.

Every norm with running statistics keeps those of each domain (domain-specific batch norm, Chang et
al. 2019), as layers with ``domains=2`` do: images of a domain are normalized among themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from normkit import survey, use_domain
from normkit.errors import OptionError, nearest
from normkit.inspection import undisturbed
from normkit.lab import data
from normkit.lab.data import Sets
from normkit.lab.data.domains import DomainSets, check_domains, load_domains, source_samples
from normkit.lab.data.loaders import Loader
from normkit.lab.data.sampling import counts, generator
from normkit.lab.experiment.records import Setting
from normkit.lab.tasks.base import Losses
from normkit.lab.tasks.classification import Classification, batch_size, correct, loss_of
from normkit.lab.tasks.contrastive import (
    CLASSES,
    Clusters,
    class_batches,
    cluster,
    contrastive_discrepancy,
)
from normkit.layers.domain_in_use import unseen_domains
from normkit.layers.domains import OfDomains

if TYPE_CHECKING:
    from normkit.lab.train.batches import EpochPlan
    from normkit.lab.train.step import Trainer

METHODS = ("source", "statistics", "coral", "can")
SOURCE, TARGET = 0, 1  # domains of the layers


class Adaptation(Classification):
    """From ``source`` to ``target``, judged on the target.

    ``method`` "source" never sees the target; "statistics" lets it give running statistics of its
    own; "coral" also draws the covariances of the two domains' logits together (Sun & Saenko 2016),
    with ``weight``; "can" contrasts classes, those of the target by clustering before each epoch
    (see contrastive.py), with ``weight``, once ``start`` epochs have given the target statistics.
    Samples further than ``threshold`` from the center of their cluster are left out.
    """

    takes_metrics: ClassVar[bool] = False
    planned = False  # steps are given images
    model: nn.Module
    apart = False  # whether there are statistics of each domain
    clusters: Clusters | None = None

    def __init__(
        self,
        source: str,
        target: str,
        method: str = "statistics",
        weight: float | None = None,
        start: int = 1,
        threshold: float = 0.05,
    ) -> None:
        if method not in METHODS:
            raise OptionError(f"method is {method!r}. {nearest(str(method), METHODS)}")
        if source == target:
            raise OptionError(f"source and target are both {source!r}, expected two domains.")
        if weight is None:
            weight = 0.3 if method == "can" else 1.0
        if weight < 0:
            raise OptionError(f"weight is {weight:g}, expected 0 or more.")
        if start < 0:
            raise OptionError(f"start is {start}, expected 0 or more epochs.")
        if not 0 < threshold <= 1:
            raise OptionError(f"threshold is {threshold:g}, expected a number above 0, up to 1.")
        self.source, self.target, self.method, self.weight = source, target, method, weight
        self.start, self.threshold = start, threshold

    # ---------------------------------------------------------------- data

    def check(self, setting: Setting) -> None:
        data.check_kind(setting.data, "domains")
        if setting.data.mixup:
            raise OptionError("data.mixup is not for two domains. Leave it out.")

    def load(self, setting: Setting, device: torch.device | str) -> Sets:
        return load_domains(setting.data, self.source, self.target, device)

    def locate(self, setting: Setting) -> None:
        check_domains(setting.data, self.source, self.target)

    def training_samples(self, setting: Setting) -> int:
        """Listed for it: it depends on the domain."""
        spec = setting.data
        total = source_samples(spec, self.source, self.target)
        return counts(total, spec)[0]

    def batches(self, plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[Any, ...]]:
        """Images and labels of the source; images of the target; more of the source, by class."""
        given = super().batches(plan, epoch, start)
        if self.method == "source":
            yield from ((*each, None, None) for each in given)
            return
        if self.method == "can" and epoch >= self.start:
            if start == 0 or self.clusters is None:  # else those of the epoch that goes on
                self.clusters = self.clustered()
            drawn = generator("classes", self.seed, epoch)
            chosen = class_batches(self.clusters, plan.batches, plan.batch, drawn)
            if chosen is not None:
                both = (
                    self._chosen(loader, rows, epoch, start)
                    for loader, rows in (
                        (self.adapted, chosen.target),
                        (self.sets.train, chosen.source),
                    )
                )
                yield from (
                    (*each, target, source)
                    for each, target, source in zip(given, *both, strict=False)
                )
                return
        for each, (other, _) in zip(given, self._others(plan, epoch, start), strict=False):
            yield (*each, other, None)

    @property
    def adapted(self) -> Loader:
        assert isinstance(self.sets, DomainSets)
        assert self.sets.target is not None
        return self.sets.target

    def _chosen(self, loader: Loader, rows: Tensor, epoch: int, start: int) -> Iterator[Tensor]:
        """Images of chosen samples, augmented, a batch for each row."""
        size = rows.shape[1]
        cuts = [(n * size, (n + 1) * size) for n in range(start, len(rows))]
        for images, _ in loader.chosen(
            rows.flatten(), cuts, seed=self.seed + 2, epoch=epoch, augment=True
        ):
            yield images

    def _others(self, plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the target, as often as the source's epoch needs them."""
        loader = self.adapted
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
        """The model is in the target's domain, but for source images in training."""
        self.model, self.recordable = trainer.model, False
        if self.method == "source":
            return
        for site in survey(trainer.model):
            if site.tracked:
                if not isinstance(site.norm, OfDomains):
                    raise OptionError(
                        f"{site.path} ({site.class_name}) cannot keep statistics of two domains. "
                        'Try a layer of normkit, such as norm = "bn" of the variant.'
                    )
                site.norm.keep_domains(2)
                self.apart = True
        if self.apart:
            use_domain(trainer.model, TARGET)

    def of_source(self) -> AbstractContextManager[object]:
        """Where images of the source go through the model."""
        return use_domain(self.model, SOURCE) if self.apart else nullcontext()

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        images, labels, other, own = batch
        with self.of_source(), self.format.autocast():
            logits = model(images)
        loss = loss_of(logits, labels, self.setting.train.label_smoothing)
        if own is not None:
            loss = loss + self.weight * self.contrast(model, own, other)
        elif other is not None:
            with self.format.autocast(), torch.set_grad_enabled(self.method == "coral"):
                theirs = model(other)
            if self.method == "coral":
                loss = loss + self.weight * coral(logits.float(), theirs.float())
        return {"loss": loss, "accuracy": correct(logits.detach(), labels)}

    def contrast(self, model: nn.Module, own: Tensor, other: Tensor) -> Tensor:
        """The contrastive discrepancy of features and probabilities, of as many samples of each
        class from both domains."""
        assert self.clusters is not None
        with self.of_source():
            source = self.features(model, own)
        target = self.features(model, other)
        first, second = ((x.float(), logits.float().softmax(1)) for x, logits in (source, target))
        known = min(len(self.clusters.classes()), CLASSES)
        return contrastive_discrepancy(first, second, len(own) // known, self.sets.classes)

    def features(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the last linear layer is given, and the logits."""
        linear = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise OptionError(
                'method = "can" contrasts what the last linear layer is given, and '
                f"{type(self.model).__name__} has none."
            )
        seen: list[Tensor] = []
        hook = linear[-1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            with self.format.autocast():
                logits = model(images)
        finally:
            hook.remove()
        return seen[-1].flatten(1), logits

    def clustered(self) -> Clusters:
        """Labels of the target, by what the model makes of both domains now."""
        with unseen_domains(self.model), undisturbed(self.model):
            with self.of_source():
                source, labels = self._all_features(self.sets.train)
            target, _ = self._all_features(self.adapted)
        return cluster(source, labels, target, self.sets.classes, self.threshold)

    def _all_features(self, loader: Loader) -> tuple[Tensor, Tensor]:
        features, labels = [], []
        for images, own in loader.batches(batch_size(self.sets.shape)):
            features.append(self.features(self.model, self.format(images))[0].float())
            labels.append(own.to(self.format.device))
        return torch.cat(features), torch.cat(labels)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.clusters is None else self.clusters._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clusters = Clusters(**{k: t.cpu() for k, t in state.items()}) if state else None


def coral(first: Tensor, second: Tensor) -> Tensor:
    """The squared distance of two covariances (D, D), over 4·D².

    >>> coral(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]]))
    tensor(9.)
    """
    difference = torch.cov(first.T) - torch.cov(second.T)
    return difference.square().sum() / (4 * first.shape[1] ** 2)
