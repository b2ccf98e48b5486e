"""Running a model on batches, with norms on running or on batch statistics, and its loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.core.moments import Moments
from normkit.diagnosis.attribution import Losses
from normkit.diagnosis.observe.norm_record import AfterActivation, NormRecord
from normkit.errors import NonFiniteWarning, NormkitError, OptionError, ShapeError
from normkit.inspection import Site, kind_of, run, undisturbed
from normkit.inspection.batches import (
    device_of,
    inputs_of,
    moved,
    naming,
    refuse_no_batches,
    samples_in,
    some_of,
)
from normkit.inspection.calling import Call, Forward, images_in
from normkit.inspection.keepers import table_of
from normkit.inspection.quiet import refuse_meta
from normkit.inspection.tally import Pooling

Loss = Callable[[Any, Any], Any]
NO_TARGET = object()
HINT = (
    "Batches are expected as (inputs, target), inputs alone, or a mapping of keyword arguments; "
    "inputs as a tensor, or a tuple or mapping of arguments. For others try "
    "forward=lambda model, batch: …"
)


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: what the model gets, and what the loss gets beside the model's output."""

    inputs: Any  # a tensor, a tuple of positional or a mapping of keyword arguments
    target: Any

    @property
    def size(self) -> int:
        """How many samples there are, by the first tensor."""
        return samples_in(self.inputs)


def read_batch(given: Any, model: nn.Module | None = None, forward: Forward | None = None) -> Batch:
    """A tensor, (inputs, target), or a mapping of keyword arguments.

    The loss gets the second part of a pair, or the rest as a tuple if there is more. A loss for
    batches that are no pairs gets the batch itself. The whole batch is for ``forward``, if any.
    """
    inputs = inputs_of(given, model)
    images = None if model is None else images_in(model, inputs)
    if forward is not None or images is not None:
        batch = inputs if forward is None else given
        inputs = Call(forward or run, batch, None if images is None else len(images))
    if isinstance(given, tuple | list) and images is not given:
        rest = given[1:]
        return Batch(inputs, NO_TARGET if not rest else rest[0] if len(rest) == 1 else tuple(rest))
    return Batch(inputs, given if isinstance(given, Mapping) else NO_TARGET)


def each_batch(
    batches: Iterable[Any],
    model: nn.Module,
    most: int | None = None,
    forward: Forward | None = None,
) -> Iterator[Batch]:
    """The batches on the model's device, at most ``most``; none at all is an error."""
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise OptionError(f"max_batches expects a number of at least 1 or None, got {most!r}.")
    refuse_no_batches(batches)
    refuse_meta(model)
    device = device_of(model)
    for given in some_of(islice(batches, most)):
        yield read_batch(moved(given, device), model, forward)


def output_of(model: nn.Module, batch: Batch, number: int) -> Any:
    """What the model returns; an error that names the batch, counted from 1, if it fails."""
    with naming(batch.inputs, number, HINT):
        return run(model, batch.inputs)


def loss_of(loss: Loss | None, output: Any, batch: Batch, number: int) -> float:
    """The loss of a batch; cross-entropy for logits and classes unless a function is given."""
    if loss is None:
        return _cross_entropy(output, batch.target, number)
    target = batch.inputs if batch.target is NO_TARGET else batch.target
    found = loss(output, target)
    value = found.detach() if isinstance(found, Tensor) else found
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ShapeError(
            f"The loss of a batch is expected to be one number, got {tuple(value.shape)}. "
            "Try the mean over the batch."
        )
    return float(value)


def _cross_entropy(output: Any, target: Any, number: int) -> float:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise OptionError(
            "Without a loss, batches (x, y) and a model that returns logits are expected, got "
            f"{_kind(output)} for {_kind(target)}. Try loss=lambda output, target: …"
        )
    try:
        return float(F.cross_entropy(output.detach().float(), target))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ShapeError(
            f"Cross-entropy cannot be computed for batch {number}: logits {tuple(output.shape)}, "
            f"targets {tuple(target.shape)} of {target.dtype}. Try loss=lambda output, target: …"
        ) from error


def _kind(value: Any) -> str:
    return "no target" if value is NO_TARGET else f"a {type(value).__name__}"


def losses_of(
    model: nn.Module, batches: Sequence[Batch], norms: Iterable[nn.Module], loss: Loss | None
) -> Losses:
    """The loss of each batch, these norms using its own statistics. Nothing has happened then.

    Every batch starts from the same buffers and random state, so that passes can be compared.
    """
    found = []
    norms = list(norms)
    for number, batch in enumerate(batches, 1):
        with undisturbed(model), using_batch(norms):
            output = output_of(model, batch, number)
            found.append(loss_of(loss, output, batch, number))
    return Losses(tuple(found), tuple(batch.size for batch in batches))


@contextmanager
def using_batch(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Training mode for these norms alone, not for a drop layer inside them.

    To be used where modes and buffers are restored afterwards. Batches that are not finite are no
    news here, and a layer that warns once keeps its warning for the training.
    """
    parts = [m for norm in norms for m in norm.modules() if m is norm or kind_of(m) is not None]
    warned = {id(part): part._warned for part in parts if hasattr(part, "_warned")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)
            for part in parts:
                part.training = True
            yield
    finally:
        for part in parts:
            if id(part) in warned:
                part._warned = warned[id(part)]


FEW = 64  # batches whose statistics are kept one by one


class PassRecord(NormRecord):
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


class ModelPass:
    """What was seen while a model ran: norms by path, in the order of calls, and losses."""

    def __init__(self) -> None:
        self.norms: dict[str, PassRecord] = {}
        self.losses: list[Tensor] = []  # of each sample, or of each batch
        self.sizes: list[int] = []
        self.finite = True  # whether the output was

    @property
    def loss(self) -> Tensor | None:
        """All losses in one tensor; None if there are none."""
        return torch.cat(self.losses) if self.losses else None


def run_pass(
    model: nn.Module,
    sites: Iterable[Site],
    batches: Iterable[Batch],
    *,
    on_batch: Iterable[nn.Module] = (),
    awake: Iterable[nn.Module] = (),
    loss: Loss | None = None,
    losses: bool = False,
) -> ModelPass:
    """Run the model in eval mode, the norms of ``on_batch`` on batch statistics. Changes nothing.

    Other modules, ``awake``, can be in training mode as well. Each batch starts from the buffers
    as they are now.
    """
    found = ModelPass()
    order: dict[str, PassRecord] = {}
    watches: dict[str, PassRecord] = {}
    norms = list(on_batch)
    with ExitStack() as stack:
        activations = AfterActivation(model)
        for site in sites:
            act = site.act or activations.modules.get(site.followed_by or "", site.followed_by)
            watch = watches[site.path] = PassRecord(site, act)

            def before(_: nn.Module, args: Any, kwargs: Any, watch: PassRecord = watch) -> None:
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
    found.norms = order
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


def has_loss(loss: Loss | None, model: nn.Module, batch: Batch) -> bool:
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
