"""A run that several processes of this machine train together, each on a GPU, or on a CPU each.

The process that is asked for the run is the first of them and starts the others. It alone looks at
the clock, writes the checkpoint, tells of progress and has the result; after every piece of work it
tells the others what comes next. They end when it does, however it ends.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from normkit.errors import NormkitError, OptionError
from normkit.lab.data.sampling import stream
from normkit.lab.experiment import Run
from normkit.lab.results import Result
from normkit.lab.tasks import load_sets
from normkit.lab.train.checkpoint import (
    EVERY,
    Checkpointer,
    StaleCheckpoint,
    check_state,
    read,
    write,
)
from normkit.lab.train.device import Randomness
from normkit.lab.train.share import BatchShare
from normkit.lab.train.training import Training

START = "from normkit.lab.train.processes import companion; companion()"
GO_ON, SAVE, STOP = range(3)
PATIENCE = timedelta(minutes=30)  # for a process that loads its data more slowly than others
NOTICE = 5.0  # seconds in which the end of a process should have come up as an error


class ProcessLost(NormkitError):
    """One of the processes that train a run has ended."""


def train_in_processes(
    run: Run,
    *,
    device: torch.device | str = "cpu",
    sets: Any = None,
    checkpoint: Path | None = None,
    report: Callable[[Training], Callable[[], None]],
    stop: Callable[[], bool] = lambda: False,
    save_every: float = EVERY,
) -> Result | None:
    """Train a run with ``train.gpus`` processes; None if it was stopped before its end."""
    count = run.setting.train.gpus
    devices = _devices(device, count)
    if dist.is_available() and dist.is_initialized():
        raise OptionError(
            f"train.gpus = {count} starts its processes itself, and this one belongs to a group "
            "already. Try without torchrun."
        )
    if not dist.is_available():
        raise OptionError("train.gpus needs torch.distributed, which this torch was built without.")
    folder = Path(tempfile.mkdtemp(prefix="normkit-"))
    try:
        with Companions(run, devices, folder) as companions:
            try:
                with (
                    group(folder, 0, count),
                    _training(run, 0, devices[0], sets, checkpoint) as training,
                ):
                    checkpointer, told = Checkpointer(checkpoint, save_every), report(training)
                    while training.step():
                        told()
                        order = STOP if stop() else SAVE if checkpointer.due() else GO_ON
                        if _obeyed(training, order, checkpointer):
                            return None
                    return training.result()
            except RuntimeError as error:  # a connection that broke, for one
                if reason := companions.ended():
                    raise ProcessLost(reason) from error
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def companion() -> None:
    """One of the other processes. It does as the first one says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run, rank, device, folder, threads = pickle.load(sys.stdin.buffer)
    # a thread of its own, so that an end of the first process ends this one in any step
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    try:
        with (
            group(folder, rank, run.setting.train.gpus),
            _training(run, rank, device, None, None) as training,
        ):
            while training.step():
                if _obeyed(training, None, None):
                    break
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            (folder / f"{rank}.error").write_text(text, encoding="utf-8")
        traceback.print_exc()
        os._exit(1)


