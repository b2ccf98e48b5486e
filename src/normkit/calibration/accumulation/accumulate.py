"""accumulate: gradient accumulation with the batch statistics of the full batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from normkit.calibration.accumulation.steps import Accumulation


def accumulate(
    model: nn.Module, *, recompute: bool | str | Sequence[str] = True, offload: bool = False
) -> Accumulation:
    """Train on micro-batches exactly as on the full batch, batch normalization included.

        with normkit.accumulate(model) as step:
            for images, labels in loader:                       # a large batch on the host
                parts = zip(images.split(8), labels.split(8))
                loss = step(list(parts), lambda model, part: criterion(model(part[0]), part[1]))
                optimizer.step()
                optimizer.zero_grad()

    Plain gradient accumulation normalizes each micro-batch with its own statistics. Here all
    norms use those of the full batch, gradients flow through them as they would in one large
    batch, and running statistics are updated once: outputs, gradients and buffers are those of
    the full batch up to rounding. The micro-batches run side by side and meet at each norm.

    Memory is what this is for. Plain accumulation holds the activations of one micro-batch; to be
    exact, something of all of them has to be kept:

        recompute=True    the inputs of each block of the network, and inside of blocks what one
                          micro-batch needs. A block with d norms is computed d + 2 times. Outside
                          of blocks, as in the stem, all is kept. Paths of modules, such as
                          "layer*.?", replace the blocks that ``survey`` finds.
        recompute=False   all activations, as the full batch would.
        offload=True      with either: what is kept waits in the host's memory. The device holds
                          what all micro-batches have at one depth, as the full batch in eval
                          mode, and one block of one micro-batch.

    On a ResNet-50 with 32 images in fours, recompute=True keeps 36 % of what the full batch keeps
    and takes 4.4 times as long (on a CPU); recompute=False takes 1.7 times as long. If the full
    batch fits with ordinary activation checkpointing, that is simpler and faster: take it.

    The norms of normkit that pool over the batch, and batch norms of torch.nn and timm, can be
    shared; others in training mode are an error. Dropout draws new numbers for each micro-batch.
    Losses must be averages or sums over samples: one that compares samples of a batch with each
    other sees micro-batches. Micro-batches may differ in size, not in the size of their images.
    A model must do its own forward: no torch.compile, no activation checkpointing of its own.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), nk.BN(4), torch.nn.Linear(4, 1))
    >>> parts = list(torch.randn(8, 2).split(2))
    >>> with nk.accumulate(model) as step:
    ...     loss = step(parts, lambda model, part: model(part).square().mean())
    >>> model[1].num_batches_tracked.item()  # one batch, in four parts
    1
    """
    return Accumulation(model, recompute, offload)
