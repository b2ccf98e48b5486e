"""Statistics that belong to steps of the optimizer: a skipped step leaves none behind.

With mixed precision a batch whose gradients overflow is thrown away: ``GradScaler.step`` does not
call the optimizer. But its forward has moved the running statistics, and the first of such batches
come with every training. Here what forwards have written since the last step is taken back.

Forwards write into the buffers as ever, kernels and compiled graphs included; a copy of what the
last step left is held beside them. So whatever is committed is bit for bit what it would have been.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normkit.errors import NothingToDo, OptionError
from normkit.inspection import kind_of
from normkit.layers.base import Normalizer


def stage(model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> Staged:
    """Let running statistics count only together with the optimizer step that they belong to.

        staged = normkit.stage(model, optimizer, scaler)      # once, before training
        for images, labels in loader:
            with torch.autocast("cuda"):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)     # skipped: the statistics of this batch are taken back
            scaler.update()
            optimizer.zero_grad()

    All forwards of the model since the last step belong to the next one (a part of it that is
    called alone before them is taken for a change by hand, and stays): with gradient accumulation a
    skipped step takes back all of its micro-batches. Fused optimizers decide on the device whether
    they step, and so does this, without waiting. Norms of normkit, torch.nn, timm and others are
    served alike; ``nonfinite_batches`` of our layers goes on counting. Several optimizers, as of a
    GAN, get a call each, with the network that each trains.

    Without GradScaler, a loop that throws a batch away calls ``staged.rollback()``. Statistics that
    are changed by hand, loaded or calibrated between steps are kept. ``staged.remove()``, or the
    end of a ``with`` block, ends it. Convert a model before, not after.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), nk.BN(4))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> staged = nk.stage(model, optimizer)
    >>> _ = model(torch.randn(8, 2))
    >>> staged.rollback()  # a batch that is not to count
    >>> int(model[1].num_batches_tracked)
    0
    """
    if not isinstance(optimizer, Optimizer):
        raise OptionError(
            f"stage expects an optimizer of torch.optim, got {type(optimizer).__name__}. "
            "Try normkit.stage(model, optimizer, scaler)."
        )
    inner = getattr(optimizer, "optimizer", None)  # of a library that wraps optimizers
    optimizer = inner if isinstance(inner, Optimizer) else optimizer
    if scaler is not None and not callable(getattr(scaler, "step", None)):
        raise OptionError(
            f"stage expects a GradScaler, which has a method step, got {type(scaler).__name__}."
        )
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in trained for p in model.parameters()):
        raise OptionError(
            "stage got an optimizer that trains no parameter of this model, so its steps say "
            "nothing about the model's batches. Try the optimizer of this network."
        )
    return Staged(model, optimizer, scaler)


class Staged:
    """The running statistics of a model, as the last step of its optimizer left them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.norms = [m for m in model.modules() if keeps_statistics(m)]
        if not self.norms:
            raise NothingToDo("stage found no norm with running statistics in this model.")
        self.skipped = 0
        """How many steps were taken back, as far as the host knows."""
        self._held: list[Tensor] = []
        self._versions: list[int] = []
        self._seen: list[Tensor] = []  # the buffers themselves
        self._stepped = self._begun = False
        self.commit()
        self._handles: list[Any] = [
            optimizer.register_step_post_hook(self._after_step),
            model.register_forward_pre_hook(_Hook(self, "_before_forward")),
            model.register_load_state_dict_post_hook(_Hook(self, "_loaded")),
        ]
        self._watched = None if scaler is None else _WatchedStep.of(scaler)
        if self._watched is not None:
            self._watched.stages.append(self)

    @torch.no_grad()
    def commit(self) -> None:
        """What the buffers hold now counts."""
        now = list(self._buffers())
        fits = len(now) == len(self._held) and all(
            a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            for a, b in zip(now, self._held, strict=True)
        )
        if fits:
            _copy(self._held, now)
        else:  # the first time, or the model has moved
            self._held = [b.detach().clone() for b in now]
        self._versions, self._begun, self._seen = [b._version for b in now], False, now

    @torch.no_grad()
    def rollback(self) -> None:
        """Forget what forwards have written since the last step."""
        now = list(self._buffers())
        if len(now) != len(self._held):
            raise OptionError(
                "The model has other statistics than when they were staged. Convert or move a "
                "model before normkit.stage, not between a forward and its step."
            )
        _copy(now, [held.to(b) for held, b in zip(self._held, now, strict=True)])
        self._versions, self._begun = [b._version for b in now], False
        self.skipped += 1

    def remove(self) -> None:
        """Stop; the statistics stay as they are."""
        for handle in self._handles:
            handle.remove()
        if self._watched is not None:
            self._watched.forget(self)
        self._handles, self._watched = [], None

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _buffers(self) -> Iterator[Tensor]:
        for norm in self.norms:
            left_out = norm.not_staged if isinstance(norm, Normalizer) else ()
            for name, buffer in norm._buffers.items():
                if buffer is not None and name not in left_out:
                    yield buffer

    # ---------------------------------------------------------------- what hooks call

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped = True
        # a fused optimizer was called, and its kernels skip the step where this is not zero
        overflow = getattr(optimizer, "found_inf", None)
        if isinstance(overflow, Tensor):
            now = list(self._buffers())
            for buffer, held in zip(now, self._held, strict=True):
                skip = overflow.to(buffer.device).reshape(()) > 0
                buffer.copy_(torch.where(skip, held, buffer))
        self.commit()

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or model is not self.model or not model.training:
            return
        now = list(self._buffers())
        if any(a is not b for a, b in zip(now, self._seen, strict=False)):
            return  # not the model's own, as in functional_call
        if not self._begun and self._versions != [b._version for b in now]:
            self.commit()  # somebody has changed statistics between the steps
        self._begun = True

    def _loaded(self, *_: Any) -> None:
        self.commit()


