"""Do the processes that train a model agree about its norms?"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from normkit.core.messages import aligned, counted
from normkit.distributed.meeting import Meeting, by_ranks
from normkit.errors import OptionError, RankError
from normkit.inspection import Site, survey
from normkit.inspection.checks import unwrapped
from normkit.inspection.statistics import statistics_of

PLACE = "check_distributed"
NOTABLE = 0.1  # of a standard deviation: about the error of a mean of 100 independent values
MOST = 8  # disagreements named in an error, and rows of a report


@dataclass(frozen=True)
class Disagreement:
    """How far the running statistics of one norm lie apart on the processes."""

    path: str
    mean: float
    """The largest distance of two running means of a channel, in standard deviations."""
    std: float
    """The largest ratio of two running deviations of a channel."""

    @property
    def notable(self) -> bool:
        return not (self.mean <= NOTABLE and self.std <= 1 + NOTABLE)


@dataclass(frozen=True)
class RankReport:
    """What processes agree about, and how far their running statistics lie apart."""

    ranks: int
    norms: int
    synchronised: int
    batches: int | None
    disagreements: tuple[Disagreement, ...]
    """Of each norm with running statistics, the largest first."""

    @property
    def agree(self) -> bool:
        """Whether no running statistics lie apart by more than a tenth of a deviation."""
        return not any(row.notable for row in self.disagreements)

    def __str__(self) -> str:
        batches = "" if self.batches is None else f", {counted(self.batches, 'batch')} each"
        lines = [
            f"{counted(self.ranks, 'process') if self.ranks == 1 else f'{self.ranks} processes'} "
            f"with the same {counted(self.norms, 'norm')}, {self.synchronised} of them "
            f"synchronised{batches}."
        ]
        far = [row for row in self.disagreements if row.notable]
        if not far:
            return lines[0] + " Their running statistics agree."
        lines.append(
            f"The running statistics of {len(far)} differ: a file saved by one process is not what "
            "the others trained. Try nk.sync(model), or nk.calibrate(model, loader) before saving."
        )
        table = [("norm", "means apart, in σ", "σ ratio")]
        table += [(r.path or "the model", f"{r.mean:.3g}", f"{r.std:.3g}") for r in far[:MOST]]
        return "\n".join([*lines, *aligned(table, right=(1, 2))])


def check_distributed(
    model: nn.Module,
    batches: Any = None,
    *,
    step: Callable[[], Any] | None = None,
    timeout: float = 30.0,
) -> RankReport:
    """Find out, before a run hangs, whether all processes would train the same norms.

    Every process calls it with its own model. They compare the norms, their order, options and
    modes, with whom each shares statistics, and how many ``batches`` there are (a number, or
    whatever has a length, such as a loader); then their running statistics, which the report is
    about. RankError on every process, and no hang, if something differs, or if one of them does not
    come within ``timeout`` seconds. The model may be wrapped by DDP or torch.compile.

    ``step`` is called once, such as ``lambda: loss(model(x), y).backward()``: a real step, watched.
    The processes meet before each norm, so that the error names the layer to which one of them did
    not come, came in another mode, or came in another order.

    >>> import normkit as nk
    >>> print(nk.RankReport(2, 20, 20, None, ()))  # what it gives for a ResNet-18 on two processes
    2 processes with the same 20 norms, 20 of them synchronised. Their running statistics agree.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise OptionError(
            "check_distributed expects processes that know of each other, but there is no process "
            "group. Try torch.distributed.init_process_group() before it."
        )
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise OptionError(f"check_distributed expects a timeout in seconds, got {timeout!r}.")
    sites = list(survey(unwrapped(model)))
    number = _length(batches)
    meeting = Meeting(float(timeout))
    mine = {"batches": number, "norms": [_described(site) for site in sites]}
    _compare([json.loads(m) for m in meeting.meet(PLACE, json.dumps(mine))])
    _refuse_loaded(sites)
    if step is not None:
        places = [(site.path or "the model", site.module) for site in sites]
        # code that is compiled already would not stop at hooks that come now
        with torch.compiler.set_stance("force_eager"), meeting.at_each(places):
            step()
    return RankReport(
        meeting.size,
        len(sites),
        sum(_partners(site) > 1 for site in sites),
        number,
        _disagreements(sites),
    )


