"""Compiled functions: which graph a call replays, and how a new one is made."""

from __future__ import annotations

import functools
import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn, overload

import numpy as np

from cudatool.compiler._fusion import Player, planned_fusion
from cudatool.compiler._plan import Arena, Plan
from cudatool.compiler._state import Facts, State, arguments, environment, is_constant
from cudatool.compiler._trace import Graph, Trace, captured, plan_events, traced_nodes
from cudatool.errors import GraphBreakError, UsageError
from cudatool.graphs import CUDAGraph
from cudatool.ops._pointwise import taken_over
from cudatool.runtime.allocator import note_plan, planned
from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.capture import is_capturing
from cudatool.runtime.device import current_device
from cudatool.runtime.dtypes import require_int
from cudatool.runtime.event import Event
from cudatool.runtime.kernel import watched
from cudatool.runtime.stream import Stream, current_stream
from cudatool.runtime.traced_calls import traced
from cudatool.units import format_bytes

__all__ = ["CompiledFunction", "compile"]

_Function = Callable[..., Any]
_RUNS: Final = 3  # of a function that first allocates what it keeps for the next time, before its trace is given up
_MOST: Final = 8  # graphs of one function
_REMEMBERED: Final = 64
_FUSED: Final = 64  # operations of one kernel
_streams: dict[int, Stream] = {}  # where functions are traced, by device


class _Compiled:
    """One graph with the facts that it holds for."""

    def __init__(self, facts: Facts, graph: Graph, memory: Plan, cuda_graph: CUDAGraph) -> None:
        self.facts = facts
        self.graph = graph
        self.plan = memory
        self.cuda_graph = cuda_graph
        self.arena: Arena
        self.inputs: dict[str, DeviceArray] = {}  # where the graph reads arguments
        self.changed: frozenset[str] = frozenset()  # those that it changes
        self.outputs: Any = None
        self.state: State
        self.effects: frozenset[str] = frozenset()  # the slots that a replay sets
        self.done: Event | None = None  # after the last call
        self.calls = 0


