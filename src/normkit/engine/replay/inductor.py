"""What Inductor's code starts, told to a recording.

Inductor makes Python code of a list of operations: it allocates tables and starts kernels through
launchers of its own. Inside ``overheard`` each start is heard where Inductor hands it over: the
kernel, its grid, its tensors and numbers. What else that code might do, operations by torch, makes
the step one that is not recorded; so does anything about a kernel that is not as expected here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from normkit.engine.replay.record import Recording, active

NUMBERS = "ilfd"  # kinds of numbers that C++ hands over
KINDS = {"i32": "i", "i64": "l", "fp32": "f", "fp64": "d"}
_ALLOCATES = ("aten::empty", "aten::new_empty")
_lock = threading.RLock()


class _Unexpected(Exception):
    """A kernel is started in a way that is not known here."""


class InductorLaunch:
    """A start of a kernel: for a recording what ``triton.launch.Launch`` is.

    Kernels are started by torch's own launcher, which knows their types as letters, or by Triton's,
    which is given constants as well.
    """

    def __init__(
        self, runner: Callable[..., None], scope: dict[str, Any], given: Any, source: str = ""
    ) -> None:
        self.source = source
        kernel: Any = getattr(runner, "__self__", None)
        if hasattr(kernel, "arg_tys"):
            x, y, z, _, *arguments = given
            names = [
                name
                for place, name in enumerate(kernel.arg_names)
                if place not in kernel.full_constexprs
            ]
            kinds = str(kernel.arg_tys)
            self.function, self.warps, self.shared = (
                kernel.function,
                kernel.num_warps,
                kernel.shared,
            )
        else:
            names, kinds, arguments = self._of_triton(runner, scope.get("bin"), given)
            x, y, z = given[:3]
        tensors = len(kinds) - len(kinds.lstrip("O"))
        if not len(names) == len(kinds) == len(arguments) or set(kinds[tensors:]) - set(NUMBERS):
            raise _Unexpected(f"has arguments of other kinds: {kinds}")
        self.tensors: list[Tensor] = arguments[:tensors]
        self.names = names[:tensors]
        self.numbers = list(zip(kinds[tensors:], arguments[tensors:], strict=True))
        self.grid = [x, y, z]
        self.kept = runner, kernel, scope.get("bin")  # which keep the kernel loaded

    def _of_triton(
        self, runner: Any, binary: Any, given: Sequence[Any]
    ) -> tuple[list[str], str, list[Any]]:
        """Names, kinds and values of the arguments, less constants."""
        if binary is None or len(given) < 9 or given[4] != binary.function:
            raise _Unexpected("is started in an unknown way")
        metadata, signature = binary.metadata, dict(binary.src.signature)
        special = [
            getattr(runner, name, 0)
            for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
        ]
        if any(special) or max(getattr(metadata, "cluster_dims", (1,))) > 1:
            raise _Unexpected("is started in a special way")
        if len(signature) != len(given) - 9:
            raise _Unexpected("has arguments that are not in its signature")
        left = [
            (name, kind, value)
            for (name, kind), value in zip(signature.items(), given[9:], strict=True)
            if kind != "constexpr"
        ]
        self.function, self.warps = binary.function, metadata.num_warps
        self.shared = metadata.shared
        kinds = "".join("O" if kind[0] == "*" else KINDS.get(kind, "?") for _, kind, _ in left)
        return [name for name, _, _ in left], kinds, [value for _, _, value in left]

    def fills(self, name: str) -> bool:
        """Whether the kernel writes to a table before it reads it, if it reads it at all."""
        if name.startswith("out_ptr"):
            return True
        # what it changes in place it may have made itself: Inductor joins kernels
        store, load = (self.source.find(f"tl.{what}({name} ") for what in ("store", "load"))
        return store >= 0 and (load < 0 or store < load)

    def __call__(self, *tensors: Tensor) -> None:
        """In an interpreter of kernels, which has no functions to start."""
        self.kept[0](*self.grid, 0, *tensors, *(number for _, number in self.numbers))

    def started(self, tensors: Sequence[Tensor | None]) -> dict[str, Any]:
        """What C++ needs to start it again."""
        return {
            "function": self.function,
            "grid": self.grid,
            "threads": 32 * self.warps,
            "shared": self.shared,
            "numbers": self.numbers,
            "overlap": False,
            "call": self,
        }


@contextmanager
def overheard() -> Iterator[None]:
    """What Inductor's code in this block does becomes part of the recording in force."""
    recording = active.recording
    if recording is None:
        yield
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with _lock, _Watching(recording):
        run = CachingAutotuner.run

        @functools.wraps(run)
        def heard(self: Any, *args: Any, **options: Any) -> Any:
            if active.recording is not recording:  # another thread's
                return run(self, *args, **options)
            launchers: Any = getattr(self, "launchers", ())
            scope = launchers[0].__globals__ if len(launchers) == 1 else {}
            runner = scope.get("runner")
            if runner is None:
                recording.obstacle = (
                    recording.obstacle or f"a kernel of Inductor has {len(launchers)} launchers"
                )
                return run(self, *args, **options)

            source = getattr(getattr(self, "fn", None), "src", "")

            def noted(*given: Any) -> None:
                _note(recording, runner, scope, given, source)
                runner(*given)

            scope["runner"] = noted
            try:
                return run(self, *args, **options)
            finally:
                scope["runner"] = runner

        CachingAutotuner.run = heard  # type: ignore[method-assign]
        try:
            yield
        finally:
            CachingAutotuner.run = run  # type: ignore[method-assign]


@contextmanager
def unheard() -> Iterator[None]:
    """What happens in this block is no part of a recording."""
    recording, active.recording = active.recording, None
    try:
        yield
    finally:
        active.recording = recording


class _Watching(TorchDispatchMode):
    """Sees operations by torch, which a list of launches does not contain."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(_ALLOCATES):
            self.recording.obstacle = (
                self.recording.obstacle or f"Inductor leaves {func.name()} to torch"
            )
        return func(*args, **(kwargs or {}))


def _note(
    recording: Recording,
    runner: Callable[..., None],
    scope: dict[str, Any],
    given: Sequence[Any],
    source: str,
) -> None:
    try:
        launch = InductorLaunch(runner, scope, given, source)
        tensors, launch.tensors = launch.tensors, []  # it stays with the plan
        for name, tensor in zip(launch.names, tensors, strict=True):
            _known(recording, launch, name, tensor)
    except _Unexpected as what:
        recording.obstacle = recording.obstacle or f"a kernel of Inductor {what}"
        return
    recording.launched(launch, tensors)


def _known(recording: Recording, launch: InductorLaunch, name: str, tensor: Tensor) -> None:
    """A tensor that nobody has seen before is, or lies in, a table that this kernel begins to fill.
    Where another one must have filled it, something has escaped."""
    storage = tensor.untyped_storage()
    slot = recording.storages.get(storage.data_ptr())
    if slot is None:
        size, rest = divmod(storage.nbytes(), tensor.itemsize)
        if not launch.fills(name) or rest:
            raise _Unexpected(f"reads a table that no kernel has filled ({name})")
        recording.allocated(tensor.as_strided((size,), (1,), 0), like_x=False)
    elif recording.kept_at[slot].dtype != tensor.dtype:
        raise _Unexpected("reads a table as another type")  # offsets count entries