def _length(batches: Any) -> int | None:
    if batches is None or isinstance(batches, int):
        return batches
    try:
        return len(batches)
    except TypeError:
        raise OptionError(
            f"check_distributed expects a number of batches or something with a length, got "
            f"{type(batches).__name__}. Leave it out if nobody knows how many there will be."
        ) from None


def _described(site: Site) -> list[str]:
    """A norm as text, by what has to be the same everywhere."""
    mode = "train" if site.norm.training else "eval"
    partners = _partners(site)
    shared = f"synchronised with {partners}" if partners > 1 else "not synchronised"
    if _without_group(site):
        shared = f"synchronised with {partners}, whose process group is not here"
    return [site.path or "the model", repr(site.norm), f"{mode} mode", shared]


def _partners(site: Site) -> int:
    if isinstance(site.norm, nn.SyncBatchNorm):
        group = site.norm.process_group
        return distributed.get_world_size() if group is None else distributed.get_world_size(group)
    processes = getattr(site.norm, "processes", None)
    return 1 if processes is None else int(processes.size)


def _without_group(site: Site) -> bool:
    """Whether it would share with processes that it does not know, as a model of a file."""
    processes = getattr(site.norm, "processes", None)
    if processes is None or processes.size == 1:
        return False
    try:
        distributed.distributed_c10d._resolve_process_group(processes.name)
    except (RuntimeError, ValueError):
        return True
    return False


def _refuse_loaded(sites: Sequence[Site]) -> None:
    """RankError where all processes agree, but a training step would be an error."""
    lost = [site.path or "the model" for site in sites if _without_group(site)]
    if lost:
        raise RankError(
            f"{counted(len(lost), 'norm')}, such as {lost[0]}, would share statistics with "
            "processes whose group is not here, as after loading a whole model from a file. Try "
            "nk.sync(model) again, or nk.sync(model, False)."
        )


def _compare(of_ranks: Sequence[dict[str, Any]]) -> None:
    """RankError with all that differs; each process has the same texts and raises the same."""
    found = []
    numbers = [str(mine["batches"]) for mine in of_ranks]
    if len(set(numbers)) > 1:
        found.append(f"the number of batches ({by_ranks(numbers)})")
    norms = [mine["norms"] for mine in of_ranks]
    if len({len(each) for each in norms}) > 1:
        found.append(f"the number of norms ({by_ranks([str(len(each)) for each in norms])})")
    for place, of_place in enumerate(zip(*norms, strict=False)):
        for facts in zip(*of_place, strict=True):
            if len(set(facts)) > 1:
                where = f"norm {place + 1}, {of_place[0][0]}"
                found.append(f"{where} ({by_ranks(facts)})")
                break  # a norm of another kind differs in more than is worth saying
    if found:
        rest = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
        raise RankError(
            f"The processes do not agree about {'; '.join(found[:MOST])}{rest}. Build the same "
            "model on every rank, call train() and eval() on all of them, and give each as many "
            "batches, for example by drop_last=True."
        )


# -------------------------------------------------------------------- running statistics


@torch.no_grad()
def _disagreements(sites: Sequence[Site]) -> tuple[Disagreement, ...]:
    kept = [(s.path, statistics_of(s.path, s.norm, s.kind)) for s in sites]
    read = [(path, found.held()) for path, found in kept if found is not None]
    if not read:
        return ()
    means, stds = ([pair[i] for _, pair in read] for i in (0, 1))
    least, most = _extremes(torch.cat([*means, *(var.sqrt() for var in stds)]))
    sizes = [len(mean) for mean in means]
    rows = []
    low, high = (table.split([*sizes, *sizes]) for table in (least, most))
    for i, (path, _) in enumerate(read):
        small, large = low[len(sizes) + i], high[len(sizes) + i]
        apart = (high[i] - low[i]) / large.clamp(min=1e-12)
        rows.append(
            Disagreement(path, float(apart.max()), float((large / small.clamp(min=1e-12)).max()))
        )
    rows.sort(key=lambda row: max(row.mean, row.std - 1), reverse=True)
    return tuple(rows)


def _extremes(table: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each entry over all processes; NaN where one has it."""
    both = torch.cat([table, -table])
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX)
    most, least = both.chunk(2)
    return -least, most
