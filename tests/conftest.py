"""What every test gets: one thread, its own seed, and normkit's warnings as errors."""

from __future__ import annotations

import gc
import inspect
import os
import random
import zlib
from collections.abc import Iterator
from contextlib import suppress

import hypothesis
import numpy as np
import pytest
import torch

import interpreter
from normkit import build_extension, errors

if not torch.cuda.is_available():  # kernels are interpreted; Triton reads this when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreter.quicken()
else:  # where layers would be compiled: seconds for each size and option that tests try
    os.environ.setdefault("NORMKIT_INDUCTOR", "0")
torch.set_num_threads(1)  # sums in one order; and two workers do not fight for two cores


def _seed_torch(value: int) -> None:
    """torch.manual_seed, where there is a GPU. Where there is none, that would write down a stack
    trace for each kind of device which is not there: more work than most tests are."""
    if torch.cuda.is_available():
        torch.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)


class _TorchRandom:
    """torch's global generator, in the shape in which hypothesis resets generators."""

    def seed(self, value: int) -> None:
        _seed_torch(value)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# hypothesis keeps only a weak reference, so that the object needs a name
_TORCH_RANDOM = _TorchRandom()
hypothesis.register_random(_TORCH_RANDOM)
hypothesis.settings.register_profile("normkit", derandomize=True, deadline=None)
hypothesis.settings.load_profile("normkit")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once, before others need it: all paths are tested
        with suppress(errors.DeviceError):  # without a compiler layers do without it
            build_extension()
    # a test that expects a warning says so with pytest.warns
    for name, found in vars(errors).items():
        if inspect.isclass(found) and issubclass(found, Warning):
            config.addinivalue_line("filterwarnings", f"error::normkit.errors.{name}")
    config.addinivalue_line("filterwarnings", r"error::Warning:normkit(\..*)?")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device, and there is none"
    if not os.environ.get("NORMKIT_INTEGRATIONS"):
        missing["integration"] = "make test-integrations runs it"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _freeze() -> None:
    """What is there now, a million objects, stays to the end: whoever asks for garbage or for all
    objects (torch's compiler at every graph, conversion for optimizers, the lab before a run) need
    not look through it again, half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What the tests of a file have left behind, in caches of torch above all, likewise."""
    if nextitem is not None and nextitem.path != item.path:
        _freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries would find, when the process ends, that it has leaked


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Random numbers, and paths, that do not depend on which tests ran before."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    _seed_torch(seed)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
