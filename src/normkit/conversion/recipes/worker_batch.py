"""Statistics as if each worker had a few samples only."""

from __future__ import annotations

from torch import nn

from normkit.conversion.convert import plan_conversion
from normkit.errors import OptionError
from normkit.inspection import survey
from normkit.layers.base import Normalizer


def set_worker_batch(model: nn.Module, samples: int) -> None:
    """Let every layer that pools over samples do so in runs of so many consecutive ones.

    A batch of 64 is then what 32 workers with 2 samples each would compute; the running
    statistics get the average over the runs. Torch's own batch norms become ours first. Layers
    that look at single samples are as they are, and so are norms with frozen statistics.
    """
    foreign = [
        s.path for s in survey(model) if s.kind in ("bn", "sync_bn") and s.library != "normkit"
    ]
    if foreign:
        plan = plan_conversion(model, "bn", foreign, example=False)
        for step in plan.steps:
            if step.action != "convert":
                raise OptionError(
                    f"{step.path} cannot get the statistics of single workers: {step.reason}. "
                    "Try without train.worker_batch."
                )
        plan.apply(example=False)
    for path, layer in model.named_modules():
        if isinstance(layer, Normalizer):
            try:
                layer.set_worker_batch(samples)
            except OptionError as error:
                raise OptionError(f"{path}: {error}") from error
