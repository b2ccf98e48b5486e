"""A process that has imported everything and forks launchers, so that a hundred of them are quick.

Their workers are forked too. Nothing else differs from what ``normkit lab run`` does; sweeps with
processes of the usual kind are tested beside. ProgressLines in, lines out:

    launch {"store": …, "experiment": {…}, "workers": 2, "largest": 0}   gives a process's number
    wait NUMBER                                                          gives its exit status

``largest`` limits the size of files, in bytes: what a full disk does, to one process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lab.sweep import pretend
from normkit.errors import NormkitError
from normkit.lab.store import FAILED, Store
from normkit.lab.sweep import ProgressLines, run, worker


class Forked:
    """A worker without the seconds that its imports take."""

    def __init__(self, end: int, lock: int, log: int) -> None:
        self.number = os.fork()
        if self.number:
            return
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        # as a fresh process would have: no ends of other workers, no open store
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in (end, lock):
                with suppress(OSError):  # the folder itself was open while it was listed
                    os.close(int(name))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        worker.work(Connection(end))

    def kill(self) -> None:
        if self.number:  # 0 would be everybody in the group
            os.kill(self.number, signal.SIGKILL)

    def wait(self) -> int:
        if self.number:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])
            self.number = 0
        return self.code


def launch(order: dict[str, Any]) -> int:
    """What normkit lab run does, without its words; the exit status is the same."""
    path = Path(order["store"])
    if order["largest"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest"], order["largest"]))
    log = path.with_suffix(".log").open("a")

    def start(end: int, lock: int, log: int) -> Forked:
        made = Forked(end, lock, log)
        (path.parent / f"{os.getpid()}.{made.number}.worker").touch()
        return made

    try:
        with Store(path) as store:
            run(
                pretend.experiment(**order["experiment"]),
                store,
                workers=order["workers"],
                device="cpu",
                progress=ProgressLines(lambda text: print(text, file=log, flush=True)),
                trainer="lab.sweep.pretend",
                start=start,
            )
            return int(any(each.state == FAILED for each in store.status().values()))
    except NormkitError as error:
        print(error, file=log, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


def main() -> None:
    for line in sys.stdin:
        word, _, rest = line.partition(" ")
        if word == "launch":
            number = os.fork()
            if number == 0:
                os.close(0)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os._exit(launch(json.loads(rest)))
            print(number, flush=True)
        else:
            status = os.waitpid(int(rest), 0)[1]
            print(os.waitstatus_to_exitcode(status), flush=True)


class Nursery:
    """The test's side of it."""

    def __init__(self, journal: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lab.sweep.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PRETEND_JOURNAL": str(journal),
            },
        )

    def launch(self, store: Path, workers: int = 2, largest: int = 0, **experiment: Any) -> int:
        order = {"store": str(store), "workers": workers, "largest": largest}
        return int(self._ask(f"launch {json.dumps({**order, 'experiment': experiment})}"))

    def wait(self, launcher: int) -> int:
        return int(self._ask(f"wait {launcher}"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


if __name__ == "__main__":
    main()
