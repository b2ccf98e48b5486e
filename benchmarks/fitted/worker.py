"""Jobs of the benchmark, done by processes side by side."""

from __future__ import annotations

import argparse
import gc
import os
import queue
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fitted import cifar, finetuning, rows
from benchmarks.fitted.conversions import fitted, of_device, only_fitted, plain, refusal
from benchmarks.fitted.pacs import Pacs, features, linear_head, lite0, load_pacs
from normkit.errors import NormkitError

Job = tuple[str, ...]
STEPS = {1: 400, 2: 400, 8: 300, 32: 150}  # of fine-tuning, by batch size
DISTILLED = ("gn:1", "gn:8", "gn:32", "ln", "in", "bcn")  # targets that are distilled as well
DRAWN = ("gn:1", "ln", "gn:8", "gn:32", "gn")  # targets with several sets of images
BROKEN = 3  # exit status of a process whose GPU context is lost


def decoded(options: argparse.Namespace) -> Path:
    path: Path = options.scratch / f"pacs-{options.pixels}-{options.limit or 'all'}.pt"
    return path


def work(options: argparse.Namespace, jobs: Any, number: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    worker = Worker(options)
    while time.time() < options.deadline:
        try:
            job = jobs.get(timeout=3)
        except queue.Empty:
            return
        begin = time.time()
        try:
            note = worker.do(job)
        except Exception as error:  # one part that fails must not end the others
            traceback.print_exc()
            note = "out of memory" if of_device(error) else f"failed: {type(error).__name__}"
            rows.note_missing(options.out, " ".join(job), note)
            if of_device(error):  # after which nothing in this process will work
                print(f"[{number}] {' '.join(job)} {note}", flush=True)
                os._exit(BROKEN)
        else:
            rows.note_missing(options.out, " ".join(job), note)
        left = options.deadline - time.time()
        line = f"{' '.join(job)} {note}".rstrip() + f", {time.time() - begin:.0f} s"
        print(f"[{number}] {line} ({left:.0f} s left)", flush=True)
    os._exit(0)


class Worker:
    """Does jobs in one process; what several of them need is read once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self._pacs: Pacs | None = None
        self._cifar: cifar.Conversions | None = None
        self.heads: dict[str, torch.nn.Linear] = {}

    def do(self, job: Job) -> str:
        """Why some of it is missing; mostly empty."""
        kind, *given = job
        return getattr(self, f"_{kind.replace('-', '_')}_job")(*given) or ""

    def emit(self, row: rows.Row) -> None:
        rows.append(self.options.out, row)

    def late(self) -> bool:
        return time.time() > float(self.options.deadline)

    # ---------------------------------------------------------------- Lite0 on PACS

    @property
    def pacs(self) -> Pacs:
        if self._pacs is None:
            self._pacs = load_pacs(decoded(self.options)).to(self.device)
            self.backbone = lite0(self.options.weights).to(self.device)
        return self._pacs

    def accuracy(self, model: torch.nn.Module, domain: str) -> float:
        """With the head that was trained on the batch-norm features of the training part."""
        if domain not in self.heads:
            own = self.pacs.part(domain, "train")
            x = features(self.backbone, self.pacs, own)
            self.heads[domain] = linear_head(x, self.pacs.labels[own])
        rest = self.pacs.part(domain, "rest")
        answers = self.heads[domain](features(model, self.pacs, rest)).argmax(1)
        return float((answers == self.pacs.labels[rest]).double().mean())

    def images(self, domain: str, seed: int) -> Tensor:
        """Those that a conversion is fitted on, of the training part."""
        own = self.pacs.part(domain, "train")
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(1000 + seed))
        chosen = own[order[: self.options.images].to(own.device)]
        return next(self.pacs.batches(chosen, len(chosen)))[0]

    def _pacs_job(self, domain: str, target: str) -> None:
        if rows.read(self.options.out, kind="pacs", domain=domain, target=target, end=True):
            return
        key = {"kind": "pacs", "domain": domain, "target": target}
        pacs = self.pacs  # with the backbone
        if target == "bn":
            count = len(pacs.part(domain, "rest"))
            test = self.accuracy(self.backbone, domain)
            return self.emit({**key, "how": "", "test": test, "measured": count, "end": True})
        try:
            if not only_fitted(target):
                test = self.accuracy(plain(self.backbone, target), domain)
                self.emit({**key, "how": "plain", "test": test})
            images = self.images(domain, 0)
            self._measured(key, "fitted", domain, target, images, end=target not in DISTILLED)
            if target in DISTILLED:
                for how, settings in self._closer():
                    last = how == "distilled"
                    self._measured(key, how, domain, target, images, end=last, **settings)
        except NormkitError as error:
            self.emit({**key, "refused": refusal(error), "end": True})

    def _closer(self) -> list[tuple[str, dict[str, Any]]]:
        """What brings a conversion nearer than a fit of its norms."""
        return [
            ("fitted, all", {"parameters": "all"}),
            ("distilled", {"distill": self.options.distill}),
        ]

    def _draws_job(self, domain: str, target: str, seed: str) -> None:
        """Several sets of images to fit on, so that a figure does not hang on one of them."""
        key = {"kind": "draw", "domain": domain, "target": target, "seed": int(seed)}
        images = None
        for how, settings in [("fitted", {}), *self._closer()]:
            if not rows.read(self.options.out, how=how, **key):
                images = self.images(domain, int(seed)) if images is None else images
                self._measured(key, how, domain, target, images, **settings)

    def _measured(
        self,
        key: rows.Row,
        how: str,
        domain: str,
        target: str,
        images: Tensor,
        end: bool = False,
        **settings: Any,
    ) -> torch.nn.Module:
        model, seconds, report = fitted(self.backbone, target, images, **settings)
        row = {**key, "how": how, "images": len(images), "seconds": seconds, **settings}
        row |= {"test": self.accuracy(model, domain), "agreement": report.agreement, "end": end}
        self.emit(row)
        return model

    # ---------------------------------------------------------------- fine-tuning

    def _start_path(self, method: str, domain: str, seed: int) -> Path:
        path: Path = self.options.scratch / f"{method}-{domain}-{seed}.pt"
        return path

    def _start_job(self, domain: str, seed: str) -> None:
        """The fitted and the distilled backbone of a domain and seed, for all batch sizes."""
        images = None
        for method, settings in (("fitted", {}), ("distilled", {"distill": self.options.distill})):
            path = self._start_path(method, domain, int(seed))
            if path.exists() or method not in self.options.methods:
                continue
            if images is None:
                images = self.images(domain, int(seed))
            key = {"kind": "start", "domain": domain, "seed": int(seed)}
            model = self._measured(key, method, domain, finetuning.TARGET, images, **settings)
            state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            temporary = path.with_suffix(f".{os.getpid()}")
            torch.save(state, temporary)
            temporary.rename(path)

    def _start(self, method: str, domain: str, seed: int) -> dict[str, Tensor] | None:
        path = self._start_path(method, domain, seed)
        if not path.exists():
            return None
        state: dict[str, Tensor] = torch.load(path, weights_only=True)
        return state

    def _finetune_job(self, method: str, batch: str) -> str:
        options, pacs = self.options, self.pacs
        steps = options.steps or STEPS.get(int(batch), 200)
        whole = finetuning.fine_tune(
            self.backbone, pacs, method, int(batch), steps, options.out, domains=options.domains,
            start=self._start, slots=options.slots, rates=options.rates, stop=self.late,
        )  # fmt: skip
        gc.collect()  # slots refer to themselves, and hold memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return "" if whole else "time was up"

    # ---------------------------------------------------------------- CIFAR-10

    @property
    def _cifar_weights(self) -> Path:
        path: Path = self.options.scratch / f"resnet18-{self.options.epochs}.pt"
        return path

    def _cifar_train_job(self) -> None:
        failed = self._cifar_weights.with_suffix(".failed")
        failed.unlink(missing_ok=True)
        if not self._cifar_weights.exists():
            options = self.options
            try:
                row = cifar.train(self.device, options.epochs, options.cifar, self._cifar_weights)
            except BaseException:
                failed.touch()  # for those who wait
                raise
            self.emit(row)

    def _cifar_job(self, target: str) -> None:
        options = self.options
        if rows.read(options.out, kind="cifar", target=target, end=True):
            return
        while not self._cifar_weights.exists():
            if self.late() or self._cifar_weights.with_suffix(".failed").exists():
                return
            time.sleep(0.2)
        if self._cifar is None:
            self._cifar = cifar.Conversions(
                self.device, options.epochs, options.cifar, self._cifar_weights
            )
        self._cifar.measure(target, options.cifar_distill, self.emit)
