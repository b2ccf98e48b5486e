"""Listens to torch's operations on tables, and writes them down as a few dozen kinds of loops.

An operation is an instruction on operands, places in a storage with strides; a view is none. What
loops do not do themselves is taken apart as torch takes it apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import global_decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from normkit.engine.coefficients import Untraceable
from normkit.engine.cpu.operations import APART, EMPTY, FROM_PYTHON, HANDLERS, LITERALS

CONSTANT = -2  # in place of a tensor of the call
KNOWN_TYPES = {  # which doubles stand for: other integers wrap around
    *(torch.float64, torch.float32, torch.bfloat16),
    *(torch.int64, torch.int32, torch.bool),
}


class Region(NamedTuple):
    """Where a storage lies that is not scratch: in a tensor of the call, or among constants."""

    base: int
    offset: int


class Operand(NamedTuple):
    storage: int
    offset: int
    strides: tuple[int, ...]


class Instruction(NamedTuple):
    name: str
    size: tuple[int, ...]
    operands: tuple[Operand, ...]
    made: int = 1  # so many of them, the first ones, are written
    other: int = 0  # of a gather or scatter: the size of the axis that is chosen from


class Unread(TorchFunctionMode):
    """Refuses looks at values past torch's operations."""

    LOOKS = frozenset(
        {"tolist", "numpy", "__array__", "data_ptr", "__repr__", "__format__", "__dlpack__"}
        | {"apply_", "map_", "map2_", "new", "new_tensor", "tensor_split"}
    )
    OF_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)  # of lists of tables, for example

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = (
            torch.utils._pytree.tree_leaves((args, kwargs)) if function in self.OF_VALUES else ()
        )
        if getattr(function, "__name__", "") in self.LOOKS or any(
            isinstance(leaf, Tensor) for leaf in leaves
        ):
            raise Untraceable("it looks at a value")
        if getattr(function, "__self__", None) is Tensor.requires_grad:
            raise Untraceable("it asks what gets a gradient")
        return function(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """What is done with tables while it is in force, from those that are ``given``."""

    def __init__(self) -> None:
        super().__init__()
        self.instructions: list[Instruction] = []
        self.constants: list[float] = []
        self.sizes: list[int] = []  # of storages, in entries
        self.regions: list[Region | None] = []  # of storages; None: scratch
        self.loads: list[tuple[int, int]] = []  # storages and tensors of the call that they copy
        self.outputs: set[int] = set()  # storages that are wanted in the end
        self.told_numbers = False  # by Python, which may have found them in a table
        self._stores: list[tuple[int, int]] = []
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._types: dict[int, torch.dtype] = {}  # of storages
        self._alive: list[Tensor] = []  # so that no address is given out twice
        self._written: set[int] = set()

    def given(self, tensor: Tensor, base: int) -> None:
        """What stands for a tensor of the call; one that is no double is loaded first, whole."""
        storage = self._new(tensor)
        if tensor.dtype == torch.float64:
            self.regions[storage] = Region(base, 0)
            self.outputs.add(storage)  # if it is written to
        else:
            self.loads.append((storage, base))

    def leaves(
        self, base: int, parts: Sequence[Tensor], dtype: torch.dtype = torch.float64
    ) -> None:
        """These tables, one behind the other, are what a tensor of the call is to have."""
        at = 0
        for part in parts:
            storage = self._own(part)
            loaded = any(storage == own for own, _ in self.loads)
            whole = self.sizes[storage] == part.numel() and part.is_contiguous()
            if not whole or loaded or self.regions[storage] or storage in self.outputs:
                storage = self._fresh(part.numel())
                to = Operand(storage, 0, _dense(part.shape))
                self._add("copy", part.shape, to, self._operand(part, part.shape))
            if dtype == torch.float64:
                self.regions[storage] = Region(base, at)
            else:
                self._stores.append((storage, base))
            self.outputs.add(storage)
            at += part.numel()

    def left_out(self, finite: Tensor) -> None:
        """The batch is left out where this is not true."""
        if finite.numel() != 1:
            raise Untraceable("it counts several batches")
        copy = self._fresh(1)
        self._add("copy", (), Operand(copy, 0, ()), self._operand(finite, ()))
        self._add("left_out", (), Operand(copy, 0, ()))

    def writes_to(self, tensor: Tensor) -> bool:
        return self._own(tensor) in self._written

    def stores(self) -> list[tuple[int, int]]:
        """Storages that go back to tensors of the call, for they have changed."""
        return [*(load for load in self.loads if load[0] in self._written), *self._stores]

    # ---------------------------------------------------------------- writing down

    def write(self, name: str, result: Tensor, *values: Any) -> Tensor:
        """result = name(values), each repeated to the size of the result."""
        if result.numel():
            to = self._operand(result, result.shape, new=True)
            self._add(name, result.shape, to, *(self._operand(v, result.shape) for v in values))
        return result

    def reduce(self, name: str, result: Tensor, value: Tensor, axes: Iterable[int] | None) -> None:
        """What the result has, and a table over axes: added up, or the highest, or the lowest."""
        gone = {axis % value.dim() for axis in (axes or range(value.dim()))} if value.dim() else ()
        own = list(result.stride())
        if result.dim() == value.dim():
            own = [step for axis, step in enumerate(own) if axis not in gone]
        strides = tuple(0 if axis in gone else own.pop(0) for axis in range(value.dim()))
        to = self._operand(result, result.shape)._replace(strides=strides)
        self._add(name, value.shape, to, self._operand(value, value.shape))

    def write_flipped(self, result: Tensor, value: Tensor, axes: Sequence[int]) -> None:
        """result = the table with these axes the other way round."""
        storage, at, steps = self._operand(value, value.shape)
        at += sum((value.shape[axis] - 1) * steps[axis] for axis in axes)
        turned = tuple(-s if axis in axes else s for axis, s in enumerate(steps))
        to = self._operand(result, result.shape, new=True)
        self._add("copy", result.shape, to, Operand(storage, at, turned))

    def along(
        self, name: str, axis: int, size: Sequence[int], *tables: Any, made: int = 1, other: int = 0
    ) -> None:
        """An operation on whole rows, along an axis."""
        size = tuple(size) or (1,)
        axis %= len(size)
        order = [*(d for d in range(len(size)) if d != axis), axis]
        operands: list[Operand] = []
        for table in tables:
            new = len(operands) < made
            operand = self._operand(table, table.shape if isinstance(table, Tensor) else (), new)
            steps = operand.strides or (0,) * len(size)
            operands.append(operand._replace(strides=tuple(steps[d] for d in order)))
        self._add(name, [size[d] for d in order], *operands, made=made, other=other)

    def _add(
        self, name: str, size: Sequence[int], *operands: Operand, made: int = 1, other: int = 0
    ) -> None:
        if 0 in size:
            return
        self._written.update(o.storage for o in operands[:made])
        self.instructions.append(Instruction(name, tuple(size), operands, made, other))

    def _operand(self, value: Any, size: Sequence[int], new: bool = False) -> Operand:
        if not isinstance(value, Tensor):
            return Operand(self._constant([float(value)]), 0, (0,) * len(size))
        storage = self._own(value, new)
        steps = [0 if n == 1 else s for n, s in zip(value.shape, value.stride(), strict=True)]
        missing = len(size) - value.dim()
        return Operand(storage, int(value.storage_offset()), (*[0] * missing, *steps))

    def _own(self, tensor: Tensor, new: bool = False) -> int:
        storage = self._numbers.get(_address(tensor))
        if storage is None:
            if not new and tensor.numel():
                kind = str(tensor.dtype).removeprefix("torch.")
                raise Untraceable(
                    f"it takes a tensor of {kind} that is neither parameter nor statistic, "
                    "or of a type that no loop reads"
                )
            storage = self._new(tensor)
        if tensor.dtype != self._types[storage] or tensor.is_neg():
            raise Untraceable("it takes the bits of a table for other numbers")
        return storage

    def _new(self, tensor: Tensor) -> int:
        if tensor.dtype not in KNOWN_TYPES:
            raise Untraceable(f"no loop computes in {tensor.dtype}")
        self._alive.append(tensor)
        storage = self._fresh(tensor.untyped_storage().nbytes() // tensor.element_size())
        self._numbers[_address(tensor)], self._types[storage] = storage, tensor.dtype
        return storage

    def _fresh(self, size: int, region: Region | None = None) -> int:
        self.sizes.append(size)
        self.regions.append(region)
        return len(self.sizes) - 1

    def _constant(self, values: list[float]) -> int:
        at = len(self.constants)
        self.constants += values
        return self._fresh(len(values), Region(CONSTANT, at))

    # ---------------------------------------------------------------- listening

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler first, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if func in HANDLERS:
                for table in _written_to(func, args):
                    self._own(table)
                return HANDLERS[func](self, func, *args, **kwargs)
            if func in EMPTY:
                result = func(*args, **kwargs)
                self._new(result)
                return result
            if func in LITERALS or (not types and _is_certain(func, args, kwargs)):
                self.told_numbers |= func in FROM_PYTHON
                return self._literal(func(*args, **kwargs))
            if func.is_view or func is torch.ops.aten._unsafe_view.default:
                return func(*args, **kwargs)
        apart = APART.get(func) or global_decomposition_table["post_autograd"].get(func)
        if apart is None:
            raise Untraceable(f"no loop does {func.name().removeprefix('aten::')}")
        with self:
            return apart(*args, **kwargs)

    def _literal(self, result: Any) -> Any:
        """A table that no value of another one decides."""
        if not isinstance(result, Tensor):
            return result
        storage = self._new(result)
        if result.numel():
            values = [float(v) for v in result.flatten().tolist()]
            self.regions[storage] = Region(CONSTANT, len(self.constants))
            if not result.is_contiguous() or self.sizes[storage] != len(values):
                raise Untraceable("it makes a table with gaps")
            self.regions[storage] = None
            to = Operand(storage, 0, (1,))
            if len(set(values)) == 1:
                self._add("copy", (len(values),), to, Operand(self._constant(values[:1]), 0, (0,)))
            else:
                self._add("copy", (len(values),), to, Operand(self._constant(values), 0, (1,)))
        return result


def _dense(size: Sequence[int]) -> tuple[int, ...]:
    """Steps along the axes of a table without gaps."""
    return tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written_to(func: Any, args: Sequence[Any]) -> list[Any]:
    """Tables that an operation changes."""
    if not func._schema.is_mutable:
        return []
    own = zip(func._schema.arguments, args, strict=False)
    return [given for a, given in own if a.alias_info is not None and a.alias_info.is_write]


def _is_certain(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation without tensors gives the same at each call."""
    flat = torch.utils._pytree.tree_leaves((args, kwargs))
    return (
        not any(isinstance(a, Tensor) for a in flat)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )
