"""Fine-tuning of Lite0 on a domain of PACS: BN kept, frozen, converted, fitted, distilled.

Every run starts from ImageNet weights and a classifier of zeros and trains all parameters by Adam,
with a rate that rises over a tenth of the steps and falls to zero. Four learning rates are tried
with the seeds of ``CHOOSING``; the one that is best on the validation part, in the mean of these,
trains the other seeds too. A seed decides which images are drawn, flipped, and fitted on.

Several runs share a GPU, each on its stream; a step is a CUDA graph, so that the host does nothing
but replay it.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normkit as nk
from benchmarks.fitted import rows
from benchmarks.fitted.conversions import plain
from benchmarks.fitted.pacs import CLASSES, Pacs, inputs_of
from normkit.lab.train.cuda_graph import capture

METHODS = ("bn", "frozen", "gn", "fitted", "distilled")
TARGET = "gn:1"  # of the last three
RATES = (6.25e-5, 2.5e-4, 1e-3, 4e-3)
CHOOSING = (0, 1)
SEEDS = (0, 1, 2, 3, 4)
WARM = 0.1  # of the steps
AT_ONCE = 10  # steps that a stream gets at a time, and has waiting at most twice
PATIENCE = 120.0  # seconds to wait for a start that nobody makes
SPARE = 8  # steps that recording takes, more than are trained


@dataclass(frozen=True)
class FineTune:
    """One run of a method and batch size."""

    domain: str
    lr: float
    seed: int


def network(backbone: nn.Module, method: str) -> nn.Module:
    """What is trained: the backbone as the method has it, and a classifier of zeros."""
    body = copy.deepcopy(backbone) if method in ("bn", "frozen") else plain(backbone, TARGET)
    if method == "frozen":
        nk.freeze(body)
    head = nn.Linear(int(backbone.num_features), CLASSES)  # type: ignore[arg-type]
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(body, head)


class Slot:
    """A place for runs of one method and batch size: a model, and its step as a graph."""

    def __init__(self, model: nn.Module, pacs: Pacs, batch: int, steps: int) -> None:
        self.pacs, self.batch, self.steps = pacs, batch, steps
        device = pacs.images.device
        self.cuda = device.type == "cuda"
        self.model = copy.deepcopy(model).to(device).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=self.rate, fused=True, capturable=self.cuda
        )
        length = steps + SPARE
        self.now = torch.zeros(1, dtype=torch.long, device=device)
        self.rates = torch.zeros(length, device=device)
        self.order = torch.zeros(length, batch, dtype=torch.long, device=device)
        self.flips = torch.zeros(length, batch, dtype=torch.bool, device=device)
        self.run: FineTune | None = None
        self.left = 0
        self.counts: Tensor | None = None
        self.events: deque[Any] = deque()
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.step: Callable[[], None] = self._step
        if self.stream is not None:
            torch.cuda.synchronize(device)  # everything above was made on another stream
            try:
                replay = capture(self._step, self.stream)
            except RuntimeError as error:  # slower then, but the same numbers
                replay = str(error)
            if isinstance(replay, str):
                print(f"not recorded: {replay}", flush=True)
            else:
                self.step = replay

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _step(self) -> None:
        some = self.order.index_select(0, self.now)[0]
        flip = self.flips.index_select(0, self.now)[0]
        self.rate.copy_(self.rates.index_select(0, self.now)[0])
        x = inputs_of(self.pacs.images.index_select(0, some))
        x = torch.where(flip[:, None, None, None], x.flip(3), x)
        for parameter in self.parameters:
            parameter.grad = None
        F.cross_entropy(self.model(x), self.pacs.labels.index_select(0, some)).backward()
        self.optimizer.step()
        self.now.add_(1)

    # ---------------------------------------------------------------- a run

    @torch.no_grad()
    def begin(self, run: FineTune, start: dict[str, Tensor]) -> None:
        self.run, self.left, self.counts = run, self.steps, None
        draws = drawn(self.pacs.part(run.domain, "train").cpu(), run.seed, self.steps, self.batch)
        with self.here():
            own = self.model.state_dict()
            for name, value in own.items():
                value.copy_(start[name])
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
            self.order[: self.steps].copy_(draws[0])
            self.flips[: self.steps].copy_(draws[1])
            self.rates[: self.steps].copy_(run.lr * schedule(self.steps))
            self.now.zero_()

    def advance(self) -> bool:
        """Give the device some steps, if it waits for them; False if there was nothing to do."""
        while self.events and self.events[0].query():
            self.events.popleft()
        if self.run is None or not self.left or len(self.events) > 1:
            return False
        with self.here():
            for _ in range(min(AT_ONCE, self.left)):
                self.step()
            self.left -= min(AT_ONCE, self.left)
            if not self.left:
                self.counts = torch.stack([self._right("validation"), self._right("test")])
            if self.stream is not None:
                self.events.append(self.stream.record_event())
        return True

    @torch.no_grad()
    def _right(self, part: str) -> Tensor:
        """The share of right answers, on the device."""
        assert self.run is not None
        chosen = self.pacs.part(self.run.domain, part)
        self.model.eval()
        right = [
            (self.model(x).argmax(1) == labels).sum() for x, labels in self.pacs.batches(chosen)
        ]
        self.model.train()
        return torch.stack(right).sum() / len(chosen)

    def result(self) -> tuple[float, float] | None:
        """Shares of right answers in validation and test part, if the run has ended."""
        if self.counts is None or any(not event.query() for event in self.events):
            return None
        validation, test = self.counts.tolist()
        return validation, test


def drawn(part: Tensor, seed: int, steps: int, batch: int) -> tuple[Tensor, Tensor]:
    """Which images each step takes, epoch after epoch, and which of them are flipped."""
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch / len(part))
    order = torch.cat([torch.randperm(len(part), generator=generator) for _ in range(epochs)])
    flips = torch.rand(steps, batch, generator=generator) < 0.5
    return part[order[: steps * batch]].reshape(steps, batch), flips


def schedule(steps: int) -> Tensor:
    """Shares of the learning rate: up over the first steps, then a half cosine down."""
    at = torch.arange(steps) + 0.5
    warm = WARM * steps
    falling = 0.5 * (1 + torch.cos(math.pi * (at - warm).clamp(min=0) / (steps - warm)))
    return torch.minimum(at / warm, falling)


# -------------------------------------------------------------------- all runs of a method


def fine_tune(
    backbone: nn.Module,
    pacs: Pacs,
    method: str,
    batch: int,
    steps: int,
    out: Path,
    *,
    domains: Sequence[str],
    start: Callable[[str, str, int], dict[str, Tensor] | None],
    slots: int,
    rates: Sequence[float] = RATES,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train whatever is missing in the file; False if it was stopped before all was there.

    ``start(method, domain, seed)`` is the converted backbone of a fitted method, None as long as
    nobody has made it.
    """
    key = {"kind": "finetune", "method": method, "batch": batch, "steps": steps}
    done = {FineTune(r["domain"], r["lr"], r["seed"]): r for r in rows.read(out, **key)}
    model = network(backbone, method)
    places = _Places(method, model, pacs.images.device, start)
    waiting = deque(
        FineTune(d, lr, seed) for d in domains for seed in CHOOSING for lr in rates
    )  # the first domain first
    waiting = deque(run for run in waiting if run not in done)
    settled: set[str] = set()

    def settle(domain: str) -> None:
        """When all rates of a domain were tried, the other seeds at the best."""
        tried = [done.get(FineTune(domain, lr, seed)) for lr in rates for seed in CHOOSING]
        if domain in settled or not all(tried):
            return
        settled.add(domain)
        lr = best_rate([row for row in tried if row is not None])
        print(f"{method}, batch {batch}, {domain}: learning rate {lr:g}", flush=True)
        more = [FineTune(domain, lr, seed) for seed in SEEDS if seed not in CHOOSING]
        waiting.extendleft(run for run in reversed(more) if run not in done)

    for domain in domains:
        settle(domain)
    count = min(slots, len(waiting))
    team = [Slot(model, pacs, batch, steps) for _ in range(count)]
    last = time.monotonic()
    while waiting or any(slot.run for slot in team):
        if stop() or time.monotonic() - last > PATIENCE:
            return False
        busy = False
        for slot in team:
            result = slot.result() if slot.run else None
            if slot.run and result:
                row = {**key, **asdict(slot.run), "validation": result[0], "test": result[1]}
                rows.append(out, row)
                done[slot.run] = row
                domain, slot.run = slot.run.domain, None
                settle(domain)
            if slot.run is None and waiting:
                chosen = next((run for run in waiting if places.ready(run)), None)
                if chosen is not None:
                    waiting.remove(chosen)
                    slot.begin(chosen, places[chosen])
            busy = slot.advance() or busy
            if slot.run:
                last = time.monotonic()
        if not busy:
            time.sleep(0.0005 if any(slot.run for slot in team) else 0.1)
    return True


