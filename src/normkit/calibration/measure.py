"""measure: the statistics of data, without a change to the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.calibration.feeding import Feed, Forward
from normkit.calibration.fingerprint import Fingerprint, of_state, of_weights
from normkit.calibration.gathering import gather
from normkit.calibration.statistics import Source, Statistics
from normkit.calibration.subjects import subjects_of
from normkit.errors import NothingToDo
from normkit.inspection import undisturbed


def measure(
    model: nn.Module,
    batches: Any,
    *,
    where: Any = None,
    images: int | None = None,
    forward: Forward | None = None,
    frozen: bool = False,
    note: str = "",
) -> Statistics:
    """The statistics of what the norms of a model get, as ``calibrate(mode="layerwise")`` would
    write them; but nothing is written.

    For parts of data that are brought together later, from workers, days or clients: measure each
    on the same model, merge, and ``apply_statistics``. One image is enough for a part.

    >>> import torch, normkit as nk
    >>> layer = torch.nn.BatchNorm1d(1)
    >>> parts = [nk.measure(layer, torch.tensor(part)) for part in ([[1.0], [2.0]], [[6.0]])]
    >>> done = nk.apply_statistics(layer, parts[0].merge(parts[1]))
    >>> layer.running_mean.item(), layer.running_var.item()
    (3.0, 7.0)
    """
    subjects = subjects_of(model, where, frozen)
    print_of = Fingerprint()
    with undisturbed(model):
        measured = gather(Feed(model, batches, forward, images), subjects.keepers, None, print_of)
    done = {one.keeper: one.tally for one in measured if one.tally is not None}
    if not done:
        raise NothingToDo("No batch reached a norm with finite values: nothing to measure.")
    return Statistics(
        {keeper.path: tally for keeper, tally in done.items()},
        {keeper.path: keeper.kind for keeper in done},
        (Source.now(str(print_of), print_of.images, note),),
        type(model).__name__,
        "layerwise",
        of_state(model.state_dict().items()),
        of_weights(model),
    )
