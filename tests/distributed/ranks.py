"""Four processes on one machine that run every check of this folder, one after the other.

Started once by test_ranks.py, by a fork or as ``python ranks.py FILE``: torch is imported once,
then the process forks. Each check is a function ``check_…`` of ``checks.py`` with the rank and the
groups as arguments; what a rank has to say of each goes to FILE.rank as JSON, an empty text for
success.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import checks
import torch
import torch._dynamo  # once here, and not in every process
import torch._inductor.compile_fx  # which the first graph asks for
from torch import distributed
from torch._dynamo.utils import counters

WORLD = 4
PATIENCE = timedelta(seconds=60)


def run(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    torch.compiler.reset()  # of graphs and counts that the process brings along
    counters.clear()
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}.store", rank=rank, world_size=WORLD, timeout=PATIENCE
    )
    groups = {k: distributed.new_group(list(range(k))) for k in range(1, WORLD + 1)}
    said: dict[str, str] = {}
    for name in [name for name in dir(checks) if name.startswith("check_")]:
        torch.manual_seed(0)
        try:
            getattr(checks, name)(rank, groups)
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc()
            Path(f"{file}.{rank}").write_text(json.dumps(said))
            os._exit(1)  # the others would meet this rank at another place
        Path(f"{file}.{rank}").write_text(json.dumps(said))
        distributed.barrier()
    os._exit(0)


def main(file: str) -> None:
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            run(rank, file)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main(sys.argv[1])