class CompiledFunction:
    """What :func:`compile` returns: called like the function, it replays a graph of it.

    Attributes
    ----------
    hits, misses
        How many calls were replays, and how many ran or traced the function.
    """

    def __init__(self, function: _Function, *, fullgraph: bool, max_fusion_size: int) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._name = str(getattr(function, "__qualname__", type(function).__qualname__))
        self._fullgraph = fullgraph
        self._most = max_fusion_size
        self._entries: list[_Compiled] = []
        self._ready: deque[Facts] = deque(maxlen=_REMEMBERED)  # that the function ran with once already
        self._broken: deque[Facts] = deque(maxlen=_REMEMBERED)  # that it cannot be a graph with
        self._reasons: deque[str] = deque(maxlen=_REMEMBERED)
        self._lock = threading.RLock()  # the inputs and results of a graph are in one place
        self.hits = self.misses = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the graph that was traced under the same facts, or trace one.

        Raises
        ------
        GraphBreakError
            The function cannot be a graph, and ``fullgraph=True``.
        """
        if is_capturing(current_stream()):
            return self._function(*args, **kwargs)  # it becomes a part of that graph
        with self._lock:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts, arrays, objects = arguments(args, kwargs)
        facts |= environment()
        state = State(self._function, objects)
        why = "the first call"
        for entry in reversed(self._entries):
            why = _why_not(entry, facts, state, arrays)
            if not why:
                self.hits += 1
                return self._replay(entry, arrays, state)
        self.misses += 1
        if facts in self._broken:
            return self._function(*args, **kwargs)
        if facts not in self._ready:
            self._ready.append(facts)
            self._reasons.append(f"{why}: run eagerly once, traced at the next call")
            return self._function(*args, **kwargs)
        try:
            others = [other for other in self._entries if other.facts != facts]
            if len(others) >= _MOST:
                raise GraphBreakError(f"the function has {_MOST} graphs already; give it fewer different arguments")
            entry = self._trace(facts, state, arrays, args, kwargs)
        except GraphBreakError as error:
            self._reasons.append(f"{why}: graph break: {error}")
            if self._fullgraph:
                raise
            self._broken.append(facts)
            return self._function(*args, **kwargs)
        self._reasons.append(f"{why}: traced")
        self._ready.remove(facts)
        self._entries = [*others, entry]
        return self._replay(entry, arrays, State(self._function, objects))

    def _trace(
        self, facts: Facts, state: State, arrays: dict[str, DeviceArray], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Compiled:
        """Run the function without executing anything, plan its memory, and capture it in the planned place."""
        device = current_device()
        stream = _streams.get(device) or _streams.setdefault(device, Stream(device))
        try:
            with _no_collection():
                for attempt in range(_RUNS):
                    trace, inputs, objects = self._unplanned(device, stream, arrays, args, kwargs)
                    after = State(self._function, objects)
                    effects = state.changed(after)
                    _refuse_views([after.slots[path].value for path in effects], inputs)
                    del after, inputs  # they keep memory
                    state.restore()
                    _refuse_shared(arrays, state.arrays(effects))
                    for path in effects:
                        _put(state, path, _Replaced(path))
                    try:
                        entry = self._planned(facts, trace, device, stream, arrays, args, kwargs)
                        break
                    except GraphBreakError:
                        if attempt == _RUNS - 1:
                            raise
                        state.restore()
                after = State(self._function, objects)
                # Against what was there before, where the second run began.
                if state.changed(after) != effects:
                    raise GraphBreakError("the function changes other state each time it runs")
        except BaseException:
            state.restore()
            raise
        entry.state, entry.effects = after, effects
        return entry

    def _unplanned(
        self,
        device: int,
        stream: Stream,
        arrays: dict[str, DeviceArray],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Trace, dict[str, DeviceArray], dict[str, Any]]:
        """Return what a run does, where it read arguments, and the objects among them."""
        inputs = {path: _static(path, array) for path, array in arrays.items()}
        args, kwargs = _with_inputs(args, kwargs, inputs)
        trace, cuda_graph = Trace(device, stream, inputs), CUDAGraph(keep_graph=True)
        with captured(cuda_graph, stream, trace), taken_over(trace.take), watched(trace.launched):
            results = self._function(*args, **kwargs)  # which must live until the trace has ended
        cuda_graph.reset()
        _refuse_views(results, inputs)
        return trace, inputs, arguments(args, kwargs)[2]

    def _planned(
        self,
        facts: Facts,
        trace: Trace,
        device: int,
        stream: Stream,
        arrays: dict[str, DeviceArray],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Compiled:
        """Run the function in its planned memory, and capture what it does."""
        fusion, memory = planned_fusion(trace, self._most)
        entry = _Compiled(facts, fusion.graph, memory, CUDAGraph())
        entry.arena = arena = Arena(memory, fusion.absent, current_stream(device))
        with planned(arena, device):
            entry.inputs = {path: _static(path, array) for path, array in arrays.items()}
        entry.changed = frozenset(buffer.line for buffer in memory.buffers[: trace.inputs] if buffer.kept)
        args, kwargs = _with_inputs(args, kwargs, entry.inputs)
        again = Trace(device, stream)
        player = Player(trace, fusion.groups, arena.address_of, again)
        with captured(entry.cuda_graph, stream, again), planned(arena, device), taken_over(player.take):
            entry.outputs = self._function(*args, **kwargs)
        if traced_nodes(again.graph()) != traced_nodes(fusion.graph):
            raise GraphBreakError("the function does something else each time it runs")
        arena.check(trace.inputs)
        events = plan_events(self._name, device, fusion.graph, arena, fusion.stacks, fusion.fused_at)
        note_plan(arena, events)
        return entry

    def _replay(self, entry: _Compiled, arrays: dict[str, DeviceArray], state: State) -> Any:
        stream = current_stream()
        if entry.done is None:
            entry.done = Event()
        else:
            stream.wait_event(entry.done)  # the graph's memory is one place, whatever stream a call is on
        entry.arena.use(stream)
        for path, array in arrays.items():
            entry.inputs[path].copy_(array)
        entry.cuda_graph.replay()
        for path in entry.changed:
            if arrays[path].layout.flags.writeable:
                arrays[path].copy_(entry.inputs[path])
        given = {id(entry.inputs[path]): array for path, array in arrays.items()}
        for path in entry.effects:
            _put(state, path, _returned(entry.state.slots[path].value, given, None))
        outputs = _returned(entry.outputs, given, entry.arena)
        entry.done.record(stream)
        entry.calls += 1
        return outputs

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that were traced and can be replayed, the oldest first."""
        return tuple(entry.graph for entry in self._entries)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The memory of each of :attr:`graphs`."""
        return tuple(entry.plan for entry in self._entries)

    @property
    def peaks(self) -> tuple[int, ...]:
        """Bytes that each of :attr:`graphs` uses of the memory that was planned for it: what ran, beside the plan."""
        return tuple(entry.arena.peak for entry in self._entries)

    def explain(self) -> str:
        """Return a text: why each call that was no replay was none, and nodes and memory of each graph."""
        lines = [f"{self.hits} calls replayed a graph, {self.misses} did not:"]
        lines += [f"  {reason}" for reason in self._reasons]
        for number, entry in enumerate(self._entries):
            lines += [f"graph {number}: {len(entry.graph.nodes)} nodes, replayed {entry.calls} times"]
            for index, node in enumerate(entry.graph.nodes):
                autocast = f" autocast={node.autocast}" if node.autocast else ""
                lines.append(
                    f"  {index:4} {node.op or node.kind} [{node.name}] stream {node.stream}{autocast} {node.line}"
                )
                lines += [f"         {part.op or part.kind} [{part.name}] {part.line}" for part in node.parts]
            if entry.graph.folded:
                lines.append(f"  folded to constants: {', '.join(entry.graph.folded)}")
            found = entry.plan
            lines.append(
                f"  memory: {format_bytes(found.peak)} planned, {format_bytes(entry.arena.peak)} used, "
                f"{format_bytes(found.unshared)} if no buffers shared"
            )
            for buffer, offset in zip(found.buffers, found.offsets, strict=True):
                kept = ", kept" if buffer.kept else ""
                life = f"nodes {buffer.first} to {buffer.last}{kept}"
                lines.append(f"    {offset:#x} {format_bytes(buffer.size)} {life} {buffer.line}")
        return "\n".join(lines)

    def reset(self) -> None:
        """Forget all graphs; their memory goes back when no array lies in it."""
        with self._lock:
            self._entries = []
            self._ready.clear()
            self._broken.clear()


@overload
def compile(
    model: _Function, *, fullgraph: bool = False, options: Mapping[str, Any] | None = None
) -> CompiledFunction: ...


@overload
def compile(
    model: None = None, *, fullgraph: bool = False, options: Mapping[str, Any] | None = None
) -> Callable[[_Function], CompiledFunction]: ...


@traced
def compile(
    model: _Function | None = None, *, fullgraph: bool = False, options: Mapping[str, Any] | None = None
) -> Any:
    """Return a version of a function that traces it once and replays it as one CUDA graph; also a decorator.

    A call whose facts are new runs the function eagerly. The next one like it traces the function: it runs while
    nothing is executed, its memory is planned, and it runs once more to be captured in the planned place. All further
    calls replay the graph, as long as its guards hold: device, autocast, precision switches; shapes, dtypes and strides
    of arrays among the arguments; and all else that the function can reach: numbers by value, arrays and objects by
    identity.

    Parameters
    ----------
    model
        A function or bound method. It takes and returns arrays, constants, and tuples, lists and dicts of them.
    fullgraph
        Raise an error if the function cannot be one graph; else such calls run eagerly, and
        :meth:`CompiledFunction.explain` says why.
    options
        ``max_fusion_size``: how many elementwise operations one kernel computes at most, 64 by default; 1 fuses none.

    Raises
    ------
    UsageError
        `model` cannot be called, or there is no such option.
    """
    if model is None:
        return functools.partial(compile, fullgraph=fullgraph, options=options)
    most = _max_fusion_size(options or {})
    if not callable(model):
        raise UsageError(f"compile takes a function, not {type(model).__name__}")
    return CompiledFunction(model, fullgraph=fullgraph, max_fusion_size=most)


def _max_fusion_size(options: Mapping[str, Any]) -> int:
    if unknown := options.keys() - {"max_fusion_size"}:
        raise UsageError(f"compile has no option {sorted(map(str, unknown))[0]}; it has max_fusion_size")
    most = require_int("max_fusion_size", options.get("max_fusion_size", _FUSED))
    if most < 1:
        raise UsageError(f"max_fusion_size must be at least 1, which fuses nothing, not {most}")
    return most


class _Replaced:
    """Stands, while a function runs for the last time, for an array that it replaces: it must not read it before."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise GraphBreakError(f"the function reads {self._path} before it replaces it: pass it as an argument instead")


