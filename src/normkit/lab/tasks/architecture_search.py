"""Architecture search with two levels: weights on the training set, cells on the validation set.

DARTS (Liu, Simonyan & Yang 2019). A step moves the architecture parameters of a search network by
the gradient of a validation batch, then its weights by that of a training batch. What the run
leaves is the genotype, with which native:darts can be trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from normkit.errors import OptionError
from normkit.lab.data import Loader, Sets
from normkit.lab.experiment.records import Setting
from normkit.lab.formats import ImageFormat
from normkit.lab.tasks.base import TaskError, at_rest
from normkit.lab.tasks.classification import Classification, ClassificationScore
from normkit.lab.tasks.sets import is_own

if TYPE_CHECKING:
    from normkit.lab.train.batches import EpochPlan
    from normkit.lab.train.step import Trainer

ORDERS = (1, 2)
SMALL = 0.01  # of DARTS: length of the step by which second derivatives are estimated
Batch = tuple[Tensor, Tensor]


class ArchitectureSearch(Classification):
    """Bilevel search; ``data.validation`` is the share of images that the cells learn on.

    ``order`` 1 takes the weights as they are; 2 takes them as a step of training would make them,
    which needs three more passes, and second derivatives, estimated by a difference. ``lr``,
    ``betas`` and ``weight_decay`` are those of Adam for the architecture parameters. A network
    needs ``architecture_parameters()`` and ``genotype()``, as native:darts_search has them.
    """

    takes_metrics: ClassVar[bool] = False
    optimizer: torch.optim.Adam
    architecture: list[nn.Parameter]
    weights: list[Tensor]
    buffers: list[list[Tensor]]  # those of a number type together
    kept: list[list[Tensor]]

    def __init__(
        self,
        order: int = 1,
        lr: float = 3e-4,
        betas: Sequence[float] = (0.5, 0.999),
        weight_decay: float = 1e-3,
    ) -> None:
        if order not in ORDERS:
            raise OptionError(f"order is {order!r}, expected 1 or 2.")
        if not lr >= 0 or not weight_decay >= 0:
            raise OptionError(
                f"lr is {lr:g} and weight_decay {weight_decay:g}, expected 0 or more."
            )
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise OptionError(f"betas are {betas!r}, expected two numbers from 0 up to 1.")
        self.order, self.lr, self.weight_decay = order, lr, weight_decay
        self.betas = (float(betas[0]), float(betas[1]))

    # ---------------------------------------------------------------- what cannot be

    def check(self, setting: Setting) -> None:
        super().check(setting)
        train = setting.train
        for key, value, usual in (
            ("train.accumulate", train.accumulate, 1),
            ("train.gpus", train.gpus, 1),
            ("train.ema", train.ema, 0),
            ("data.mixup", setting.data.mixup, 0),
        ):
            if value != usual:
                raise OptionError(f"{key} is {value}, which a search of two levels does not take.")
        if train.precision == "fp16":
            raise OptionError("train.precision is fp16, whose losses are scaled. Try bf16.")
        if self.order == 2 and train.optimizer != "sgd":
            raise OptionError(
                f"order 2 looks a step of SGD ahead, and train.optimizer is {train.optimizer}. "
                "Try sgd, or order = 1."
            )

    def locate(self, setting: Setting) -> None:
        super().locate(setting)
        spec, train = setting.data, setting.train
        if not is_own(spec.name):  # else when it is read
            whole = self.training_samples(replace(setting, data=replace(spec, subset=None)))
            samples = self.training_samples(setting)
            aside = int(whole * spec.validation / (1 - spec.validation))
            check_enough(samples, aside, train.batch or samples, train.drop_last)

    def attach(self, setting: Setting, sets: Sets, format: ImageFormat, seed: int) -> None:
        super().attach(setting, sets, format, seed)
        if hasattr(sets.train, "batch_size"):
            raise OptionError(
                f"{setting.data.name} comes in batches of its own, and a search pairs those of two "
                "sets. Try a Dataset instead of a DataLoader."
            )
        train, samples = setting.train, len(sets.train)
        aside = 0 if sets.validation is None else len(sets.validation)
        check_enough(samples, aside, train.batch or samples, train.drop_last)

    def try_model(
        self, model: nn.Module, samples: int, classes: int, shape: tuple[int, ...]
    ) -> None:
        check_searched(model)
        super().try_model(model, samples, classes, shape)

    # ---------------------------------------------------------------- batches of both sets

    def batches(self, plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[Tensor, ...]]:
        given = super().batches(plan, epoch, start)
        for each, other in zip(given, self._validation_batches(plan, epoch, start), strict=False):
            yield (*each, *other)

    def _validation_batches(
        self, plan: EpochPlan, epoch: int, start: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """As many, and as large, as the training batches; the first again where they run out."""
        loader: Any = self.sets.validation
        order = loader.order(self.seed + 1, epoch)
        order = order.repeat(-(-plan.samples // len(order)))
        numbers = range(start, plan.batches)
        cuts = [(i * plan.batch, i * plan.batch + plan.size(i)) for i in numbers]
        if not self.planned:
            yield from loader.chosen(order, cuts)
            return
        order = order.to(self.format.device)
        for first, last in cuts:
            yield (order[first:last],)

    def read(self, *given: Any) -> Any:
        """A batch of the training set and one of the validation set."""
        half = len(given) // 2
        assert self.sets.validation is not None
        return (
            self._read_from(self.sets.train, given[:half]),
            self._read_from(self.sets.validation, given[half:]),
        )

    def _read_from(self, loader: Loader, given: Sequence[Tensor]) -> Batch:
        gathered: Any = loader
        images, labels = gathered.gather(*given) if self.planned else given
        return self.format(images), labels.to(self.format.device, non_blocking=True)

    # ---------------------------------------------------------------- training

    def learns(self, name: str, parameter: nn.Parameter) -> bool:
        """Architecture parameters have an optimizer of their own."""
        return name not in self._architecture_names

    def network(self, setting: Setting, classes: int, shape: tuple[int, ...]) -> nn.Module:
        network = super().network(setting, classes, shape)
        check_searched(network)
        own = {id(each) for each in network.architecture_parameters()}  # type: ignore[operator]
        self._architecture_names = {n for n, p in network.named_parameters() if id(p) in own}
        return network

    def begin(self, trainer: Trainer) -> None:
        model: Any = trainer.model
        self.architecture = list(model.architecture_parameters())
        self.weights = list(trainer.parameters)
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        self.buffers = list(by_type.values())
        self.kept = [[torch.empty_like(each) for each in group] for group in self.buffers]
        self.optimizer = torch.optim.Adam(
            self.architecture,
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            fused=True,
            capturable=self.format.device.type == "cuda",
        )
        for each in self.architecture:  # all there from the start, for records and checkpoints
            self.optimizer.state[each].update(
                step=torch.zeros((), device=each.device),
                exp_avg=torch.zeros_like(each),
                exp_avg_sq=torch.zeros_like(each),
            )

    def step(self, trainer: Trainer, batch: Any) -> None:
        seen, aside = batch
        with self.statistics_kept():
            if self.order == 1:
                gradients = self._gradients(trainer.forward, aside, self.architecture)
            else:
                gradients = self._unrolled(trainer, seen, aside)
        for parameter, gradient in zip(self.architecture, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        with at_rest(self.architecture):  # its gradient would cost a product with every output
            losses = self.loss(trainer.forward, seen)
        trainer.minimize(losses)

    def _gradients(
        self, model: nn.Module, batch: Batch, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        losses: Any = self.loss(model, batch)
        # a norm that a variant has put there may have a parameter that a step does not use
        found = torch.autograd.grad(losses["loss"], parameters, allow_unused=True)
        return tuple(
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(parameters, found, strict=True)
        )

    def _unrolled(self, trainer: Trainer, seen: Batch, aside: Batch) -> tuple[Tensor, ...]:
        """The gradient of the validation loss, the weights being one step of training further.

        DARTS, equations 7 and 8: the weights' own dependence on the cells is a product of second
        derivatives with a vector, estimated by a difference of two gradients.
        """
        model, weights, many = trainer.forward, self.weights, len(self.architecture)
        before = [weight.detach().clone() for weight in weights]
        rate = trainer.optimizer.param_groups[0]["lr"]
        try:
            slopes = self._gradients(model, seen, weights)
            with torch.no_grad():
                for weight, move in zip(weights, self._moves(trainer, slopes), strict=True):
                    weight.sub_(move)
            both = self._gradients(model, aside, [*self.architecture, *weights])
            direct, along = both[:many], both[many:]
            length = torch.stack([each.square().sum() for each in along]).sum().sqrt()
            reach = SMALL / length.clamp(min=torch.finfo(length.dtype).tiny)
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    for weight, start, way in zip(weights, before, along, strict=True):
                        weight.copy_(start + sign * reach * way)
                ends.append(self._gradients(model, seen, self.architecture))
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, before)
        return tuple(
            now - rate * (more - less) / (2 * reach)
            for now, more, less in zip(direct, *ends, strict=True)
        )

    def _moves(self, trainer: Trainer, slopes: Sequence[Tensor]) -> Iterator[Tensor]:
        """What a step of SGD would take off each weight: with momentum and decay."""
        momentum = self.setting.train.momentum
        by_weight = dict(zip(map(id, self.weights), slopes, strict=True))
        for group in trainer.optimizer.param_groups:
            for weight in group["params"]:
                move = by_weight[id(weight)] + group["weight_decay"] * weight
                if momentum:
                    move = move + momentum * trainer.optimizer.state[weight]["momentum_buffer"]
                yield group["lr"] * move

    @contextmanager
    def statistics_kept(self) -> Iterator[None]:
        """Norms keep the statistics of training batches, with the weights that they belong to."""
        for kept, group in zip(self.kept, self.buffers, strict=True):
            torch._foreach_copy_(kept, group)  # one kernel for many
        try:
            yield
        finally:
            for kept, group in zip(self.kept, self.buffers, strict=True):
                torch._foreach_copy_(group, kept)

    def tensors(self) -> Iterator[Tensor]:
        for each in self.architecture:
            yield from self.optimizer.state[each].values()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): dict(self.optimizer.state[p]) for i, p in enumerate(self.architecture)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for i, parameter in enumerate(self.architecture):
            for name, value in self.optimizer.state[parameter].items():
                value.copy_(state[str(i)][name])

    # ---------------------------------------------------------------- judging

    def evaluation(self, part: str) -> SearchScore:
        score = SearchScore(self.format.device, self.sets.classes, self.format.precision, part)
        score.criterion, score.architecture = self.criterion, self.architecture
        return score

    def texts(self, model: nn.Module) -> Mapping[str, str]:
        found = model.genotype()  # type: ignore[operator]
        return {"cells": "\n".join(found.lines()), "to train them": found.to_toml()}


class SearchScore(ClassificationScore):
    """Right answers of the whole search network, and how undecided its edges are."""

    architecture: list[nn.Parameter]

    def values(self) -> dict[str, float | list[float]]:
        """``undecided`` is the mean entropy of the edges: 1 where all operations weigh the same."""
        entropies = [
            -(shares * shares.log()).sum(-1).mean() / math.log(shares.shape[-1])
            for shares in (torch.softmax(p.detach().double(), -1) for p in self.architecture)
        ]
        return {**super().values(), "undecided": float(torch.stack(entropies).mean())}


def check_enough(samples: int, aside: int, batch: int, drop_last: bool) -> None:
    """Refuse more steps than there are validation batches: cells would be learned by heart."""
    if not aside:
        raise OptionError(
            "a search learns its cells on images that its weights do not see, and data.validation "
            "is 0. Try data.validation = 0.5."
        )
    used = samples - samples % batch if drop_last else samples
    if aside < min(batch, samples) or used - aside >= batch:
        raise OptionError(
            f"an epoch has {-(-used // batch)} search steps, each with {batch} images to train on "
            f"and as many to validate on, and the validation set has {aside}. Try "
            "data.validation = 0.5, a data.subset, or a smaller train.batch."
        )


def check_searched(model: nn.Module) -> None:
    """Refuse a network that has nothing to search for."""
    missing = [n for n in ("architecture_parameters", "genotype") if not hasattr(model, n)]
    if missing:
        raise TaskError(
            f"{type(model).__name__} has no {' and no '.join(missing)}: there is nothing to search "
            'for. Try model.name = "native:darts_search", or task = "classification".'
        )
