"""What a training loop asks and tells a normalizer, with answers for most layers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from normkit.core.messages import title
from normkit.errors import OptionError


class FromTraining(nn.Module):
    """Sizes of batches, learning rates, steps of the optimizer, scales before training."""

    not_staged: ClassVar[frozenset[str]] = frozenset()
    """Buffers that stay what they are when a step and its statistics are undone."""
    weight: Tensor | None
    bias: Tensor | None

    @property
    def batch_multiple(self) -> int:
        """Of how many samples a training batch must be a multiple."""
        return 1

    def set_worker_batch(self, samples: int) -> None:
        """Take the statistics of runs of so many samples alone, as workers with few would."""
        if samples % self.batch_multiple:
            raise OptionError(
                f"{title(self)} links {self.batch_multiple} samples, which do not fit into workers "
                f"with {samples}. Try a multiple of {self.batch_multiple}."
            )

    @property
    def needs_update_rate(self) -> bool:
        """Whether it must be told the learning rate, which it holds in its buffer ``rate``."""
        return False

    def set_update_rate(self, rate: float) -> None:
        """The learning rate of the next forward, for a layer whose statistics move at it."""

    def commit(self) -> None:
        """After a step of the optimizer: let statistics collected until then count."""

    @torch.no_grad()
    def scale_by(self, scale: Tensor) -> None:
        """Multiply the scales, one a channel, before training; by zeros the output is zero."""
        if self.weight is not None:
            self.weight.mul_(scale.reshape(-1, *(1,) * (self.weight.dim() - 1)))
            if self.bias is not None and not scale.any():
                self.bias.zero_()  # that of a kernel may have been drawn
