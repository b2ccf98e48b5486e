"""What happens to one batch: forward, loss, backward, and the step of the optimizer.

Nothing here waits for the device, and everything is read from and written to tensors that stay
where they are. So a step can be called, or recorded once and replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.lab.experiment import Train
from normkit.lab.train.objective import loss_of, right_of
from normkit.lab.train.precision import autocast, scaler
from normkit.lab.train.recording import WARM_UP
from normkit.layers.bcn import BCN

SPARE = WARM_UP + 2


class History:
    """Loss and number of right answers of every batch of an epoch, on the device."""

    def __init__(self, batches: int, device: torch.device) -> None:
        self.batches = batches
        # and room for the steps that are done to record one
        self.rows = torch.zeros(batches + SPARE, 2, dtype=torch.float64, device=device)
        self.next = torch.zeros(1, dtype=torch.long, device=device)

    def add(self, loss: Tensor, right: Tensor) -> None:
        row = torch.stack([loss.detach().double(), right.double()])
        self.rows.index_copy_(0, self.next, row[None])
        self.next.add_(1)

    def restart(self) -> None:
        self.next.zero_()


class Stepper:
    """A step of training, for one model and optimizer.

    With one batch a step, ``whole`` does it all. Otherwise ``gradients`` adds those of a batch,
    ``share`` being what the batch counts for, and ``update`` ends the step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: Train,
        history: History,
        followers: list[BCN],
    ) -> None:
        self.model, self.optimizer, self.train, self.history = model, optimizer, train, history
        self.followers = [layer for layer in followers if layer.update_every == "step"]
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.scaler = scaler(train.precision, self.device)
        if train.accumulate > 1:  # gradients that stay, to be added to
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)

    def whole(self, images: Tensor, labels: Tensor) -> None:
        """Gradients of a batch, and the update."""
        for parameter in self.parameters:
            parameter.grad = None
        self._backward(self._loss(images, labels))
        self._apply()

    def gradients(self, images: Tensor, labels: Tensor, share: Tensor) -> None:
        """Add the gradients of one batch of several to a step."""
        self._backward(self._loss(images, labels) * share)

    def update(self) -> None:
        """The step that the gradients so far ask for; then they are zero."""
        self._apply()
        torch._foreach_zero_([p.grad for p in self.parameters])

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with autocast(self.train.precision, self.device):
            logits = self.model(images)
        loss = loss_of(logits, labels, self.train.label_smoothing)
        self.history.add(loss, right_of(logits.detach(), labels))
        return loss

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _apply(self) -> None:
        if self.train.clip > 0:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.train.clip, foreach=True)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for layer in self.followers:
            layer.commit()