def best_rate(tried: Sequence[rows.Row]) -> float:
    """The rate with the best mean on the validation part; of equal ones the smaller."""
    means: dict[float, list[float]] = {}
    for row in tried:
        means.setdefault(row["lr"], []).append(row["validation"])
    return max(sorted(means), key=lambda lr: sum(means[lr]) / len(means[lr]))


class _Places:
    """Where runs start from: states of the whole network, by domain and seed."""

    def __init__(
        self,
        method: str,
        model: nn.Module,
        device: torch.device,
        start: Callable[[str, str, int], dict[str, Tensor] | None],
    ) -> None:
        self.method, self.device, self.start = method, device, start
        self.common = {n: t.detach().clone().to(device) for n, t in model.state_dict().items()}
        self.own: dict[tuple[str, int], dict[str, Tensor]] = {}

    def ready(self, run: FineTune) -> bool:
        if self.method not in ("fitted", "distilled"):
            return True
        key = run.domain, run.seed
        if key not in self.own:
            state = self.start(self.method, *key)
            if state is None:
                return False
            moved = {f"0.{name}": tensor.to(self.device) for name, tensor in state.items()}
            if self.device.type == "cuda":  # before another stream reads them
                torch.cuda.current_stream().synchronize()
            self.own[key] = self.common | moved
        return True

    def __getitem__(self, run: FineTune) -> dict[str, Tensor]:
        return self.own.get((run.domain, run.seed), self.common)
