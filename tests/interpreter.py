"""Triton's interpreter, without work that it repeats for every operation of a kernel.

No number changes. What is left out:
    device functions    each call of one patches triton.language anew, which the launch has done
    number types        the table of NumPy's types is built anew at each look
    overflow            every sum and product of integers is done again in 64 bits and compared;
                        compiled kernels do that in debug mode only
    shapes              the type of every block is put together and checked anew, and each tensor
                        gets a list of its sizes; here blocks of one shape share them
    broadcasting        the sizes of two blocks are compared one by one, also where they are equal

And one repair: Triton 3.6 makes a number of an array of one element by int(), which NumPy refuses
from 2.4 on.

These are names inside of Triton: where another version has others, it runs as it is, only slower.
"""

from __future__ import annotations

import dataclasses
import math
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
    if hasattr(interpreter, "_patch_lang_tensor") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    _share_shapes()


def _with_index(patch: Any) -> Any:
    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


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


def _share_shapes() -> None:
    from triton.language import core, semantic

    block = core.block_type(core.float32, [2, 4])
    tensor = core.tensor(None, block)
    if set(vars(block)) != {"element_ty", "shape", "numel", "name"} or set(vars(tensor)) != {
        *("handle", "shape", "numel", "type", "dtype")
    }:
        return
    if not type(block.shape) is type(tensor.shape) is core.tuple:
        return
    blocks = _Blocks(core)
    core.block_type.__init__ = lambda self, element, shape: blocks.fill(self, element, shape)
    core.tensor.__init__ = lambda self, handle, type: blocks.fill_tensor(self, handle, type)
    usual = semantic.TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        # shared: the same object wherever the sizes are equal
        if left.shape is right.shape:
            return left, right
        return usual(self, left, right)

    semantic.TritonSemantic.broadcast_impl_value = broadcast


class _Blocks:
    """Shapes that kernels have had, each built and checked the first time by Triton itself."""

    def __init__(self, core: Any) -> None:
        self.constexpr = core.constexpr
        self.build = core.block_type.__init__
        self.known: dict[tuple[int, ...], Any] = {}  # sizes -> as types and as tensors have them
        self.names: dict[tuple[str, tuple[int, ...]], str] = {}
        self.as_tensors_have_it = lambda sizes: core.tuple([core.constexpr(s) for s in sizes])
        self.scalar = self.as_tensors_have_it(()), core.constexpr(1)

    def fill(self, block: Any, element: Any, shape: Any) -> None:
        sizes = tuple([s.value if isinstance(s, self.constexpr) else s for s in shape])
        known = self.known.get(sizes)
        if known is None:
            self.build(block, element, shape)
            numel = self.constexpr(math.prod(sizes))
            known = block.shape, block.numel, self.as_tensors_have_it(sizes), numel
            self.known[sizes] = known
        name = self.names.get((element.name, sizes))
        if name is None:
            name = self.names[element.name, sizes] = f"<{known[0]}, {element}>"
        block.element_ty, block.name = element, name
        block.shape, block.numel, *block.of_tensors = known

    def fill_tensor(self, tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = type.of_tensors if type.is_block() else self.scalar
