"""dn: dynamic normalization, learned links between samples and channels. A reconstruction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.card import Card
from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState, MapResult, StateUpdate
from normkit.core.trained import TrainedBN
from normkit.errors import OptionError, ShapeError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.measured import MIXTURE, Refusal

GATE = 1e-6  # the sign is the state; small, for training to change it, but not 0 in float16


class DN(BatchNormalizer):
    """Dynamic normalization, experimental: which samples and channels share statistics is learned.

    Formula, with m and v the moments of each sample and channel:
        mean = A m, var = A (v + (m − mean)²), A an average over blocks
        y = weight · (x − mean) / √(var + eps) + bias
        blocks double in size for every gate that is open: channel_gates over runs of 2, 4, …
        channels, batch_gates over runs of 2, 4, … samples

    Statistics: in between those of in, gn, ln (channel gates) and bn (batch gates); eval mode
    uses running statistics per channel as soon as one batch gate is open.

    Shapes: (N, C, *spatial) to the same; C and ``batch`` are powers of two, and in training N
    is a multiple of ``batch``.

    Use when: exploring which statistics a network would choose.
    Avoid when: results are to be compared with the paper's.

    Paper: Luo et al. 2019 (ICML). No code was published and its numbers are quoted in ws-bcn:
    this is a reconstruction from the abstract, with binary gates trained straight through.
    Only the special cases are tested: ``start`` "in", "ln", "gn" and "bn" (with batch > 1).

    from_batch_norm starts with all batch gates open: exact in eval mode.

    >>> import torch, normkit as nk
    >>> x = torch.randn(4, 8, 5, 5)
    >>> torch.allclose(nk.DN(8, start="ln")(x), nk.LN(8)(x), atol=1e-5)
    True
    """

    card = Card(
        name="dn",
        title="Dynamic Normalization",
        paper="Luo et al. 2019 (ICML), reconstructed",
        exact_from_bn=True,
        experimental=True,
        links_samples=True,
    )
    withheld = frozenset({"virtual_batch"})
    no_domains = "it links neighbouring samples, whatever their domain"
    beyond_batch_norm = ("links",)
    batch_gates: Tensor | None
    channel_gates: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        batch: int = 1,
        start: str = "ln",
        groups: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self._withhold(virtual_batch=(self.virtual_batch, None))
        self.batch = self._positive("batch", batch)
        self.start = self._choice("start", start, ("ln", "in", "gn", "bn"))
        if start == "bn" and batch == 1:
            raise OptionError('DN expects batch > 1 with start="bn", got batch=1.')
        if groups is not None and start != "gn":
            raise OptionError(f'DN expects groups with start="gn" only, got start={start!r}.')
        if start == "gn":
            groups = self._positive("groups", min(32, channels) if groups is None else groups)
        self.groups = groups
        if groups is not None and channels % groups:
            raise OptionError(f"DN expects groups to divide {channels} channels, got {groups}.")
        wide = {"ln": channels, "gn": channels // (groups or 1)}.get(start, 1)
        linked = batch if start == "bn" else 1
        self.register_parameter("channel_gates", self._gates(channels, "channels", wide))
        self.register_parameter("batch_gates", self._gates(batch, "batch", linked))

    def _gates(self, size: int, option: str, open_blocks: int) -> nn.Parameter | None:
        """One gate a doubling, the first for neighbours; those within the open blocks are open."""
        count, open_count = size.bit_length() - 1, open_blocks.bit_length() - 1
        if size != 1 << count or open_blocks != 1 << open_count:
            raise OptionError(
                f"DN expects {option} and its blocks to be powers of two, got {size}."
            )
        if count == 0:
            return None
        gates = self._new(-GATE, count)
        with torch.no_grad():
            gates[:open_count] = GATE
        return gates

    @property
    def batch_multiple(self) -> int:
        return self.batch

    def uses_moments(self) -> bool:
        return True

    def check_size(self, x: Tensor) -> None:
        if self.uses_batch() and x.shape[0] % self.batch:
            raise ShapeError(
                f"{title(self)} links {self.batch} samples and expects a multiple of that in "
                f"training, got {x.shape[0]}. Try drop_last=True of the loader; where samples are "
                "not images, such as proposals of a detector, leave the layer out, or batch=1."
            )

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        assert moments is not None
        statistics, update = self.linked(moments, state)
        return MapResult(statistics.standardizing(self.eps).then(self.weight, self.bias), update)

    def linked(self, moments: Moments, state: LayerState) -> tuple[Moments, StateUpdate | None]:
        """The statistics that open gates pool, tables (N, C), and new ones."""
        mean, var = moments.mean, moments.var
        update = None
        if self.uses_batch(state):
            update = self.tracked(self.shared(moments.pooled(samples=None), state), state)
            count = moments.count
            weight = count.mT if isinstance(count, Tensor) else None  # (1, N), of a mask
            linked = _linked(mean.mT, var.mT, self.batch_gates, weight)  # over samples
            mean, var = (t.mT for t in linked)
        elif self.batch_gates is not None:
            running, some = self.running(state), (self.batch_gates >= 0).any()
            mean = torch.where(some, running.mean, mean)
            var = torch.where(some, running.var, var)
        return Moments(*_linked(mean, var, self.channel_gates), 1), update

    @torch.no_grad()
    def tracked(self, pooled: Moments, state: LayerState) -> StateUpdate | None:
        # the number of values may be a symbol, of exported programs
        many = isinstance(pooled.count, Tensor) or pooled.count > 1
        return super().tracked(pooled, state) if many else None

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        return {**super().options_from(bn, asked), "batch": 2, "start": "bn"}

    # ---------------------------------------------------------------- for diagnosis

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        return MIXTURE

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return MIXTURE

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        return self.linked(table, self.state_for(batch))[0].standardizing(self.eps)


def _linked(
    mean: Tensor, var: Tensor, gates: Tensor | None, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Moments (…, S) pooled over runs of 2, 4, … entries, a doubling for each open gate.

    Runs are merged pair by pair about their common mean, so nothing cancels. The gate's own
    gradient is that of the step it takes: straight through the sign. ``weight`` (1, S) says how
    many values entries have, where they do not have the same number.
    """
    if gates is None:
        return mean, var
    opened = (gates >= 0).to(mean.dtype) + gates - gates.detach()
    own: Tensor | float = 0.5
    theirs: Tensor | float = 0.5
    for i, gate in enumerate(opened):
        m, v = (table.unflatten(1, (-1, 2, 1 << i)) for table in (mean, var))
        if weight is not None:
            w = weight.unflatten(1, (-1, 2, 1 << i))
            both = w.sum(2, keepdim=True)
            share = w.to(mean.dtype) / both.clamp(min=1)
            own, theirs = share, share.flip(2)
            weight = torch.where(gates[i] >= 0, both, w).flatten(1)
        # of an entry and its partner: what the pair has more than the entry alone
        apart = m.flip(2) - m
        square, moved = apart.square(), theirs * apart
        wider = theirs * (v.flip(2) - v + own * square)
        # the last term is zero for a gate of 0 or 1, but not its gradient
        var = v + gate * wider + gate * (1 - gate) * theirs * theirs * square
        mean, var = (m + gate * moved).flatten(1), var.flatten(1)
    return mean, var
