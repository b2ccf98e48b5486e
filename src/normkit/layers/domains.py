"""Statistics of several domains in one layer: samples are pooled by an index.

A layer with ``domains=K`` keeps K sets of everything that batches change, as rows of its buffers,
and shares its parameters. Since ``coefficients`` is a pure function of moments and state, that
needs nothing of a layer: a forward in one domain starts from that domain's rows, and a batch of
several domains is one such function for each, of the samples that belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments
from normkit.core.processes import Processes
from normkit.core.recomputation import as_first_seen, is_recomputation
from normkit.core.statistics import LayerState, MapResult, StateUpdate
from normkit.core.trained import TrainedBN
from normkit.errors import OptionError, ShapeError
from normkit.layers.base import Normalizer


class DomainIndex:
    """Which domain each sample of a batch belongs to."""

    def __init__(self, index: Sequence[int] | Tensor) -> None:
        try:
            table = torch.as_tensor(index).detach().cpu()  # once: no layer waits for the host
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(
                "use_domain expects a domain, such as 0, or one for each sample, such as "
                f"[0, 0, 1] or a tensor, got {index!r}."
            ) from error
        if table.dim() != 1 or not len(table):
            raise OptionError(
                "use_domain expects a domain, or one for each sample, "
                f"got a table of shape {tuple(table.shape)}."
            )
        if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
            raise OptionError(f"use_domain expects whole numbers, got {table.dtype}.")
        table = table.long()
        order = table.argsort(stable=True)
        self.samples = len(table)
        self.largest, self.smallest = int(table.max()), int(table.min())
        present, sizes = table.unique(return_counts=True)
        self.sizes = dict(zip(present.tolist(), sizes.tolist(), strict=True))
        """How many samples each domain has that is here."""
        self._order = {order.device: order}
        self._back = {order.device: order.argsort()}

    def rows(self, device: torch.device) -> dict[int, Tensor]:
        """The samples of each domain that is here."""
        order = self._on(self._order, device)
        return dict(zip(self.sizes, order.split([*self.sizes.values()]), strict=True))

    def back(self, device: torch.device) -> Tensor:
        """From the samples domain after domain to those of the batch."""
        return self._on(self._back, device)

    def _on(self, tables: dict[torch.device, Tensor], device: torch.device) -> Tensor:
        if device not in tables:
            tables[device] = next(iter(tables.values())).to(device)
        return tables[device]

    def __repr__(self) -> str:
        return f"<DomainIndex of {self.samples} samples: {self.sizes}>"


class SameForAll(DomainIndex):
    """One domain for all samples, however many, where other processes may have other domains."""

    def __init__(self, domain: int, samples: int = 0) -> None:
        self.domain, self.samples = domain, samples
        self.largest = self.smallest = domain
        self.sizes = {domain: samples}

    def rows(self, device: torch.device) -> dict[int, Tensor]:
        return {self.domain: self.back(device)}

    def back(self, device: torch.device) -> Tensor:
        return torch.arange(self.samples, device=device)


Domain = int | DomainIndex


class OfDomains(Normalizer):
    """What a layer with running statistics knows of domains; without ``domains``, nothing."""

    no_domains: ClassVar[str] = ""
    """Why a layer cannot have domains; empty if it can."""
    shared_buffers: ClassVar[frozenset[str]] = frozenset({"nonfinite_batches", "arrivals"})
    """Buffers that all domains share, since no batch of a domain changes them, or any does."""
    domains: int | None
    domain: Domain = 0
    """The one that forwards are in, or one for each sample: set by ``use_domain``."""
    _seen: frozenset[int] = frozenset()

    def start_domains(self, domains: Any) -> None:
        """Check the option; before the first buffer is made."""
        name = type(self).__name__
        if domains is not None:
            if self.no_domains:
                raise OptionError(f"{name} cannot have domains: {self.no_domains}.")
            whole = isinstance(domains, int) and not isinstance(domains, bool)
            if not whole or domains < 2:
                raise OptionError(
                    f"{name} expects domains to be a whole number from 2 on, got {domains!r}."
                )
        self.domains, self.domain = domains, 0

    def keep_domains(self, domains: int) -> None:
        """Keep statistics of so many domains from now on, which all start with those it has."""
        if self.domains not in (None, domains):
            raise OptionError(f"{title(self)} has {self.domains} domains already, got {domains}.")
        if self.domains is None:
            self.start_domains(domains)
            for name, table in self._buffers.items():
                if table is not None and self.has_rows(name):
                    self._buffers[name] = table.expand(domains, *table.shape).clone()

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """With domains, a row for each."""
        if tensor is not None and self.has_rows(name):
            assert self.domains is not None
            tensor = tensor.expand(self.domains, *tensor.shape).clone()
        super().register_buffer(name, tensor, persistent)

    def has_rows(self, name: str) -> bool:
        """Whether a buffer has a row for each domain."""
        return self.domains is not None and name not in self.shared_buffers

    @property
    def mixes_domains(self) -> bool:
        """Whether samples of one batch may belong to several domains."""
        return self.domains is not None and not isinstance(self.domain, int)

    @property
    def splits_batch(self) -> bool:
        """Whether a forward pools by domain: for its own samples, or for those of others."""
        if self.domains is None:
            return False
        return not isinstance(self.domain, int) or (self.shares_domains() and self.training)

    def shares_domains(self) -> bool:
        """Whether there are other processes, whose samples may be of other domains."""
        return False

    def check_domain(self, domain: Domain) -> None:
        known = self.domains or 0
        first, last = (
            (domain, domain) if isinstance(domain, int) else (domain.smallest, domain.largest)
        )
        for wrong in (first, last):
            if not 0 <= wrong < known:
                raise OptionError(
                    f"{title(self)} has {known} domains, 0 to {known - 1}, got {wrong}."
                )

    def follow_domain(self, domain: Domain) -> None:
        """Be in the domain of a layer that this one has come for, where it has that one too."""
        last = domain if isinstance(domain, int) else domain.largest
        if last < (self.domains or 0):
            self.domain = domain

    def check_single_domain(self) -> None:
        """Where statistics of one domain are meant, there must be one."""
        if self.mixes_domains:
            raise OptionError(
                f"{title(self)} has a domain for each sample, where one is needed. "
                "Try nk.use_domain(model, 0)."
            )

    # ---------------------------------------------------------------- the rows of a domain

    def of_domain(self, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of buffers, as of a checkpoint, for the domain in use."""
        return {name: t for name, t in self.kept(dict(tables)).items() if t is not None}

    def kept(
        self,
        tables: dict[str, Tensor | None] | None = None,
        domain: Domain | None = None,
    ) -> dict[str, Tensor | None]:
        """The buffers, as one domain has them: rows are views, that can be written to.

        All rows, if samples belong to several domains.
        """
        tables = self._buffers if tables is None else tables
        domain = self.domain if domain is None else domain
        if self.domains is None or not isinstance(domain, int):
            return tables
        return {
            name: table[domain] if table is not None and self.has_rows(name) else table
            for name, table in tables.items()
        }

    def states_of_domains(self) -> list[LayerState]:
        """The state of each domain; the state, without any."""
        if self.domains is None:
            return [LayerState(self.training, self._buffers)]
        return [
            LayerState(self.training, self.kept(domain=d), domain=d) for d in range(self.domains)
        ]

    def state_for(self, training: bool) -> LayerState:
        """What a forward in a mode would start from, for those who only look."""
        return LayerState(training, self.kept(), domain=self.domain if self.domains else None)

    def sharing(self) -> Processes | None:
        """With which processes a forward shares its statistics."""
        return None

    def state_of_domain(self, statistics: dict[str, Tensor | None]) -> LayerState:
        """What a forward starts from."""
        domain = self.domain_of_forward()
        if not self.training:
            self.check_seen(domain)
        processes = self.sharing()
        if processes is not None and isinstance(domain, int):
            # other processes may be in another one: all go through every domain, and so meet
            domain = SameForAll(domain)
        rows, again = self.kept(statistics, domain), is_recomputation()
        return LayerState(self.training, rows, again, None, processes, domain)

    def domain_of_forward(self) -> Domain:
        """The domain, or that of the forward that activation checkpointing repeats."""
        if torch.compiler.is_compiling():
            return self.domain
        seen = as_first_seen(("domain", id(self)), lambda: self.domain)
        return self.domain if seen is None else seen

    def check_seen(self, domain: Domain) -> None:
        """Refuse statistics that no batch has entered, where those of other domains have some.

        A new layer, in which none has any, is what it is: like every new batch norm.
        """
        wanted = {domain} if isinstance(domain, int) else set(domain.sizes)
        if wanted <= self._seen or torch.compiler.is_compiling():
            return
        never = self.never_seen()
        if never is None:
            return
        assert self.domains is not None
        if missing := sorted(wanted & never):
            if len(never) == self.domains:
                return
            raise OptionError(
                f"{title(self)} has never seen domain {missing[0]}: its statistics are those of a "
                f"new layer, while domain {min(set(range(self.domains)) - never)} has some. Train "
                f"on it, or try nk.calibrate(model, loader, domain={missing[0]})."
            )
        self._seen = self._seen | wanted

    def never_seen(self) -> set[int] | None:
        """Domains whose statistics are those of a new layer; None if that cannot be known here."""
        count = self._buffers.get("num_batches_tracked")
        if count is None or type(count) is not Tensor or count.device.type == "meta":
            return None
        if torch._C._are_functorch_transforms_active():
            return None
        # counters may be lost on the way, as in checkpoints of other tools: look at the means too
        mean = self._buffers["running_mean"]
        assert mean is not None
        new = (count == 0) & (mean == 0).all(1)
        return set(new.nonzero().flatten().tolist())

    # ---------------------------------------------------------------- forwards

    def compute(self, moments: Moments | None, state: LayerState) -> MapResult:
        if not isinstance(state.domain, DomainIndex):
            return self.coefficients(moments, state)
        samples = state.domain.samples if moments is None else moments.mean.shape[0]
        return each_domain(
            state.domain, samples, moments, state, self, lambda m, s, _: self.coefficients(m, s)
        )

    def _heard(self, x: Tensor, moments: Moments | None, state: LayerState) -> MapResult:
        domain = state.domain
        if not isinstance(domain, DomainIndex):
            return super()._heard(x, moments, state)
        looks = type(self).observe is not Normalizer.observe
        if self.exchange is not None and moments is not None:
            if isinstance(domain, SameForAll) and not looks:
                return super()._heard(x, moments, state)  # it is that of the other parts as well
            raise OptionError(
                f"{title(self)} shares its statistics with other parts of the batch, where a "
                "domain for each sample is not known. Try one domain after the other."
            )
        one = super()._heard  # listeners hear of each domain, which is a batch of its own
        return each_domain(
            *(domain, x.shape[0], moments, state, self),
            lambda m, s, rows: one(x[rows] if looks else x, m, s),
        )

    def description(self, x: Tensor, state: LayerState) -> Any:
        # no kernel pools by an index
        return None if self.splits_batch else super().description(x, state)

    def recorded(self, *step: Any) -> Any:
        # a recorded step holds the rows of one domain
        return None if self.domains is not None else super().recorded(*step)

    def varies(self) -> str:
        if self.mixes_domains:
            return "it has a domain for each sample: try use_domain(model, 0)"
        return super().varies()

    # ---------------------------------------------------------------- from and to files and others

    def channel_statistics(self) -> tuple[Tensor, Tensor] | None:
        """Mean and variance of each channel, from what the layer keeps; None if it keeps none."""
        raise NotImplementedError

    def starts_of_domains(self, bn: TrainedBN) -> list[tuple[TrainedBN, dict[str, Tensor | None]]]:
        """What buffers start from; with as many domains as the norm has, each from its own."""
        if not bn.each_domain or len(bn.each_domain) != self.domains:
            return [(bn, self._buffers)]
        self.domain = bn.domain
        return [
            (bn.having(mean=mean, var=var, batches=batches), self.kept(domain=domain))
            for domain, (mean, var, batches) in enumerate(bn.each_domain)
        ]

    def with_domains(self, bn: TrainedBN) -> TrainedBN:
        """With the statistics of all domains, and the one in use."""
        if self.domains is None:
            return bn
        found, before = [], self.domain
        assert isinstance(before, int)  # or there would be no statistics of channels
        try:
            for domain in range(self.domains):
                self.domain = domain
                statistics, batches = self.channel_statistics(), self.batch_counter()
                assert statistics is not None and batches is not None
                mean, var = statistics
                found.append((mean.detach(), var.detach(), batches))
        finally:
            self.domain = before
        return replace(bn, each_domain=tuple(found), domain=before)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._seen = frozenset()
        super()._load_from_state_dict(state_dict, prefix, *args)
        mine, theirs = self._buffers.get("running_mean"), state_dict.get(f"{prefix}running_mean")
        if mine is None or not isinstance(theirs, Tensor) or theirs.shape == mine.shape:
            return
        if 2 in (mine.dim(), theirs.dim()) and theirs.shape[-1:] == mine.shape[-1:]:
            has = f"with {len(theirs)} domains" if theirs.dim() == 2 else "without domains"
            hint = f"The checkpoint is of a model {has}: load it into such a one."
            if self.domains:
                hint += (
                    f' Then nk.convert(model, "bn", domains={self.domains}), or its kind of norm: '
                    "every domain starts with the statistics of the one in use."
                )
            errors = args[-1]  # of all layers, which torch lists
            if hint not in errors:
                errors.append(hint)


