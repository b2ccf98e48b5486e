"""The state of a training between two steps, and going on from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.experiment import PROTOCOL
from normkit.lab.results import Epoch
from normkit.lab.train.checkpointing import StaleCheckpoint
from normkit.lab.train.clock import Clock
from normkit.lab.train.environment import device_name

if TYPE_CHECKING:
    from normkit.lab.train.training import Training


def state_of(training: Training) -> dict[str, Any]:
    """All that is needed to go on with the same numbers; the tensors are those in use."""
    place, clock = training.place, training.clock
    running = clock.running
    with place.on_stream():
        clock.stop()
        state = {
            **identity(training),
            "epoch": training.epoch,
            "at": training.at,
            "seconds": clock.read(),
            "records": [asdict(record) for record in training.records],
            "note": training.note,
            "random": place.random.state(),
            "machine": training.machine.state_dict(),
        }
        place.wait()
        if running:  # what is done with the state is not training
            clock.start()
    return state


def load_state(training: Training, state: dict[str, Any]) -> None:
    """A state of another run or machine is refused before anything is changed."""
    for name, mine in identity(training).items():
        if state.get(name) != mine:
            said = f"{name} {state.get(name)!r}, and this is {mine!r}"
            raise StaleCheckpoint(f"The checkpoint was made with {said}.")
    with training.place.on_stream():
        training.machine.load_state_dict(state["machine"])
    training.epoch, training.at, training.note = state["epoch"], state["at"], state["note"]
    training.records = [Epoch(**record) for record in state["records"]]
    training.place.random.load(state["random"])
    training.clock = Clock(training.place.device, state["seconds"])


def identity(training: Training) -> dict[str, Any]:
    """Where these differ, numbers would differ too."""
    return {
        "protocol": PROTOCOL,
        "run": training.run.id,
        "device": device_name(training.place.device),
        "torch": str(torch.__version__),
    }
