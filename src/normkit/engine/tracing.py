"""Coefficients of any layer as a few kernels: its own function, traced once and compiled.

``coefficients`` is pure, so the operations that it does on tables can be written down, for moments
of so many samples and channels, and so can those of its gradient. Inductor makes a few kernels of
each list where torch would start dozens. Layers of one kind (class and options) and size share a
``TracedPlan``; it is made where it is first needed, and only on a GPU: on a CPU torch's operations
on tables cost less than a compiler.

A plan has one table each way, so that the passes over activations read and write it as they do that
of a family. Forward: scale, shift and center, then the moments, then what the map read of the
layer's statistics, which may change before the backward. New statistics are written in the same
kernels. Backward: constant and slope of dx, then the gradients of the parameters.

Whatever cannot be traced or compiled stays as it is, torch's operations, and ``nk.why`` says so.
``NORMKIT_INDUCTOR=0`` switches it off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Traced
from normkit.core.layout import Layout
from normkit.core.messages import first_line
from normkit.core.precision import without_autocast
from normkit.core.statistics import LayerState
from normkit.engine.coefficients import TableFunctions, Untraceable, kind_of
from normkit.engine.cpu import tape
from normkit.engine.dispatch import decide, forced, looked_into
from normkit.engine.replay.build import extension_on_cpu
from normkit.engine.replay.inductor import overheard, unheard
from normkit.engine.replay.record import active

SWITCH = "NORMKIT_INDUCTOR"
DEVICES = ["cuda"]  # where plans are made
MOST_PLANS = 4  # of one class and width: options or batch sizes that always change are not compiled
MOST_OPERATIONS = 400  # that a list may have: a compiler would take minutes for more

_plans: dict[Any, TracedPlan | str] = {}
_made: dict[Any, int] = {}  # class and width -> number of plans
_lock = threading.RLock()


def describe(layer: Any, x: Tensor, state: LayerState) -> Traced | None:
    """The description of a layer by its own function; None if it has to be torch's operations."""
    if looked_into() or type(x) is not Tensor:
        return None
    if x.is_cpu and _has_tapes():
        return tape.describe(layer, x, state)
    if x.device.type not in DEVICES:
        return None
    plan = find(layer, x, state)
    if not isinstance(plan, TracedPlan):
        return None
    own = layer._parameters
    return Traced(tuple([own[name] for name in plan.parameters]), plan, dict(state.statistics))


def obstacle(layer: Any, x: Tensor, state: LayerState) -> str:
    """Why there is no plan, for ``nk.why``."""
    if x.is_cpu and _has_tapes():
        return tape.obstacle(layer, x, state)
    if x.device.type not in DEVICES or type(x) is not Tensor:
        return ""
    plan = find(layer, x, state)
    return plan if isinstance(plan, str) else ""


def _has_tapes() -> bool:
    return forced() == "auto" and extension_on_cpu() is not None


def find(layer: Any, x: Tensor, state: LayerState) -> TracedPlan | str:
    """The plan for an input, made if there is none yet; or what keeps it from being made."""
    layout = layer.cells(x)
    one = layout.count == 1  # sizes of one behave in another way than all others
    size = x.device, layout.rows, layout.columns, type(layout), one, state.training, state.again
    known = layer.__dict__.setdefault("_traced", {})
    plan: TracedPlan | str | None = known.get(size)
    if plan is None:
        plan = _shared(layer, x, layout, state, size)
        if plan not in FOR_NOW:
            known[size] = plan
    if isinstance(plan, TracedPlan):
        first = plan.first or plan
        if first.obstacle:
            return first.obstacle
        if layer.listeners or layer.exchange is not None or state.processes is not None:
            return "someone listens to its moments, or shares them"
        if not plan.fits(layer, state):
            return "its tensors are not those that it had"
    return plan


OFF = f"{SWITCH}=0 is set"
UNSERVED = "the kernels cannot serve its input"
CAPTURING = "a CUDA graph is being captured, and it was not compiled before"
WATCHED = "someone watches torch's operations, and it was not compiled before"
REPEATED = "it repeats a forward that was torch's"
FOR_NOW = (OFF, UNSERVED, CAPTURING, WATCHED, REPEATED)


