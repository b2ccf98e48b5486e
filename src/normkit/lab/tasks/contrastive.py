"""CAN: contrasts between the classes of two domains, of which one has no labels.

Kang et al. 2019, "Contrastive Adaptation Network for Unsupervised Domain Adaptation". The target
gets labels by spherical k-means, which starts from the centers of the source's classes; samples
far from their center, and classes with few samples, are left out. The contrastive domain
discrepancy (its eq. 3 to 5) then draws samples of one class together and those of others apart.
Numbers that the paper leaves open are those of the authors' code: five Gaussian kernels, twice as
wide each, about the mean squared distance of a pair of classes; features and probabilities alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KERNELS = 5
NARROWEST = 1e-5  # of a kernel: all samples may be alike
SETTLED = 0.005  # the mean move of centers that ends the clustering
ROUNDS = 100
CLASSES = 10  # of a batch
LEAST = 3  # samples of a class that counts, and of each class in a batch


class Clusters(NamedTuple):
    """The labels of both domains, on the CPU; -1 for a sample that is left out."""

    source: Tensor  # (N,) int64
    target: Tensor  # (M,) int64

    def classes(self) -> list[int]:
        """Those that both domains have enough samples of."""
        each = [labels[labels >= 0].bincount() for labels in self]
        size = min(len(counts) for counts in each)
        enough = (each[0][:size] >= LEAST) & (each[1][:size] >= LEAST)
        return [int(one) for one in enough.nonzero()[:, 0]]


def cluster(
    source: Tensor, labels: Tensor, target: Tensor, classes: int, threshold: float
) -> Clusters:
    """Labels for the target, from features (N, D) and (M, D) and the labels of the source.

    Distances are (1 − cosine) / 2; beyond ``threshold`` a sample is left out.
    """
    source, target = F.normalize(source.float(), dim=1), F.normalize(target.float(), dim=1)
    start = source.new_zeros(classes, source.shape[1]).index_add_(0, labels, source)
    centers = start = F.normalize(start, dim=1)
    for _ in range(ROUNDS):
        nearest = (target @ centers.T).argmax(1)
        moved = torch.zeros_like(centers).index_add_(0, nearest, target)
        empty = nearest.bincount(minlength=classes) == 0
        moved = torch.where(empty[:, None], start, F.normalize(moved, dim=1))
        change = ((1 - (moved * centers).sum(1)) / 2).mean()
        centers = moved
        if change < SETTLED:
            break
    cosine, nearest = (target @ centers.T).max(1)
    far = (1 - cosine) / 2 > threshold
    return Clusters(labels.cpu(), torch.where(far, -1, nearest).cpu())


class ClassBatches(NamedTuple):
    """Samples of a few classes for each step of an epoch: as many of each, class after class."""

    source: Tensor  # (steps, classes · each)
    target: Tensor
    each: int


def class_batches(
    clusters: Clusters, steps: int, batch: int, generator: torch.Generator
) -> ClassBatches | None:
    """Drawn for an epoch; None if fewer than two classes have samples enough to be contrasted."""
    known = clusters.classes()
    if len(known) < 2:
        return None
    chosen = min(CLASSES, len(known))
    each = max(LEAST, batch // chosen)
    members = [[(labels == one).nonzero()[:, 0] for one in known] for labels in clusters]
    drawn: list[list[Tensor]] = [[], []]
    for _ in range(steps):
        for one in torch.randperm(len(known), generator=generator)[:chosen].tolist():
            for rows, own in zip(drawn, members, strict=True):
                order = torch.randperm(len(own[one]), generator=generator)
                times = -(-each // len(order))  # a class may have fewer samples than that
                rows.append(own[one][order.repeat(times)[:each]])
    source, target = (torch.cat(rows).view(steps, chosen * each) for rows in drawn)
    return ClassBatches(source, target, each)


def contrastive_discrepancy(
    source: Sequence[Tensor], target: Sequence[Tensor], each: int, classes: int
) -> Tensor:
    """The discrepancy of samples within their class, less that to other classes.

    ``source`` and ``target`` are features (K·each, D) of one layer or several, whose kernels are
    added: those of K classes in the same order, ``each`` of a class. Sums over classes and pairs of
    them are divided by the numbers of the set's ``classes``, as in the authors' code.
    """
    within_source = within_target = across = source[0].new_zeros(())
    for one, other in zip(source, target, strict=True):
        s, t = (x.float().unflatten(0, (-1, each)) for x in (one, other))  # (K, each, D)
        ss, tt = (_distances(x, x) for x in (s, t))  # (K, each, each)
        st = _distances(s[:, None], t[None])  # (K, K, each, each)
        width = _widths(ss, tt, st)  # (K, K, 1, 1)
        within_source = within_source + _kernel(ss[:, None], width)
        within_target = within_target + _kernel(tt[None], width)
        across = across + _kernel(st, width)
    pairs = within_source + within_target - 2 * across  # (K, K)
    same = pairs.diagonal().sum()
    others = pairs.sum() - same
    return same / classes - others / max(classes * (classes - 1), 1)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared, of all pairs."""
    return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1)


def _widths(ss: Tensor, tt: Tensor, st: Tensor) -> Tensor:
    """The mean squared distance of the samples of two classes, without those to themselves."""
    each = ss.shape[-1]
    own = ss.sum((1, 2))[:, None] + tt.sum((1, 2))[None]
    pairs = 4 * each * each - 2 * each
    return ((own + 2 * st.sum((2, 3))) / pairs).detach()[..., None, None]


def _kernel(distances: Tensor, width: Tensor) -> Tensor:
    """The mean of a sum of Gaussian kernels over the pairs of samples, (K, K)."""
    widths = [width * 2.0 ** (i - KERNELS // 2) for i in range(KERNELS)]
    total = sum(torch.exp(-distances / w.clamp(min=NARROWEST)) for w in widths)
    assert isinstance(total, Tensor)
    return total.mean((2, 3))