# -------------------------------------------------------------------- a batch of several domains


def each_domain(
    domain: DomainIndex,
    samples: int,
    moments: Moments | None,
    state: LayerState,
    layer: OfDomains,
    result: Callable[[Moments | None, LayerState, Tensor], MapResult],
) -> MapResult:
    """What ``result`` makes of the samples of each domain, as one map and one set of statistics.

    It gets their moments, the state of the domain, and which samples they are.
    """
    if isinstance(domain, SameForAll):
        domain = SameForAll(domain.domain, samples)
    if samples != domain.samples:
        raise ShapeError(
            f"{title(layer)} got {samples} samples, but use_domain was told the domains of "
            f"{domain.samples}. Where samples are not those of the batch, as proposals or frames, "
            "run the domains one after the other: use_domain(model, 0)."
        )
    tables = [t for t in state.statistics.values() if t is not None]
    device = tables[0].device if moments is None else moments.mean.device
    results: dict[int, MapResult] = {}
    here = domain.rows(device)
    if state.processes is not None:  # others may have what is missing here: all wait for each other
        none = domain.back(device)[:0]
        here = {one: here.get(one, none) for one in range(layer.domains or 0)}
    for one, rows in here.items():
        part = None if moments is None else moments.rows(rows)
        rows_of_state = layer.kept(dict(state.statistics), one)
        own = LayerState(
            *(state.training, rows_of_state, state.again, state.observed, state.processes, one)
        )
        results[one] = result(part, own, rows)
    back = domain.back(device)

    def joined(tables: list[Tensor | None]) -> Tensor | None:
        if any(t is None for t in tables):
            return None
        sizes = [len(rows) for rows in here.values()]
        parts = [t.expand(n, -1) for t, n in zip(tables, sizes, strict=True) if t is not None]
        return torch.cat(parts)[back]

    maps = [one.map for one in results.values()]
    # a table that one domain lacks is one of zeros
    zeros = torch.zeros_like(maps[0].scale)
    columns = []
    for column in zip(*maps, strict=True):
        lacking = all(t is None for t in column)
        columns.append(None if lacking else joined([zeros if t is None else t for t in column]))
    gate = joined([one.gate for one in results.values()])
    update = _together({one: r.update for one, r in results.items()}, state, layer)
    return MapResult(Coefficients(*columns), update, gate)  # type: ignore[arg-type]