def _shared(layer: Any, x: Tensor, layout: Layout, state: LayerState, size: Any) -> Any:
    if os.environ.get(SWITCH) == "0":
        return OFF
    if decide(x, layout).name != "triton":
        return UNSERVED
    try:
        key = (*kind_of(layer, state), size)
    except Untraceable as why:
        return str(why)
    with _lock:
        if key in _plans:
            return _plans[key]
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return CAPTURING
        if torch._C._len_torch_dispatch_stack():
            return WATCHED
        width = type(layer), layout.columns, x.device
        first = None
        if state.again:  # it has to save the same tensors as the first one: it goes the same way
            first = _plans.get((*key[:-1], (*size[:-1], False)))
            if not isinstance(first, TracedPlan):
                return REPEATED
        elif _made.get(width, 0) >= MOST_PLANS:
            return f"it had {MOST_PLANS} sets of options and batch sizes already"
        else:
            _made[width] = _made.get(width, 0) + 1
        try:
            with torch.inference_mode(False):
                plan = TracedPlan(layer, layout, state, x.device)
            plan.first = first if isinstance(first, TracedPlan) else None
            _plans[key] = plan
        except Exception as error:  # whatever a layer or a compiler does: there is torch
            _plans[key] = f"its coefficients could not be compiled ({first_line(error):.200})"
        return _plans[key]