class _WatchedStep:
    """``scaler.step`` that tells whether it has called the optimizer."""

    def __init__(self, scaler: Any) -> None:
        self.scaler, self.own = scaler, scaler.step
        self.stages: list[Staged] = []

    @classmethod
    def of(cls, scaler: Any) -> _WatchedStep:
        """The one of a scaler, which may serve several optimizers."""
        watched = vars(scaler).get("step")
        if not isinstance(watched, cls):
            watched = scaler.step = cls(scaler)
        return watched

    def __call__(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        stages = [staged for staged in self.stages if staged.optimizer is optimizer]
        for staged in stages:
            staged._stepped = False
        result = self.own(optimizer, *args, **kwargs)
        for staged in stages:
            if not staged._stepped:
                staged.rollback()
        return result

    def forget(self, staged: Staged) -> None:
        self.stages.remove(staged)
        if not self.stages and vars(self.scaler).get("step") is self:
            del self.scaler.step
            if getattr(self.own, "__self__", None) is not self.scaler:  # somebody else's
                self.scaler.step = self.own

    def __reduce__(self) -> Any:
        return _own_step, (self.scaler,)  # copies and files of a scaler are not watched


def _own_step(scaler: Any) -> Any:
    return MethodType(type(scaler).step, scaler)


class _Hook:
    """A method of a Staged as a hook of its model; in a copy of the model it does nothing."""

    def __init__(self, staged: Staged | None, name: str) -> None:
        self.staged, self.name = staged, name

    def __call__(self, *args: Any) -> None:
        if self.staged is not None:
            getattr(self.staged, self.name)(*args)

    def __reduce__(self) -> Any:
        return _Hook, (None, self.name)


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm with statistics that forwards change."""
    if isinstance(module, Normalizer):
        return not module.is_fixed and any(b is not None for b in module._buffers.values())
    tracked = module._buffers.get("running_mean")
    lazy = isinstance(tracked, nn.UninitializedBuffer)
    return tracked is not None and not lazy and kind_of(module) is not None


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    """All at once, type by type: a launch for dozens of small tables."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, value in zip(to, values, strict=True):
        pair = kinds.setdefault((target.device, target.dtype), ([], []))
        pair[0].append(target)
        pair[1].append(value.detach())
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)
