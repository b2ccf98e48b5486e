"""Workers on the machines of a Ray cluster, or on this one.

A checkpoint is written where its worker is. On machines that share the store's folder a lost run
goes on from there; elsewhere it begins anew, and comes to the same numbers.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import socket
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from normkit.errors import OptionError
from normkit.lab.sweep.local import TOGETHER
from normkit.lab.sweep.messages import Job, JobTracker, Message, SweepError
from normkit.lab.sweep.worker import TRAINER, JobRunner
from normkit.models import require

CHECK_EVERY = 5.0  # seconds between two looks whether the cluster is there
GONE_AFTER = 3  # looks in a row that fail; Ray itself ends the process after a minute
ANSWER_WITHIN = 2.0  # seconds that a worker waits for a message before it says that there is none


class RayEngine:
    """An engine of Ray actors, one run at a time each, or a few on a GPU."""

    def __init__(
        self,
        workers: int | None,
        device: str | None,
        most: int,
        trainer: str = TRAINER,
        gpus: int = 1,
    ) -> None:
        self._ray = require("ray", "ray", "--engine ray")
        self._started = not self._ray.is_initialized()
        if self._started:  # the cluster that RAY_ADDRESS names, or one on this machine
            try:
                self._ray.init(include_dashboard=False, log_to_driver=False)
            except (OSError, RuntimeError, ValueError) as error:  # a ConnectionError is an OSError
                address = os.environ.get("RAY_ADDRESS")
                hint = f"RAY_ADDRESS is {address!r}. " if address else ""
                message = " ".join(str(error).split()).rstrip(".")
                if "Unauthenticated" in message or "token" in message.lower():
                    hint += "The cluster wants a token: RAY_AUTH_TOKEN or ~/.ray/auth_token. "
                raise OptionError(
                    f"Ray cannot be reached or started: {message}. {hint}"
                    "Try ray status, or --engine local."
                ) from error
        resources = self._ray.cluster_resources()
        if device is None:
            device = "cuda" if resources.get("GPU") else "cpu"
        # a worker sees the GPU that it was given, and no other
        self._device = device.partition(":")[0]
        kind = "GPU" if self._device == "cuda" else "CPU"
        there = int(resources.get(kind, 0))
        if not there:
            raise OptionError(f"device got {device!r}, and the Ray cluster has no {kind}.")
        count = there // gpus
        if not count:
            raise OptionError(f"train.gpus = {gpus}, and the Ray cluster has {there} {kind}s.")
        self._size = min(workers or count, count, most)
        self._trainer = trainer
        self._together = TOGETHER if kind == "GPU" else 1
        self._remote = self._ray.remote(
            num_cpus=gpus,
            num_gpus=gpus if kind == "GPU" else 0,
            max_concurrency=4,
            max_restarts=0,
        )(RayActor)
        self._workers: list[_Worker] = []
        self._cluster = RayCluster(self._ray, kind)

    def size(self) -> int:
        return self._size

    def room(self) -> int:
        idle = any(not worker.jobs for worker in self._workers)
        return self._together if idle or len(self._workers) < self._size else 0

    def start(self, jobs: Sequence[Job]) -> None:
        worker = next((each for each in self._workers if not each.jobs), None)
        if worker is None:
            worker = _Worker(self._ray, self._remote.remote(self._trainer, self._device))
            self._workers.append(worker)
        worker.give(jobs)

    def poll(self, seconds: float) -> list[Message]:
        self._cluster.check()
        if not self._workers:
            time.sleep(seconds)
            return []
        questions = {worker.question: worker for worker in self._workers}
        ready, _ = self._ray.wait(list(questions), num_returns=1, timeout=seconds)
        messages: list[Message] = []
        for reference in ready:
            worker = questions[reference]
            messages += worker.read()
            if worker.over:
                self._ray.kill(worker.actor)
                self._workers.remove(worker)
        return messages

    def stop(self) -> None:
        for worker in self._workers:
            worker.actor.stop.remote()

    def close(self) -> None:
        if not self._cluster.gone:  # else nobody is left to be asked, and Ray would wait
            for worker in self._workers:
                self._ray.kill(worker.actor)
        self._workers.clear()
        if self._started and not self._cluster.gone:
            self._ray.shutdown()


class RayCluster:
    """Whether a cluster is still there. Ray waits for one that is not, and then ends the process.

    Its head is asked for a connection, and then for its nodes; both answer at once where they live.
    """

    def __init__(self, ray: Any, kind: str) -> None:
        self.ray, self.kind = ray, kind
        self.address: str = ray.get_runtime_context().gcs_address
        self.gone = False
        self._failures, self._next = 0, time.monotonic() + CHECK_EVERY

    def check(self) -> None:
        """Raises an error if it has been gone for a while."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + CHECK_EVERY
        problem = self._problem()
        self._failures = self._failures + 1 if problem else 0
        if self._failures >= GONE_AFTER:
            self.gone = True
            raise SweepError(
                f"The Ray cluster at {self.address} is gone: {problem}. Nothing is lost: results "
                "are in the store, and runs that were being trained go on from their checkpoints. "
                "Try the same command when the cluster is back, or with --engine local."
            )

    def _problem(self) -> str:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN).close()
        except OSError as error:
            return f"its head does not answer ({error})"
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        if not any(node["Resources"].get(self.kind) for node in nodes):
            return f"none of its nodes with a {self.kind} is alive"
        return ""


class RayActor:
    """A worker, in a process that Ray has started somewhere."""

    def __init__(self, trainer: str, device: str) -> None:
        warnings.simplefilter("ignore")
        logging.disable()
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.stopping = threading.Event()
        self.runner = JobRunner(trainer, device, self.messages.put, self.stopping.is_set)

    def run(self, jobs: Sequence[Job]) -> None:
        torch.set_num_threads(1)  # as a local worker
        self.runner.run(jobs)

    def collect(self) -> list[Message]:
        """What there is to tell; after a while, that there is nothing."""
        collected: list[Message] = []
        try:
            collected.append(self.messages.get(timeout=ANSWER_WITHIN))
            while True:
                collected.append(self.messages.get_nowait())
        except queue.Empty:
            return collected

    def stop(self) -> None:
        self.stopping.set()


class _Worker(JobTracker):
    """An actor, the jobs that it has, and a question that it has not answered yet."""

    def __init__(self, ray: Any, actor: Any) -> None:
        super().__init__()
        self.ray, self.actor = ray, actor
        self.question = actor.collect.remote()

    def give(self, jobs: Sequence[Job]) -> None:
        self.assign(jobs)
        self.actor.run.remote(list(jobs))

    def read(self) -> list[Message]:
        try:
            messages: list[Message] = self.ray.get(self.question)
        except self.ray.exceptions.RayError as error:
            return self.lost(_death(error))
        self.ready = True
        for message in messages:
            self.note(message)
        if not self.over:
            self.question = self.actor.collect.remote()
        return messages


def _death(error: BaseException) -> str:
    """The first and the last line of what Ray says: what happened, and what an error said."""
    plain = re.sub(r"\x1b\[\d+m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip(" ^~")]
    ends = dict.fromkeys([lines[0], lines[-1]] if lines else [type(error).__name__])
    return "the Ray worker ended: " + " … ".join(end[:200].rstrip(".") for end in ends)