class TracedPlan:
    """The lists of operations of one kind of layer, for tables of one size."""

    def __init__(
        self,
        layer: Any,
        layout: Layout,
        state: LayerState,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        compiler: Callable[..., Any] | None = None,
    ) -> None:
        self.functions = TableFunctions(layer, layout, state, dtype)
        self.period = self.functions.period
        self.parameters, self.buffers = self.functions.parameters, self.functions.buffers
        self.types = [(t.shape, t.dtype) for t in self.functions.tensors(layer, state)]
        self.compiler = compiler or inductor
        tracer = _Tracer(self.functions, layout.count, device)
        self.forward_list, self.backward_list = tracer.forward(), tracer.backward()
        self.functions.let_go()  # layers of one kind share a plan
        self.mode = tracer.mode
        self.compiled = self.compiler(self.forward_list, self.mode)
        self.run_forward: Callable[..., Any] | None = None  # once it has been tried
        self.run_backward: Callable[..., Any] | None = None  # once there is a backward
        self.obstacle = ""  # what was found when they ran
        self.first: TracedPlan | None = None  # of the forward that this one repeats

    def fits(self, layer: Any, state: LayerState) -> bool:
        """Whether the layer's tensors are of the types that the kernels were made for."""
        own = layer._buffers
        for name, table in state.statistics.items():
            if table is not own[name]:  # copies that a checkpoint left: not to be written to
                return False
        for t, (shape, dtype) in zip(self.functions.tensors(layer, state), self.types, strict=True):
            if t.shape != shape or t.dtype != dtype or not t.is_contiguous():
                return False
        return True

    def forward(
        self, moments: Tensor, count: int, parameters: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> Tensor:
        """The table of the forward, from moments (2, rows · columns). Writes new statistics."""
        given = [count, moments, *_bare(parameters), *buffers]
        if self.run_forward is None:
            self.run_forward = self._tried(lambda: self.compiled, self.forward_list, given)
        with torch.no_grad(), overheard():
            (made,) = self.run_forward(given)
        return made

    def backward(
        self, sums: Tensor, tables: Tensor, count: int, parameters: Sequence[Tensor]
    ) -> Tensor:
        """The table of the backward, from Σ g·(x − center) and Σ g."""
        given = [count, sums, tables, *_bare(parameters)]
        if self.run_backward is None:
            if sums.is_cuda and torch.cuda.is_current_stream_capturing():
                with overheard():
                    return self.backward_list(*given)[0]
            compile = lambda: self.compiler(self.backward_list, self.mode)  # noqa: E731
            self.run_backward = self._tried(compile, self.backward_list, given)
        with torch.no_grad(), overheard():
            (made,) = self.run_backward(given)
        return made

    def _tried(
        self, compile: Callable[[], Callable[..., Any]], operations: Any, given: list[Any]
    ) -> Callable[..., Any]:
        """Kernels that have run once, on copies; or, if they cannot, the operations by torch."""
        copies = [t.clone() if isinstance(t, Tensor) else t for t in given]
        try:
            with _lock, torch.no_grad(), unheard():
                run = compile()
                run(copies)
            return run
        except Exception as error:  # of a compiler or a driver: from now on it is torch's turn
            self.obstacle = f"its kernels do not run ({first_line(error):.200})"
            return interpreted(operations, self.mode)


def _bare(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters without their gradients, which a recording takes for the same."""
    bare = [p.detach() for p in parameters]
    if active.recording is not None:
        active.recording.same(bare, parameters)
    return bare


class _Tracer:
    """Writes down what a layer does with tables of symbols' sizes."""

    def __init__(self, functions: TableFunctions, count: Any, device: torch.device) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self.functions, self.device, self.dtype = functions, device, functions.dtype
        shapes = ShapeEnv(duck_shape=False)
        self.mode: Any = FakeTensorMode(shape_env=shapes)
        self.count = count
        if count != 1:  # maps of every size share a plan
            source = ConstantSource("count")
            symbol = shapes.create_symbol(count, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            self.count = shapes.create_symintnode(symbol, hint=count, source=source)
        own = functions.tensors(functions.layer, functions.state)
        self.own = [self.fake(t) for t in own]
        with self.mode:
            moments = [self.table(*functions.size) for _ in range(2)]
            functions.read_statistics(moments, self.own, self.count)

    def fake(self, like: Tensor) -> Tensor:
        with self.mode:
            return torch.empty(like.shape, dtype=like.dtype, device=self.device)

    def table(self, *size: int) -> Tensor:
        with self.mode:
            return torch.empty(size, dtype=self.dtype, device=self.device)

    def forward(self) -> Any:
        def function(count: Any, moments: Tensor, *tensors: Tensor) -> tuple[Tensor]:
            return (self.functions.forward(self.joined, count, moments, *tensors)[0],)

        with torch.no_grad():
            return self.traced(function, self.table(2 * self.functions.period), *self.own)

    def backward(self) -> Any:
        functions = self.functions
        count = len(functions.parameters)
        own, absent = self.own[:count], self.own[count:]

        def function(count: Any, sums: Tensor, tables: Tensor, *parameters: Tensor) -> Any:
            return (self.joined(functions.backward(absent, count, sums, tables, *parameters)),)

        tables = self.table(functions.begin + functions.kept())
        return self.traced(function, self.table(2 * functions.period), tables, *own)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1).to(self.dtype) for part in parts])

    def traced(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        from torch._dispatch.python import enable_python_dispatcher
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        # hooks for saved tensors are others': a checkpoint counts what is saved
        aside = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with without_autocast(self.device), aside, self.mode, enable_python_dispatcher():
            trace = make_fx(function, decomposition_table=select_decomp_table())
            graph = trace(self.count, *tensors)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        nodes = list(graph.graph.nodes)
        if any(node.op == "get_attr" for node in nodes):
            raise Untraceable("it reads a tensor that is neither parameter nor statistic")
        operations = sum(node.op == "call_function" for node in nodes)
        if operations > MOST_OPERATIONS:
            raise Untraceable(f"its coefficients are {operations} operations")
        return graph


def inductor(graph: Any, mode: Any) -> Callable[..., Any]:
    """Kernels by Inductor for a list of operations; called with a list of arguments."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = [node.meta.get("val", 1) for node in given]  # of maps of one position, a number
    device = next(t.device for t in inputs if isinstance(t, Tensor))
    with (
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        torch.no_grad(),
        without_autocast(device),
        # one kernel writes all parts of the table, where there would be one for each
        config.patch(force_pointwise_cat=device.type != "cpu"),
    ):
        compiled: Callable[..., Any] = compile_fx_inner(
            graph, inputs, cudagraphs=BoxedBool(False), is_inference=True
        )
    return compiled


def interpreted(graph: Any, mode: Any) -> Callable[..., Any]:
    """The same operations by torch, one after the other."""
    return lambda arguments: graph(*arguments)