@contextmanager
def group(folder: Path, rank: int, count: int) -> Iterator[None]:
    """The processes as torch.distributed knows them: on this machine, found by a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = dist.FileStore(str(folder / "meeting"), count)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _training(
    run: Run, rank: int, device: str, sets: Any, checkpoint: Path | None
) -> Iterator[Training]:
    """A training of the run that is where those of the other processes are.

    The first process says which checkpoint it goes on from.
    """
    from normkit.lab.train.loop import process_settings

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    told: list[Path | None] = [checkpoint]
    dist.broadcast_object_list(told)
    with process_settings():
        share = BatchShare(run.setting.train, rank)
        loaded = load_sets(run.setting, device) if sets is None else sets
        if hasattr(loaded.train, "only"):  # a set of the lab reads its share alone
            loaded.train.only = share.cut
        try:
            training = Training(run, loaded, device=device, share=share)
            if rank:  # dropout draws other numbers for other samples
                seed = stream("process", run.torch_seed(), rank)
                training.run_device.random = Randomness(seed, training.device)
            _resume(training, rank, told[0])
            with share.sharing_statistics(training.trainer.model):
                yield training
        finally:
            if hasattr(loaded.train, "only"):
                loaded.train.only = None


def _resume(training: Training, rank: int, path: Path | None) -> None:
    """All go on from the checkpoint, or all begin anew."""
    if path is None or not path.exists():
        state, problem = None, ""
    else:
        try:
            state, problem = read(path), ""
            check_state(training, state)
            if len(state.get("processes", ())) != dist.get_world_size():
                raise StaleCheckpoint("The checkpoint was made with another number of processes.")
        except StaleCheckpoint as error:
            state, problem = None, str(error)
    able = torch.tensor(int(state is not None))
    dist.all_reduce(able, dist.ReduceOp.MIN)
    if state is not None and able:
        training.load_state_dict(state)
        own = state["processes"][rank]
        training.run_device.random.load(own["random"])
        training.trainer.history.load_state_dict(own["history"])
    elif problem and rank == 0:
        warnings.warn(f"{problem} The run begins anew.", stacklevel=2)


def _obeyed(training: Training, order: int | None, checkpointer: Checkpointer | None) -> bool:
    """Tell or hear what comes next, and do it; True to stop."""
    word = torch.tensor(GO_ON if order is None else order)
    dist.broadcast(word, 0)
    order = int(word)
    if order == GO_ON:
        return False
    own = {
        "random": training.run_device.random.state(),
        "history": training.trainer.history.state_dict(),
    }
    collected: list[Any] | None = [None] * dist.get_world_size() if checkpointer else None
    dist.gather_object(tree_map_only(Tensor, Tensor.cpu, own), collected)
    if checkpointer is not None and checkpointer.path is not None:
        start = time.monotonic()
        write({**training.state_dict(), "processes": collected}, checkpointer.path)
        checkpointer.wrote(start)
    return order == STOP


def _devices(device: torch.device | str, count: int) -> list[str]:
    first = torch.device(device)
    if first.type != "cuda":
        return [str(device)] * count
    begin, there = first.index or 0, torch.cuda.device_count()
    if begin + count > there:
        raise OptionError(
            f"train.gpus = {count} from {first} on, and torch sees {there} CUDA devices here. Try "
            f"train.gpus = {max(1, there - begin)}."
        )
    return [f"cuda:{begin + i}" for i in range(count)]


class Companions:
    """The other processes of a run. They end with the block, and when this process ends."""

    def __init__(self, run: Run, devices: Sequence[str], folder: Path) -> None:
        self.run, self.devices, self.folder = run, devices, folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.over = threading.Event()

    def __enter__(self) -> Companions:
        _ = self.run.id  # known here, and so not made again from data that another process sees
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        for rank, device in enumerate(self.devices[1:], 1):
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", START],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
            )
            assert process.stdin is not None
            given = (self.run, rank, device, self.folder, torch.get_num_threads())
            with suppress(BrokenPipeError):  # one that has ended at once is noticed later
                pickle.dump(given, process.stdin)
                process.stdin.flush()
            self.processes.append(process)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        for process in self.processes:
            process.kill()
            process.wait()
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()

    def ended(self) -> str:
        """Which one has ended before its time, and why; empty if none has within a moment."""
        until = time.monotonic() + NOTICE
        while time.monotonic() < until:
            for rank, process in enumerate(self.processes, 1):
                if process.poll() is not None:
                    return self._reason(rank, process.returncode)
            time.sleep(0.05)
        return ""

    def _reason(self, rank: int, code: int) -> str:
        with suppress(OSError):
            return (self.folder / f"{rank}.error").read_text(encoding="utf-8")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"Process {rank + 1} of {len(self.devices)} of the run ended ({how})."

    def _watch(self) -> None:
        """Whoever waits for a process that is gone may wait for ever: then this one ends, too."""
        while not self.over.wait(1.0):
            for rank, process in enumerate(self.processes, 1):
                if process.poll() is not None and not self.over.wait(2 * NOTICE):
                    print(self._reason(rank, process.returncode), file=sys.stderr, flush=True)
                    os._exit(1)


def _end_with(pipe: Any) -> None:
    pipe.read()
    os._exit(1)
