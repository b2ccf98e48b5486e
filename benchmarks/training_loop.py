"""Seconds an epoch: a bare loop, the lab's, the lab's with recorded steps, and several at once.

    python -m benchmarks.training_loop --device cuda --data cifar10
    python -m benchmarks.training_loop --data synthetic:1x8x8x10x1437 --model native:small_cnn
    python -m benchmarks.training_loop --device cuda --model torchvision:resnet18 --stem cifar

What it measures decides ``normkit.lab.train.cuda_graph``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from normkit.core.atomic_write import write_text
from normkit.core.precision import deterministic_cudnn
from normkit.errors import NormkitError
from normkit.lab.data import load
from normkit.lab.experiment import Data, Model, ModelStep, Run, Setting, Train
from normkit.lab.formats import autocast, model_dtype
from normkit.lab.models.variant import build_variant
from normkit.lab.train import Training, side_by_side
from normkit.lab.train.cuda_graph import is_recorded
from normkit.lab.train.device import environment
from normkit.lab.train.optimizer import optimizer_of

TORCH = "torch"  # the model's own norms, nothing converted
BARE, DIRECT, RECORDED = "bare loop", "lab", "lab, recorded"

Epoch = Callable[[int], None]  # trains the epoch of that number


@dataclass(frozen=True)
class EpochTime:
    """One way to train with one normalizer. None: not possible here."""

    norm: str
    way: str
    runs: int  # side by side
    seconds: float | None  # an epoch and run
    note: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    try:
        sets = load(setting_of(options, TORCH).data, device)
    except NormkitError as error:
        print(error, file=sys.stderr)
        return 2
    machine = environment(device)
    rule = side_by_side(setting_of(options, TORCH), sets.shape, device)
    recorded, why_not = is_recorded(device, sets.train)
    print(
        f"{machine['device']}, torch {machine['torch']}, {len(sets.train)} images, {options.model}"
    )
    print(f"chosen here: {'recorded' if recorded else why_not}, {rule} side by side\n")
    print(f"{'norm':<8} {'way':<14} {'runs':>4} {'s/epoch/run':>12} {'against bare':>13}")
    rows: list[EpochTime] = []
    for row in measured(options, sets, device):
        rows.append(row)
        print(_line(row, rows), flush=True)
        if options.out:
            _write(options.out, {"environment": machine, "options": _plain(options), "rows": rows})
    return 0


def measured(options: argparse.Namespace, sets: Any, device: torch.device) -> Iterator[EpochTime]:
    """One row after the other. The bare loop and the lab's take turns: their ratio matters."""
    for norm in options.norms.split(","):
        setting = setting_of(options, norm)

        def ways(*makers: Callable[[], Epoch]) -> list[float] | str:
            with deterministic_cudnn(not options.fastest):
                return timed(makers, options.epochs, device)

        def lab(many: int, capture: Any, setting: Setting = setting) -> Callable[[], Epoch]:
            return partial(abreast, setting, sets, device, many, capture)

        seconds = ways(partial(bare, setting, sets, device), lab(1, None))
        yield from _rows(norm, [(BARE, 1), (DIRECT, 1)], seconds)
        for many in options.abreast:
            if device.type == "cuda":
                yield from _rows(norm, [(RECORDED, many)], ways(lab(many, "auto")))
            elif many > 1:
                yield from _rows(norm, [(DIRECT, many)], ways(lab(many, None)))
            else:
                yield EpochTime(norm, RECORDED, 1, None, "only on a GPU")


def _rows(
    norm: str, ways: list[tuple[str, int]], seconds: list[float] | str
) -> Iterator[EpochTime]:
    for i, (way, many) in enumerate(ways):
        if isinstance(seconds, str):
            yield EpochTime(norm, way, many, None, seconds)
        else:
            yield EpochTime(norm, way, many, seconds[i] / many)


def timed(
    makers: Sequence[Callable[[], Epoch]], epochs: int, device: torch.device
) -> list[float] | str:
    """Median seconds of an epoch of each, in turns; the first of each does not count.

    On a CPU they are seconds of its work: what else the machine does is left out.
    """
    now = time.perf_counter if device.type == "cuda" else time.process_time
    times: list[list[float]] = [[] for _ in makers]
    try:
        contestants = [make() for make in makers]
        for number in range(1 + epochs):
            for epoch, own in zip(contestants, times, strict=True):
                start = now()
                epoch(number)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                own.append(now() - start)
    except torch.OutOfMemoryError:
        return "out of memory"
    finally:
        contestants = []
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return [statistics.median(own[1:]) for own in times]


