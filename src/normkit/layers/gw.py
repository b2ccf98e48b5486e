"""gw: group whitening, channel groups of each sample made uncorrelated."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normkit.core.card import Card
from normkit.core.groups import GroupPolicy, resolve_groups
from normkit.core.messages import title
from normkit.core.moments import Moments
from normkit.engine.dispatch import Path, looked_into
from normkit.engine.torch.operations import whiten_groups
from normkit.errors import OptionError, ShapeError
from normkit.layers.base import Normalizer
from normkit.layers.measured import Refusal

USUAL_GROUPS = 64


class GW(Normalizer):
    """Group whitening.

    Formula, with X (groups × values) the sample, its groups of consecutive channels as rows:
        Σ = cov(X) + eps · I
        y = weight · Σ^(−1/2) · (X − mean) + bias
        newton: Σ^(−1/2) by ``iterations`` steps P ← 1.5·P − 0.5·P³·Σ/tr(Σ); eigh: exactly

    Statistics: one mean per sample and group and one covariance between the groups per sample;
    the same in eval mode. No buffers.

    Shapes: (N, C, *spatial) to the same. Full rank needs C/groups · positions ≥ groups.

    The exact method has a gradient only where the eigenvalues differ: train with newton.

    Use when: a batch-free layer for XBN blocks that also decorrelates.
    Avoid when: speed matters; it needs a groups × groups matrix a sample.

    Paper: Huang et al. 2021, used in estimation-shift with 64 groups and 5 iterations. Five
    iterations do not converge for spread spectra: judge by the formula, not by whiteness. The
    released code has no eps and divides by zero on constant input: eps=0 for that reading.

    from_batch_norm carries weight and bias; the rest comes from each sample.

    >>> import torch, normkit as nk
    >>> layer = nk.GW(8, groups=4, method="eigh")
    >>> y = layer(torch.randn(2, 8, 9, 9))[0].reshape(4, -1)
    >>> torch.allclose(y @ y.T / y.shape[1], torch.eye(4), atol=1e-3)
    True
    """

    card = Card(
        name="gw",
        title="Group Whitening",
        paper="Huang et al. 2021; estimation-shift",
        family=False,
        same_in_eval=True,
    )

    def __init__(
        self,
        channels: int,
        *,
        groups: int | None = None,
        group_policy: GroupPolicy = "error",
        iterations: int = 5,
        method: str = "newton",
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self.group_policy = group_policy
        if groups is None:
            self.groups = resolve_groups(channels, USUAL_GROUPS, "gcd", owner="GW")
        else:
            self.groups = resolve_groups(channels, groups, group_policy, owner="GW")
        self.iterations = self._positive("iterations", iterations)
        self.method = self._choice("method", method, ("newton", "eigh"))
        if self.method == "eigh" and self.eps == 0:
            raise OptionError('GW expects eps > 0 with method="eigh".')

    def check_size(self, x: Tensor) -> None:
        if x[0].numel() == self.groups:
            raise ShapeError(
                f"{title(self)} expects more than one value per group, got input "
                f"{tuple(x.shape)} with {self.groups} groups. Try fewer groups."
            )

    def normalize(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        white = whiten_groups(x, self.groups, self.eps, self.iterations, self.method)
        return self.finish(white, residual, activation)

    def normalize_masked(
        self, x: Tensor, valid: Tensor, residual: Tensor | None, activation: str
    ) -> Tensor:
        options = self.groups, self.eps, self.iterations, self.method
        return self.finish(whiten_groups(x, *options, valid), residual, activation)

    def path(self, x: Tensor, *, compiled: bool | None = None, followed: bool = False) -> Path:
        name = "expression" if compiled or looked_into() else "torch"
        return Path(name, "there is no kernel for whitening")

    def not_in_onnx(self, any_size: bool) -> str:
        exact = self.method == "eigh"
        return "ONNX has no eigenvalues: try method='newton'" if exact else ""

    # ---------------------------------------------------------------- for diagnosis

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        return Refusal("its groups are whitened, so that no channel outweighs another")

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return Refusal("it multiplies a group of channels by a matrix")

    def standardized(self, x: Tensor, table: Moments, *, batch: bool) -> Tensor | Refusal:
        return whiten_groups(x.float(), self.groups, self.eps, self.iterations, self.method)
