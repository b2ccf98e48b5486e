"""The statistics of what norms get as input, over all batches, and how sure they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit.calibration.fingerprint import Fingerprint
from normkit.core.messages import counted
from normkit.core.moments import Moments
from normkit.core.precision import widest
from normkit.core.processes import Processes, total
from normkit.errors import NonFiniteWarning, OptionError
from normkit.inspection import undisturbed
from normkit.inspection.batches import BatchReader
from normkit.inspection.run import Listener, progressive, watch_inputs
from normkit.inspection.side_by_side import current_run, run_side_by_side
from normkit.inspection.statistics import MergedMoments, NormStatistics, weights_of_rows
from normkit.layers.masking import valid_positions

FEWEST = 30  # images: a standard error from fewer says little


class StandardErrors:
    """Sums over images from which the standard errors of a layer's statistics follow.

    The pixels of one image are alike, so a million values from ten images are ten observations.
    Mean and variance of all values are averages over images of m and of v + (m − mean)², each
    weighted by its number of values; their standard errors are those of weighted averages. A
    layer that runs several times in one forward counts each run as images of its own.
    """

    def __init__(self) -> None:
        self.images = 0
        self.near: Tensor | None = None  # a mean to start from, so that sums do not cancel
        self.sums: list[Tensor] = []

    def add(self, table: Moments) -> None:
        """The images of a batch: a row each."""
        mean, var = table.mean.to(torch.float64), table.var.to(torch.float64)
        if self.near is None:
            self.near = mean.mean(0)
        w = weights_of_rows(table)
        d = mean - self.near
        e = var + d.square()
        w2 = w.square()
        new = [t.sum(0) for t in (w, w2, w2 * d, w2 * d * d, w2 * e, w2 * e * e, w2 * d * e)]
        self.sums = [a + b for a, b in zip(self.sums, new, strict=True)] if self.sums else new
        self.images += mean.shape[0]

    def of(self, merged: MergedMoments) -> tuple[Tensor, Tensor]:
        """The standard errors of mean and variance; infinite from one image."""
        if self.near is None or self.images < 2:
            unknown = torch.full_like(merged.mean, torch.inf)
            return unknown, unknown
        w, w2, w2d, w2dd, w2e, w2ee, w2de = self.sums
        step = merged.mean - self.near
        of_mean = w2dd - 2 * step * w2d + step.square() * w2
        rest = step.square() - merged.var  # v + (m − mean)² − var = e − 2·step·d + rest
        of_var = (
            w2ee
            + 4 * step.square() * w2dd
            + rest.square() * w2
            - 4 * step * w2de
            + 2 * rest * w2e
            - 4 * step * rest * w2d
        )
        small_sample = self.images / (self.images - 1)
        mean, var = ((small_sample * s.clamp(min=0)).sqrt() / w for s in (of_mean, of_var))
        return mean, var

    def relative(self, merged: MergedMoments, eps: float) -> Tensor:
        """Per channel, the larger of the two errors as the normalized output feels it.

        The mean's in units of √(var + eps), the variance's in units of var + eps: a channel that
        is nearly dead cannot keep the others waiting.
        """
        mean, var = self.of(merged)
        scale = (merged.var + eps).clamp(min=torch.finfo(torch.float64).tiny)
        return torch.maximum(mean / scale.sqrt(), var / scale)


class InputStatistics:
    """What one norm got, over all batches so far."""

    def __init__(self, norm: NormStatistics) -> None:
        self.norm = norm
        self.merged: MergedMoments | None = None
        self.errors = StandardErrors()
        self.images = 0  # samples of the model that have been through
        self.batches = 0
        self.calls = 0
        self.settled = True  # statistics that the input itself depends on have come to rest
        self.left_out = 0  # calls whose values were not all finite

    def add(self, x: Tensor, images: int, valid: Tensor | None = None) -> None:
        """The input of one call, in a batch with so many images; see ``NormStatistics.table``."""
        if not self.norm.fits(x):
            return
        table = self.norm.table(x, valid)
        new = MergedMoments.of(table)
        if not new.is_finite():
            self.left_out += 1
            return
        self.calls += 1
        self.merged = new if self.merged is None else self.merged.merged(new)
        rows = table.mean.shape[0]
        if not isinstance(table.count, Tensor) and rows > images and rows % images == 0:
            # rows that belong to one image are one observation, as frames or patches are
            table = table.pooled(samples=rows // images)
        self.errors.add(table)

    def count(self, images: int, left_out: int) -> None:
        """A batch is through; ``left_out`` is what it was before, since such a one is not used."""
        if self.left_out == left_out:
            self.images += images
            self.batches += 1

    def share(self, processes: Processes) -> None:
        """Become what all processes got together; a process may have got nothing."""
        device = self.norm.device
        if self.merged is None:
            none = torch.zeros(self.norm.size, dtype=widest(device), device=device)
            own = MergedMoments(none, none, none)
        else:
            own = self.merged.to(device)
        numbers = torch.tensor([self.images, self.batches, self.calls]).to(own.mean)
        sums = total(torch.cat([numbers, own.count, own.count * own.mean]), processes)
        numbers, count, first = sums.split([3, self.norm.size, self.norm.size])
        mean = first / count.clamp(min=1)
        # around the mean of all, so that nothing cancels
        m2 = total(own.m2 + own.count * (own.mean - mean).square(), processes)
        self.images, self.batches, self.calls = (int(n) for n in numbers)
        self.merged = MergedMoments(count, mean, m2) if bool(count.any()) else None

    def uncertainty(self) -> Tensor:
        """The standard errors, relative as the normalized output feels them, per channel."""
        assert self.merged is not None
        return self.errors.relative(self.merged, self.norm.eps)

    def is_sure(self, bound: float) -> bool:
        if self.merged is None or self.errors.images < FEWEST:
            return False
        return bool((self.uncertainty() <= bound).all())


Write = Callable[[InputStatistics], None]


class Measurement:
    """One measurement of norms over the batches of a reader, and the ways to go through them.

    ``fingerprint`` is that of the data, once it is done; with ``until`` a pass ends when the
    relative standard errors of all norms that were reached are below it. With ``processes`` each
    of them has a part of the data, and all go on with the statistics of the whole.
    """

    def __init__(
        self,
        reader: BatchReader,
        norms: Sequence[NormStatistics],
        until: float | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.reader, self.norms, self.until = reader, norms, until
        self.processes = processes
        self.fingerprint = Fingerprint()

    def one_pass(
        self, norms: Sequence[NormStatistics], stop_at: nn.Module | None = None
    ) -> list[InputStatistics]:
        """What norms get as input, with the statistics of now; nothing is written."""
        measured = [InputStatistics(norm) for norm in norms]
        size = 0

        def listener(one: InputStatistics) -> Listener:
            return lambda x: one.add(x, size)

        listeners = {one.norm.norm: listener(one) for one in measured}
        with undisturbed(self.reader.model), watch_inputs(listeners, stop_at):
            for number, batch in enumerate(self.reader, 1):
                size = batch.size
                left_out = [one.left_out for one in measured]
                self.reader.run(batch, number)
                for one, before in zip(measured, left_out, strict=True):
                    one.count(size, before)
                if number > self.fingerprint.batches:  # a later pass is no new data
                    self.fingerprint.add(batch.inputs, batch.images)
                if self._is_sure([one for one in measured if one.merged is not None]):
                    break
        for one in measured:
            if one.left_out:
                warnings.warn(
                    f"{one.norm.path}: {counted(one.left_out, 'batch')} with values "
                    "that are not finite left out of the statistics. Look for overflow, or for "
                    "broken data.",
                    NonFiniteWarning,
                    stacklevel=2,
                )
            if self.processes is not None:
                one.share(self.processes)
        return measured

    def _is_sure(self, reached: list[InputStatistics]) -> bool:
        bound = self.until
        return bound is not None and bool(reached) and all(one.is_sure(bound) for one in reached)

    def layerwise(self, write: Write) -> list[InputStatistics]:
        """One pass: each norm's input is measured as it is with the statistics of now."""
        measured = self.one_pass(self.norms)
        for one in measured:
            if one.merged is not None:
                write(one)
        return measured

    def progressive(self, write: Write) -> list[InputStatistics]:
        """A pass a norm, from the input on: each sees what comes through the new statistics below.

        The memory is that of one batch. See ``progressive`` of inspection.
        """
        measured = {norm: InputStatistics(norm) for norm in self.norms}

        def measure(norm: NormStatistics, stop_at: nn.Module | None) -> bool:
            (one,) = self.one_pass([norm], stop_at)
            if one.merged is None:
                return False
            write(one)
            measured[norm] = one
            return True

        for norm, settled in progressive(self.reader, self.norms, measure):
            measured[norm].settled = settled
        return list(measured.values())

    def together(self, write: Write) -> list[InputStatistics]:
        """The same in one pass: all batches run side by side and wait for each other at each norm.

        One forward of each batch in all, but what they hold between norms is in memory together.
        """
        if self.until is not None:
            raise OptionError("until= looks at one batch after the other, together=True at all.")
        reader, batches = self.reader, list(self.reader)
        measured = [InputStatistics(norm) for norm in self.norms]

        def listener(one: InputStatistics) -> Listener:
            def combine(inputs: list[Any]) -> list[None]:
                if one.merged is not None:
                    raise OptionError(
                        f"{one.norm.path} runs several times in one forward, so its input depends "
                        "on its own statistics. Try together=False."
                    )
                for (x, valid), batch in zip(inputs, batches, strict=True):
                    before = one.left_out
                    one.add(x, batch.size, valid)
                    one.count(batch.size, before)
                if one.merged is not None:
                    write(one)
                return [None] * len(inputs)

            def meet(x: Tensor) -> None:
                run = current_run()
                if run is not None and one.norm.fits(x):
                    run.meet(one.norm.path, (x, valid_positions(one.norm.norm, x)), combine)

            return meet

        listeners = {one.norm.norm: listener(one) for one in measured}
        jobs = [partial(reader.run, batch, number) for number, batch in enumerate(batches, 1)]
        with undisturbed(reader.model), watch_inputs(listeners):
            run_side_by_side(jobs)
        for batch in batches:
            self.fingerprint.add(batch.inputs, batch.images)
        for one in measured:
            if one.merged is not None:
                write(one)  # again: leaving the block above has put the buffers back
        return measured
