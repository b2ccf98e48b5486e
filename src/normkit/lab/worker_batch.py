"""Statistics as if each worker had a few samples only."""

from __future__ import annotations

from torch import nn

from normkit import Site, plan_conversion, survey
from normkit.errors import OptionError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.bcn import BCN
from normkit.layers.dn import DN

BATCH = ("bn", "sync_bn")


def set_worker_batch(model: nn.Module, samples: int) -> None:
    """Let every layer that pools over samples do so in runs of so many consecutive ones.

    A batch of 64 is then what 32 workers with 2 samples each would compute; the running
    statistics get the average over the runs. Torch's own batch norms become ours first. Layers
    that look at single samples are as they are, and so are micro-batch BCN, whose estimates the
    workers share, and norms with frozen statistics. A layer with shorter runs of its own, such as
    ghost_bn, keeps them. dn links samples by an option of its own, which must fit into a worker.
    """
    if theirs := [site.path for site in survey(model) if _is_foreign(site)]:
        plan = plan_conversion(model, "bn", theirs, example=False)
        for step in plan.steps:
            if step.action != "convert":
                raise OptionError(
                    f"{step.path} cannot get the statistics of single workers: {step.reason}. "
                    "Try without train.worker_batch."
                )
        plan.apply(example=False)
    for name, layer in model.named_modules():
        if isinstance(layer, DN) and samples % layer.batch:
            raise OptionError(
                f"{name}: dn links {layer.batch} samples, which do not fit into workers with "
                f"{samples}. Try train.worker_batch as a multiple of {layer.batch}."
            )
        if isinstance(layer, BatchNormalizer) and _pools(layer):
            layer.virtual_batch = min(samples, layer.virtual_batch or samples)


def _pools(layer: BatchNormalizer) -> bool:
    if isinstance(layer, BCN) and layer.micro:
        return False
    return "virtual_batch" not in type(layer).withheld and getattr(layer, "use_bn", True)


def _is_foreign(site: Site) -> bool:
    """Whether it is a batch norm of another library, which has no virtual batches."""
    return site.kind in BATCH and site.library != "normkit"
