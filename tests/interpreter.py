"""Triton's interpreter, without work that it repeats for every operation of a kernel.

No number changes. What is left out:
    device functions    each call of one patches triton.language anew, which the launch has done
    number types        the table of NumPy's types is built anew at each look
    overflow            every sum and product of integers is done again in 64 bits and compared;
                        compiled kernels do that in debug mode only

These are names inside of Triton: where another version has others, it runs as it is, only slower.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def quicken() -> None:
    """Once a process, before kernels run."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    builder = getattr(interpreter, "interpreter_builder", None)
    if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _Patching(interpreter._patch_lang)


def _remembered(look: Any) -> Any:
    known: dict[str, Any] = {}

    def found(kind: Any) -> Any:
        name = kind.scalar.name  # blocks have the type of their elements
        if name not in known:
            known[name] = look(kind)
        return known[name]

    return found


class _Patching:
    """Patches once a launch for each module that kernels and device functions are from."""

    def __init__(self, patch: Any) -> None:
        self.patch = patch
        self.done: set[int] | None = None  # while a kernel runs

    def __call__(self, function: Any) -> Any:
        module = id(function.__globals__)
        if self.done is None:
            self.done = {module}
            scope = self.patch(function)
            restore = scope.restore

            def ended() -> None:
                self.done = None
                restore()

            scope.restore = ended
            return scope
        if module in self.done:
            return None
        self.done.add(module)
        return self.patch(function)