for _name in set(dir(DeviceArray)) - set(dir(object)) | {"__eq__", "__iter__"}:
    if _name.startswith("__"):  # operators are looked up in the class
        setattr(_Replaced, _name, _Replaced._refuse)


def _put(state: State, path: str, value: Any) -> None:
    put = state.slots[path].put
    assert put is not None  # State.changed has seen to it
    put(value)


def _why_not(entry: _Compiled, facts: Facts, state: State, arrays: dict[str, DeviceArray]) -> str:
    """Return which guard fails, empty if the graph can be replayed."""
    for name in {**entry.facts, **facts}:
        before, now = entry.facts.get(name), facts.get(name)
        if before != now:
            return f"{name} was {before}, and is {now}"
    if path := entry.state.difference(state, entry.effects):
        return f"{path} is another one"
    if _shared(arrays, state.arrays(entry.effects)) or any(_within(array, entry.arena) for array in arrays.values()):
        return "an argument shares memory with another array of the function"
    return ""


def _shared(arrays: dict[str, DeviceArray], state: dict[str, DeviceArray]) -> tuple[str, str] | None:
    items = list(arrays.items())
    for index, (path, array) in enumerate(items):
        for other_path, other in [*items[:index], *state.items()]:
            if array.size and other.size and np.may_share_memory(array.layout, other.layout):
                return path, other_path
    return None


