"""The same sweep with Ray's processes, on this machine alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.sweep import pretend
from normkit.errors import OptionError
from normkit.lab.store import FAILED, Store
from normkit.lab.sweep import ProgressLines, SweepError, ray_engine, run

# read when Ray is imported: its servers then listen on the loopback address only
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'normkit[ray]'")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100_000_000,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
        )
    except Exception as error:  # whatever a machine does not allow
        pytest.skip(f"Ray does not start here: {error}")
    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
    yield
    ray.shutdown()


def test_a_sweep_with_a_lost_worker_and_an_error(path: Path) -> None:
    experiment = pretend.experiment(dies_once_in=2, fails_in=3, seeds=1)
    lines: list[str] = []
    with Store(path) as store:
        results = run(
            experiment,
            store,
            engine="ray",
            progress=ProgressLines(lines.append),
            trainer="lab.sweep.pretend",
        )
        states = [store.status()[each.id] for each in experiment.runs()]
    assert lines[0] == "3 runs; 2 at once"
    assert sum("the Ray worker ended" in line for line in lines) == 1
    assert [each.state for each in states] == ["done", FAILED, "done"]
    assert states[1].reason.startswith("RuntimeError: the sum is odd (pretend.py:")
    runs = experiment.runs()
    scores = {result.run: result.score("accuracy") for result in results}
    assert scores == {run.id: pretend.expected(run) for run in (runs[0], runs[2])}


def test_a_cluster_without_the_device(path: Path) -> None:
    with Store(path) as store, pytest.raises(OptionError, match="the Ray cluster has no GPU"):
        run(pretend.experiment(), store, engine="ray", device="cuda")
    assert not store.folder.exists()


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        @staticmethod
        def is_initialized() -> bool:
            return False

        @staticmethod
        def init(**options: Any) -> None:
            raise ConnectionError("Could not connect\nto GCS.")

    monkeypatch.setattr(ray_engine, "require", lambda *asked: Silent)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(OptionError) as error:
        ray_engine.RayEngine(None, None, 1)
    assert str(error.value) == (
        "Ray cannot be reached or started: Could not connect to GCS. RAY_ADDRESS is "
        "'127.0.0.1:1'. Try ray status, or --engine local."
    )


def test_a_cluster_that_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits for its head for a minute, and then ends the process without a word of ours."""

    class Head:
        gcs_address = "127.0.0.1:1"  # nobody listens there

    class Deserted:
        alive = True

        @staticmethod
        def get_runtime_context() -> Head:
            return Head()

        @classmethod
        def nodes(cls) -> list[dict[str, Any]]:
            return [{"Alive": cls.alive, "Resources": {"CPU": 2.0}}]

    monkeypatch.setattr(ray_engine, "CHECK_EVERY", 0.0)
    cluster = ray_engine.RayCluster(Deserted, "CPU")
    for _ in range(ray_engine.GONE_AFTER - 1):
        cluster.check()
    assert not cluster.gone
    with pytest.raises(
        SweepError, match=r"127\.0\.0\.1:1 is gone: its head does not answer"
    ) as error:
        cluster.check()
    assert "Nothing is lost" in str(error.value)
    assert cluster.gone

    Head.gcs_address = ray.get_runtime_context().gcs_address
    cluster = ray_engine.RayCluster(Deserted, "CPU")
    for alive in (True, False, False, True, False, False):  # a short absence is none
        Deserted.alive = alive
        cluster.check()
    with pytest.raises(SweepError, match="none of its nodes with a CPU is alive"):
        cluster.check()
