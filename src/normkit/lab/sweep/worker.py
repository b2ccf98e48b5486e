"""A worker process: jobs in, messages out, until the launcher is gone."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection

from normkit.lab.sweep.messages import AWAKE, STOP, Job, Message, Setup


def main(arguments: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's: it asks us to stop
    work(Connection(int(arguments[0])))


def work(end: Connection) -> None:
    """The life of a worker. It never returns."""
    jobs: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
    stopping = threading.Event()
    setup: Setup = _from_launcher(end)
    # a thread of its own, so that an end of the launcher ends a worker in the middle of a step
    threading.Thread(target=_listen, args=(end, jobs, stopping), daemon=True).start()
    warnings.simplefilter("ignore")  # nobody reads them, and they would fill the log
    logging.disable()

    import torch

    from normkit.lab.sweep.serving import Server

    torch.set_num_threads(1)  # the same sums in the same order, however many workers there are

    def send(message: Message | str) -> None:
        try:
            end.send(message)
        except OSError:  # the launcher is gone
            os._exit(1)

    server = Server(setup.trainer, setup.device, send, stopping.is_set)
    send(AWAKE)
    while server.serve(jobs.get()):
        pass
    # after an error memory may be gone and a GPU unusable: the next job gets a new process.
    # Without the farewells of imported libraries, but not before the launcher has read all
    threading.Event().wait()


def _from_launcher(end: Connection) -> Setup:
    try:
        return end.recv()
    except (EOFError, OSError):
        os._exit(1)


def _listen(end: Connection, jobs: queue.SimpleQueue[list[Job]], stopping: threading.Event) -> None:
    while True:
        try:
            message = end.recv()
        except (EOFError, OSError):
            os._exit(1)
        if message == STOP:
            stopping.set()
        else:
            jobs.put(message)


if __name__ == "__main__":
    main(sys.argv[1:])
