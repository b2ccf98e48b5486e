"""Losses of a model with some norms on batch statistics and the others on running ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from normkit.diagnosis.batches import Batch, Loss, loss_of, output_of
from normkit.diagnosis.gap import Losses
from normkit.errors import NonFiniteWarning
from normkit.inspection import kind_of, undisturbed


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
