"""Statistics that real processes share, over gloo on the loopback device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forked import CAN_FORK, Forked

HERE = Path(__file__).parent
NAMES = [
    line.split("(")[0].removeprefix("def ")
    for line in (HERE / "checks.py").read_text().splitlines()
    if line.startswith("def check_")
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank said of each check: all of them by one start of four processes."""
    file = tmp_path_factory.mktemp("ranks") / "said"
    heard = forked(file) if CAN_FORK else started(file)
    files = [Path(f"{file}.{rank}") for rank in range(4)]
    missing = [str(f) for f in files if not f.exists()]
    assert not missing, f"{missing}: {heard}"
    return [json.loads(f.read_text()) for f in files]


def forked(file: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        import ranks  # with what all four need, once

        return f"exit code {Forked(lambda: ranks.main(str(file))).wait()}, and what is captured"


def started(file: Path) -> str:
    command = [sys.executable, str(HERE / "ranks.py"), str(file)]
    paths = [str(HERE.parent), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    return f"{run.stdout[-2000:]}{run.stderr[-4000:]}"


def test_by_four_processes(said: list[dict[str, str]]) -> None:
    """One test: workers that share several would start the four processes once each."""
    wrong = [
        f"rank {rank}, {name}: {results.get(name, 'it did not come to it')}"
        for rank, results in enumerate(said)
        for name in NAMES
        if results.get(name) != ""
    ]
    assert wrong == []