def _together(
    updates: dict[int, StateUpdate | None], state: LayerState, layer: OfDomains
) -> StateUpdate | None:
    """The rows of all domains; those that are not here stay."""
    given = {one: update for one, update in updates.items() if update is not None}
    if not given:
        return None
    assert layer.domains is not None
    every = range(layer.domains)
    values = {}
    for name in {name: None for update in given.values() for name in update.values}:
        old = state.statistics[name]
        assert old is not None
        new = {one: update.values.get(name, old[one]) for one, update in given.items()}
        values[name] = torch.stack(
            [new.get(one, old[one]).reshape(old[one].shape) for one in every]
        )
    counting = {one: u for one, u in given.items() if u.finite is not None}
    if not counting:
        return StateUpdate(values)
    some = next(iter(counting.values())).finite
    assert some is not None
    yes, no = torch.ones_like(some), torch.zeros_like(some)
    finite = [counting[one].finite if one in counting else yes for one in every]
    counted = [_counted(counting.get(one), yes, no) for one in every]
    return StateUpdate(values, torch.stack(finite), torch.stack(counted))  # type: ignore[arg-type]


def _counted(update: StateUpdate | None, yes: Tensor, no: Tensor) -> Tensor:
    if update is None:
        return no
    return yes if update.counted is None else update.counted.reshape(yes.shape)