def bare(setting: Setting, sets: Any, device: torch.device) -> Epoch:
    """What anybody would write: no record, no evaluation, no check."""
    train, run = setting.train, Run(setting, 1)
    model = build_variant(setting, sets.classes, sets.shape, run.torch_seed())
    form = torch.channels_last if train.channels_last else torch.preserve_format
    model = model.to(device, model_dtype(train.precision)).to(memory_format=form)
    optimizer = optimizer_of(model, train, device)

    def epoch(number: int) -> None:
        batches = sets.train.batches(train.batch, seed=1, epoch=number, shuffle=True, augment=True)
        for images, labels in batches:
            optimizer.zero_grad(set_to_none=True)
            with autocast(train.precision, device):
                logits = model(images.to(memory_format=form))
            F.cross_entropy(logits.float(), labels).backward()
            optimizer.step()

    return epoch


def abreast(setting: Setting, sets: Any, device: torch.device, many: int, capture: Any) -> Epoch:
    """Runs of the lab that take turns; none of the epochs is evaluated."""
    runs = [
        Training(Run(setting, seed), sets, device=device, capture=capture, beside=many)
        for seed in range(1, many + 1)
    ]

    def epoch(number: int) -> None:
        while any(run.epoch <= number for run in runs):
            for run in runs:
                if run.epoch <= number:
                    run.step()
        if capture is not None and not runs[0].trainer.is_recorded:
            raise NormkitError(f"No record: {runs[0].trainer.obstacle or runs[0].why_direct}.")

    return epoch


def setting_of(options: argparse.Namespace, norm: str) -> Setting:
    return Setting(
        Data(options.data, path=options.path, flip=True, crop=options.crop),
        Model(options.model, options.stem),
        () if norm == TORCH else (ModelStep("norm", norm),),
        Train(
            epochs=options.epochs + 2,  # the last one, which is evaluated, is never reached
            batch=options.batch,
            worker_batch=options.worker_batch,
            lr=0.01,
            precision=options.precision,
            channels_last=options.device != "cpu",
            evaluate_every=options.epochs + 2,
        ),
    )


def _line(row: EpochTime, rows: list[EpochTime]) -> str:
    if row.seconds is None:
        return f"{row.norm:<8} {row.way:<14} {row.runs:>4} {row.note:>12}"
    bare = next((r.seconds for r in rows if (r.norm, r.way) == (row.norm, BARE)), None)
    ratio = f"{100 * (row.seconds / bare - 1):+.1f} %" if bare else ""
    return f"{row.norm:<8} {row.way:<14} {row.runs:>4} {row.seconds:>12.4f} {ratio:>13}"


def _write(path: Path, results: dict[str, Any]) -> None:
    results = {**results, "rows": [asdict(row) for row in results["rows"]]}
    write_text(path, json.dumps(results, indent=2))


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_loop",
        description=(__doc__ or "").partition("\n")[0],
        epilog="a norm called torch is the model as its library builds it",
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--data", default="synthetic:3x32x32x10x50000", help="a data set (default: %(default)s)")
    add("--path", help="where its files are; else NORMKIT_DATA")
    add("--model", default="native:resnet20", help="default: %(default)s")
    add("--stem", default="own", choices=("own", "cifar"))
    add("--norms", default=f"{TORCH},bn,gn,ubn", help="default: %(default)s")
    add("--batch", type=int, default=128)
    add("--worker-batch", type=int, metavar="K", help="statistics of runs of K samples")
    add("--crop", type=int, default=4, help="padding of the random crop (default 4)")
    add("--precision", default="bf16", choices=("float32", "bf16", "fp16"))
    add("--fastest", action="store_true", help="cuDNN may give other numbers every time")
    add("--epochs", type=int, default=3, help="that are counted (default 3)")
    add("--abreast", type=_counts, default=[1, 2, 4], metavar="K,K", help="default: 1,2,4")
    add("--threads", type=int, metavar="K", help="CPU threads")
    add("--out", type=Path, metavar="FILE", help="write every number as JSON")
    return parser.parse_args(arguments)


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"expected positive whole numbers, got {text!r}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
