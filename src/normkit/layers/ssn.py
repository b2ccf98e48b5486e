"""ssn: sparse switchable normalization, a mixture that settles on one kind of statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.simplex import corner_radius, sparsestmax
from normkit.core.statistics import LayerState
from normkit.errors import OptionError
from normkit.layers.sn import SN


class SSN(SN):
    """Sparse switchable normalization: sn with sparsestmax instead of softmax.

    Formula, k over instance, layer and batch statistics:
        mean = Σ_k sparsestmax(mean_weight, radius)_k · mean_k, var alike
        y = weight · (x − mean) / √(var + eps) + bias

    Statistics: as sn. While ``radius`` grows from 0 to that of the simplex's corners the
    mixture becomes sparse; once it is a single one it stays that one.

    Shapes: (N, C, *spatial) to the same.

    Use when: sn should end as one plain normalizer per layer.
    Avoid when: nobody raises the radius: give ``anneal_steps``, the number of training batches
    until it is full, or call ``set_radius`` from the training loop.

    Paper: Shao et al. 2019. Equal weights have no direction and stay equal until training moves
    them. momentum is the weight of the new value; the authors write 0.997 for our 0.003.

    from_batch_norm carries everything and gives the batch part 93 % of the mixture.

    >>> import torch, normkit as nk
    >>> layer = nk.SSN(8)
    >>> _ = layer.mean_weight.data.copy_(torch.tensor([0.1, 0.2, 0.3]))
    >>> layer.set_radius(1.0)  # clipped to the corners
    >>> layer.mixture(layer.mean_weight).tolist()
    [0.0, 0.0, 1.0]
    """

    card = Card(
        name="ssn",
        title="Sparse Switchable Normalization",
        paper="Shao et al. 2019",
        pools_samples=True,
    )
    no_domains = "its one mixture settles with the number of batches, whatever their domain"
    radius: Tensor
    mean_choice: Tensor
    var_choice: Tensor
    bn_start = 0.9  # sparsemax([0, 0, 0.9]) is 0.93 for the batch part and still trains

    def __init__(self, channels: int, *, anneal_steps: int | None = None, **options: Any) -> None:
        super().__init__(channels, **options)
        if anneal_steps is not None:
            self._positive("anneal_steps", anneal_steps)
            if not self.track_running_stats:
                raise OptionError("SSN counts batches for anneal_steps: track_running_stats=True.")
        self.anneal_steps = anneal_steps
        parts = self.mean_weight.shape[0]
        self.full_radius = corner_radius(parts)
        # (1,) and not (): torch.compile forgets writes to a buffer without axes (torch 2.13)
        self.register_buffer("radius", self._statistic(0.0, 1))
        self.register_buffer("mean_choice", self._statistic(0.0, parts))
        self.register_buffer("var_choice", self._statistic(0.0, parts))

    def set_radius(self, radius: float) -> None:
        """How far from an equal mixture the weights must be; clipped to that of the corners."""
        self.radius.fill_(min(max(radius, 0.0), self.full_radius))

    def map_reads_state(self) -> bool:
        return True

    def mixture(self, weight: Tensor) -> Tensor:
        """Weights that sum to one, at the present radius."""
        which = 0 if weight is self.mean_weight else 1
        return self._shares(self.state(), self.radius)[which]

    def shares(self, state: LayerState) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        radius = state["radius"]
        if state.training and self.anneal_steps is not None:
            seen = state["num_batches_tracked"].to(radius.dtype)
            radius = self.full_radius * (seen / self.anneal_steps).clamp(max=1).expand_as(radius)
        both = self._shares(state, radius)
        mean, var = both
        if not state.training:
            return mean, var, {}
        kept, settled = {"radius": radius}, both.detach()
        single = settled.amax(1) == 1  # once it is a single one it stays that one
        for i, name in enumerate(("mean_choice", "var_choice")):
            kept[name] = torch.where(single[i], settled[i], state[name])
        return mean, var, kept

    def _shares(self, state: LayerState, radius: Tensor) -> Tensor:
        """Of the mean and of the variance: (2, K), in one go, for a GPU starts each operation."""
        choice = torch.stack([state["mean_choice"], state["var_choice"]])
        weight = torch.stack([self.mean_weight, self.var_weight])
        share = sparsestmax(weight.to(choice.dtype), radius)
        return torch.where(choice.any(1, keepdim=True), choice, share)
