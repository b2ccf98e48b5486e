"""Where processes tell each other what they are about to do, and wait so long and no longer.

Collectives cannot do that: they hang when one process does not come. So the processes meet in the
store by which they found each other: each writes its own entry and waits for those of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed, nn

from normkit.errors import RankError

FINISHED = "the end of its step"
_meetings = itertools.count()  # the same on all processes, if they make the same calls


class Meeting:
    """A series of places that all processes come to in the same order."""

    def __init__(self, timeout: float) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.timeout = timeout
        self.came_to: list[str] = []
        self._prefix = f"normkit/{next(_meetings)}"
        self._store = distributed.distributed_c10d._get_default_store()

    def meet(self, place: str, message: str = "") -> list[str]:
        """Say that this process has come to a place; what each of them says there.

        RankError if one comes to another place, or to none in time.
        """
        turn = len(self.came_to)
        self.came_to.append(place)
        self._store.set(self._key(self.rank, turn), f"{place}\n{message}")
        places, messages = [], []
        for rank in range(self.size):
            text = self._wait(rank, turn, place)
            places.append(text.partition("\n")[0])
            messages.append(text.partition("\n")[2])
        if len(set(places)) > 1:
            raise RankError(
                f"The processes do not come to the same place, number {turn}: {by_ranks(places)}. "
                "All of them have to run the same norms in the same order and mode."
            )
        return messages

    def _wait(self, rank: int, turn: int, place: str) -> str:
        key = self._key(rank, turn)
        try:
            self._store.wait([key], timedelta(seconds=self.timeout))
        except Exception as error:  # torch has had several classes for it
            last = self._last_place(rank, turn)
            raise RankError(
                f"Rank {rank} did not come to {place} within {self.timeout:g} s; this is rank "
                f"{self.rank}. {last} A collective there would hang: look for a branch, an "
                "exception or a batch less on that rank."
            ) from error
        return str(self._store.get(key).decode())

    def _last_place(self, rank: int, turn: int) -> str:
        """Where a process that is missing was last."""
        for earlier in reversed(range(turn)):
            if self._store.check([self._key(rank, earlier)]):
                text = self._store.get(self._key(rank, earlier)).decode()
                return f"The last it came to was {text.partition(chr(10))[0]}."
        return "It has not come to anything yet."

    def _key(self, rank: int, turn: int) -> str:
        return f"{self._prefix}/{rank}/{turn}"

    def _forward_hook(self, path: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            self.meet(f"{path} ({'train' if module.training else 'eval'} mode)")

        return before

    def _backward_hook(self, path: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            # a hook of the tensor, and not of the module: whose outputs nobody may change in place
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda grad: self.meet(f"the backward of {path}") and None)

        return after

    @contextmanager
    def at_each(self, norms: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        """The processes meet before each of these norms runs, forward and backward, and at the end
        of the block."""
        handles = []
        for path, norm in norms:
            handles.append(norm.register_forward_pre_hook(self._forward_hook(path)))
            handles.append(norm.register_forward_hook(self._backward_hook(path)))
        try:
            yield
            self.meet(FINISHED)
        except RankError:
            raise
        except Exception as error:
            # for the others to hear of it at once, and at the place where they wait
            place = f"an error, {type(error).__name__}: {error}".replace("\n", " ")
            self._store.set(self._key(self.rank, len(self.came_to)), f"{place}\n")
            raise
        finally:
            for handle in handles:
                handle.remove()


def by_ranks(texts: Sequence[str]) -> str:
    """Which ranks say what: "rank 0, 2: layer1.bn; rank 1: layer2.bn"."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"rank {', '.join(which)}: {text}" for text, which in ranks.items())
