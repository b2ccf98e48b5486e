"""Steps over micro-batches that share the statistics of the full batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from normkit.calibration.accumulation.blocks import blocks_of, caught
from normkit.calibration.accumulation.meeting import Meeting
from normkit.calibration.accumulation.offloading import offloaded
from normkit.calibration.accumulation.records import Record
from normkit.calibration.accumulation.sharing import Shared, belonging_to, catchable
from normkit.calibration.result import BufferSnapshot
from normkit.calibration.side_by_side import current_run, run_side_by_side
from normkit.errors import OptionError
from normkit.inspection import Survey, survey
from normkit.inspection.batches import samples_in

LossFunction = Callable[[nn.Module, Any], Tensor]


class Accumulation:
    """Steps over micro-batches for one model: see ``accumulate``."""

    def __init__(
        self, model: nn.Module, recompute: bool | str | Sequence[str], offload: bool
    ) -> None:
        self.model, self.offload = model, offload
        found = survey(model)
        self.norms = [Shared(site.path, site.norm, site) for site in found if catchable(site)]
        self.others = _others(found)
        self.blocks = blocks_of(model, found, recompute)
        self._records: dict[Any, Record] = {}
        self._stack: ExitStack | None = None

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise OptionError("This accumulation is entered already. Use its step in one block.")
        self._stack = ExitStack()
        try:
            for norm in self.norms:
                self._stack.enter_context(norm.caught())
            for path, module in self.blocks.items():
                self._stack.enter_context(caught(path, module, self._records))
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
            with belonging_to(Meeting(run)), offloaded(self.offload):
                loss = loss_fn(self.model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise OptionError(
                    "Expected loss_fn(model, micro_batch) to give the loss, a tensor with one "
                    f"value, got {_said(loss)}."
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


def _others(found: Survey) -> list[tuple[str, nn.Module, str]]:
    """Norms of the batch that cannot be shared, and why."""
    others = []
    for site in found:
        norm = site.norm
        if catchable(site) or site.kind == "frozen_bn":
            continue
        if site.tracked or site.kind in ("bn", "sync_bn", "split_bn", "iabn", "lazy_bn"):
            why = "its forward is its own" if site.own_forward else f"it is {site.class_name}"
            others.append((site.path or "The norm", norm, why))
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


def _said(loss: Any) -> str:
    return f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
