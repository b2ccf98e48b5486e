"""accumulate: gradient accumulation with the batch statistics of the full batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from normkit.calibration.accumulation.recompute import BlockRecord, chosen_blocks, recording
from normkit.calibration.accumulation.sharing import (
    FullBatch,
    SharedNorm,
    can_share,
    exchanging_through,
)
from normkit.calibration.result import BufferSnapshot
from normkit.errors import OptionError
from normkit.inspection import Survey, survey
from normkit.inspection.batches import samples_in
from normkit.inspection.foreign import measured
from normkit.inspection.side_by_side import current_run, run_side_by_side

LossFunction = Callable[[nn.Module, Any], Tensor]
SMALL = 1 << 14  # values; less is not worth a trip to the host


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


class Accumulation:
    """Steps over micro-batches for one model: see ``accumulate``."""

    def __init__(
        self, model: nn.Module, recompute: bool | str | Sequence[str], offload: bool
    ) -> None:
        self.model, self.offload = model, offload
        sites = survey(model)
        self.norms = [SharedNorm(site) for site in sites if can_share(site)]
        self.others = _unshareable(sites)
        self.blocks = chosen_blocks(model, sites, recompute)
        self._records: dict[Any, BlockRecord] = {}
        self._stack: ExitStack | None = None

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise OptionError("This accumulation is entered already. Use its step in one block.")
        self._stack = ExitStack()
        try:
            for norm in self.norms:
                self._stack.enter_context(norm.sharing())
            for path, module in self.blocks.items():
                self._stack.enter_context(recording(path, module, self._records))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        assert self._stack is not None
        self._stack.close()
        self._stack = None

    def __call__(
        self,
        micro_batches: Sequence[Any],
        loss_fn: LossFunction,
        *,
        weights: Sequence[float] | None = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        backward: bool = True,
    ) -> Tensor:
        """One step: the gradients of the full batch's loss are added to those of the parameters.

        ``loss_fn(model, micro_batch)`` gives the mean loss of a micro-batch; the full loss is their
        average, weighted by how many samples each has, or by ``weights`` (all 1 for losses that
        are sums). ``scale`` is for mixed precision: scaler.scale. Returns the full loss. If a step
        fails, running statistics are what they were.
        """
        if self._stack is None:
            raise OptionError("Call a step inside of 'with accumulate(model) as step:'.")
        if current_run() is not None:
            raise OptionError("A step cannot run inside of another one.")
        if backward and not torch.is_grad_enabled():
            raise OptionError(
                "A step computes gradients, and they are switched off here (no_grad or inference "
                "mode). Try backward=False for the loss alone."
            )
        batches = list(micro_batches)
        shares = _shares(batches, weights)
        self._refuse()
        self._records.clear()
        state, before = self._versions(), BufferSnapshot(norm.module for norm in self.norms)
        jobs = [
            self._job(batch, share, loss_fn) for batch, share in zip(batches, shares, strict=True)
        ]
        try:
            with torch.set_grad_enabled(backward and torch.is_grad_enabled()):
                losses = run_side_by_side(jobs)
            self._warn_of_changes(state)
            total = torch.stack([loss.reshape(()) for loss in losses]).sum()
            if backward:
                self._backward(total if scale is None else scale(total))
        except BaseException:
            before.restore()  # a step that fails leaves no statistics behind
            raise
        finally:
            self._records.clear()
        return total.detach()

    def _versions(self) -> dict[str, int]:
        """How often each buffer of the model has been changed, those of norms left out."""
        own = {id(b) for norm in self.norms for b in norm.module.buffers()}
        named = self.model.named_buffers()
        return {k: b._version for k, b in named if id(b) not in own and not b.is_inference()}

    def _warn_of_changes(self, before: dict[str, int]) -> None:
        now = self._versions()
        if changed := [name for name, version in before.items() if now.get(name) != version]:
            warnings.warn(
                f"The forward of the model changes {changed[0]}, once for each micro-batch: they "
                "see different values, so that the step is not exactly that of the full batch.",
                stacklevel=3,
            )

    def _backward(self, total: Tensor) -> None:
        try:
            for norm in self.norms:
                norm.in_backward = True
            total.backward()
        finally:
            for norm in self.norms:
                norm.in_backward = False

    def _job(self, batch: Any, share: float, loss_fn: LossFunction) -> Callable[[], Tensor]:
        def job() -> Tensor:
            run = current_run()
            assert run is not None
            with exchanging_through(FullBatch(run)), offloaded(self.offload):
                loss = loss_fn(self.model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                is_tensor = isinstance(loss, Tensor)
                given = f"shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
                raise OptionError(
                    "Expected loss_fn(model, micro_batch) to give the loss, a tensor with one "
                    f"value, got {given}."
                )
            return loss * share

        return job

    def _refuse(self) -> None:
        """An error for norms that would use statistics of micro-batches."""
        for path, module, why in self.others:
            if module.training:
                raise OptionError(
                    f"{path}: {why}, so micro-batches cannot share its statistics. Convert it to "
                    'bn (normkit.convert), freeze its statistics, or use "gn".'
                )
        world = torch.distributed.is_available() and torch.distributed.is_initialized()
        if world and torch.distributed.get_world_size() > 1:
            for norm in self.norms:
                if isinstance(norm.module, nn.SyncBatchNorm) and norm.module.training:
                    raise OptionError(
                        f"{norm.path} shares statistics between processes; accumulate does so "
                        "between the micro-batches of one process only."
                    )


def _unshareable(survey: Survey) -> list[tuple[str, nn.Module, str]]:
    """Norms of the batch that cannot be shared, and why."""
    others = []
    for site in survey:
        asked = measured(site)
        if can_share(site) or asked.is_fixed or not (site.tracked or asked.pools_samples()):
            continue
        why = "its forward is its own" if site.own_forward else f"it is {site.class_name}"
        others.append((site.path or "The norm", site.norm, why))
    return others


def _shares(batches: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
    """How much each micro-batch counts in the loss."""
    if not batches:
        raise OptionError("There are no micro-batches.")
    if weights is None:
        sizes = [samples_in(batch) for batch in batches]
        return [size / sum(sizes) for size in sizes]
    if len(weights) != len(batches):
        raise OptionError(f"Got {len(weights)} weights for {len(batches)} micro-batches.")
    return [float(weight) for weight in weights]


def offloaded(wanted: bool) -> AbstractContextManager[Any]:
    """What autograd keeps inside of the block is moved to the host; parameters stay."""
    if not wanted:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _back)


def _to_host(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu" or tensor.numel() < SMALL or isinstance(tensor, nn.Parameter):
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host


def _back(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)
