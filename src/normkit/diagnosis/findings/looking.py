"""Running a model on batches, with norms on running or on batch statistics."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.core.moments import Moments
from normkit.diagnosis.batches import Batch, Loss, loss_of, output_of
from normkit.diagnosis.observe.activations import AfterActivation
from normkit.diagnosis.observe.norm_record import NormRecord
from normkit.diagnosis.switching import using_batch
from normkit.errors import NormkitError
from normkit.inspection import Site, undisturbed
from normkit.inspection.keepers import table_of
from normkit.inspection.tally import Pooling

FEW = 64  # batches whose statistics are kept one by one


class Traffic(NormRecord):
    """What one norm got: of each batch, and of each of its calls in a forward."""

    def __init__(self, site: Site, act: nn.Module | str | None) -> None:
        super().__init__(site, act, frozenset({"dead"}), 0)
        self.of_batches: list[Moments] = []  # of the first call, as the norm keeps them
        self.of_calls: list[Pooling] = []  # over all batches, by number of the call
        self.shape: torch.Size | None = None  # of the first input
        self.call = 0  # in this forward

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        if x is None or not x.is_floating_point() or x.dim() < 2 or x.numel() == 0:
            return
        self.calls += 1
        self.shape = self.shape or x.shape
        table = table_of(x, self.site.channel_axis)
        self.channels.add(table.pooled(samples=None))
        if self.reader is None:
            return
        found = self.reader.pooled(table, x.detach())
        if self.call == len(self.of_calls):
            self.of_calls.append(Pooling())
        self.of_calls[self.call].add(found)
        if self.call == 0 and len(self.of_batches) < FEW:
            self.of_batches.append(found)
        self.expected.add(found)
        self.call += 1


class Look:
    """What was seen while a model ran: traffic by path, in the order of calls, and losses."""

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = {}
        self.losses: list[Tensor] = []  # of each sample, or of each batch
        self.sizes: list[int] = []
        self.finite = True  # whether the output was

    @property
    def loss(self) -> Tensor | None:
        """All losses in one tensor; None if there are none."""
        return torch.cat(self.losses) if self.losses else None


def look(
    model: nn.Module,
    sites: Iterable[Site],
    batches: Iterable[Batch],
    *,
    on_batch: Iterable[nn.Module] = (),
    awake: Iterable[nn.Module] = (),
    loss: Loss | None = None,
    losses: bool = False,
) -> Look:
    """Run the model in eval mode, the norms of ``on_batch`` on batch statistics. Changes nothing.

    Other modules, ``awake``, can be in training mode as well. Each batch starts from the buffers
    as they are now.
    """
    found = Look()
    order: dict[str, Traffic] = {}
    watches: dict[str, Traffic] = {}
    norms = list(on_batch)
    with ExitStack() as stack:
        activations = AfterActivation(model)
        for site in sites:
            act = site.act or activations.modules.get(site.followed_by or "", site.followed_by)
            watch = watches[site.path] = Traffic(site, act)

            def before(_: nn.Module, args: Any, kwargs: Any, watch: Traffic = watch) -> None:
                order.setdefault(watch.site.path, watch)
                watch.before(args, kwargs)

            handles = [site.module.register_forward_pre_hook(before, with_kwargs=True)]
            for handle in (*handles, *activations.listen(site, watch.after)):
                stack.callback(handle.remove)
        for number, batch in enumerate(batches, 1):
            with undisturbed(model), using_batch(norms):
                for module in awake:
                    module.training = True
                for watch in watches.values():
                    watch.call = 0
                output = output_of(model, batch, number)
            found.sizes.append(batch.size)
            if isinstance(output, Tensor):
                found.finite &= bool(torch.isfinite(output).all())
            if losses:
                found.losses.append(_losses(loss, output, batch, number))
    found.traffic = order
    return found


def _losses(loss: Loss | None, output: Any, batch: Batch, number: int) -> Tensor:
    """Of each sample if it is a cross-entropy of classes, else of the batch."""
    if loss is None and isinstance(output, Tensor) and isinstance(batch.target, Tensor):
        try:
            each = F.cross_entropy(output.detach().float(), batch.target, reduction="none")
            return each.flatten(1).mean(1) if each.dim() > 1 else each
        except (RuntimeError, ValueError, IndexError, TypeError):
            pass  # the error of loss_of explains itself
    return torch.tensor([loss_of(loss, output, batch, number)])


def can_be_lost(loss: Loss | None, model: nn.Module, batch: Batch) -> bool:
    """Whether a loss can be computed; one that was given must be."""
    with undisturbed(model):
        output = output_of(model, batch, 1)
    try:
        _losses(loss, output, batch, 1)
    except NormkitError:
        if loss is not None:
            raise
        return False
    return True