def _refuse_shared(arrays: dict[str, DeviceArray], state: dict[str, DeviceArray]) -> None:
    if found := _shared(arrays, state):
        raise GraphBreakError(f"{found[0]} shares memory with {found[1]}, and the graph has its own copy of arguments")


def _within(array: DeviceArray, arena: Arena) -> bool:
    return arena.address <= array.data_ptr() < arena.address + arena.plan.peak


def _static(path: str, array: DeviceArray) -> DeviceArray:
    """Return an array of the same shape and strides, whose content is not set."""
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    dense = empty(tuple(array.shape[axis] for axis in order), array.dtype, device=array.device)
    found = dense.transpose(*np.argsort(order).tolist()) if array.ndim else dense
    if array.size and any(n > 1 and a != b for n, a, b in zip(array.shape, array.strides, found.strides, strict=True)):
        raise GraphBreakError(f"{path} has gaps or repeated elements; pass its contiguous()")
    return found


def _with_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], inputs: dict[str, DeviceArray]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _replaced(args, "args", inputs), {k: _replaced(v, k, inputs) for k, v in kwargs.items()}


def _replaced(value: Any, path: str, inputs: dict[str, DeviceArray]) -> Any:
    """Return a value with the arrays in it replaced by the graph's inputs."""
    if isinstance(value, DeviceArray):
        return inputs[path]
    if type(value) in (list, tuple):
        return type(value)(_replaced(part, f"{path}[{index}]", inputs) for index, part in enumerate(value))
    if type(value) is dict:
        return {key: _replaced(part, f"{path}[{key!r}]", inputs) for key, part in value.items()}
    return value


def _refuse_views(outputs: Any, inputs: dict[str, DeviceArray]) -> None:
    """Check what a function returns.

    Raises
    ------
    GraphBreakError
        It returns a part of an argument, which would be a part of the graph's copy; or something that is no array,
        constant or container of them.
    """
    if isinstance(outputs, DeviceArray):
        same = any(outputs is array for array in inputs.values())
        if not same and (path := _shared({"the result": outputs}, inputs)):
            raise GraphBreakError(f"the function returns a view of {path[1]}; return a clone()")
    elif type(outputs) in (list, tuple, dict):
        for part in outputs.values() if type(outputs) is dict else outputs:
            _refuse_views(part, inputs)
    elif not is_constant(outputs):
        raise GraphBreakError(f"the function returns a {type(outputs).__name__}, which no replay makes anew")


def _returned(outputs: Any, given: dict[int, DeviceArray], arena: Arena | None) -> Any:
    """Return what a call returns: copies of what lies in `arena`, and arguments themselves."""
    if isinstance(outputs, DeviceArray):
        if id(outputs) in given:
            return given[id(outputs)]
        return outputs.clone() if arena is not None and _within(outputs, arena) else outputs
    if type(outputs) in (list, tuple):
        return type(outputs)(_returned(part, given, arena) for part in outputs)
    if type(outputs) is dict:
        return {key: _returned(part, given, arena) for key, part in outputs.items()}
    return outputs


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing arrays at other times in one run than in the next."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
