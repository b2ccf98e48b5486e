"""Batches with a target, and the loss of a model on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import OptionError, ShapeError
from normkit.inspection.batches import NO_TARGET as NO_TARGET
from normkit.inspection.batches import BatchReader, Forward
from normkit.inspection.batches import LoaderBatch as Batch
from normkit.inspection.batches import read_batch as read_batch
from normkit.inspection.batches import run_batch as output_of

__all__ = ["NO_TARGET", "Batch", "Loss", "each_batch", "loss_of", "output_of", "read_batch"]

Loss = Callable[[Any, Any], Any]


def each_batch(
    batches: Iterable[Any],
    model: nn.Module,
    most: int | None = None,
    forward: Forward | None = None,
) -> Iterator[Batch]:
    """The batches on the model's device, at most ``most``; none at all is an error."""
    return iter(BatchReader(model, batches, forward, max_batches=most))


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
