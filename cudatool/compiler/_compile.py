"""Compiled functions: which graph a call replays, and how a new one is made."""

from __future__ import annotations

import functools
import gc
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn, overload

import numpy as np

from cudatool.blas._gemm import products_watched
from cudatool.blas._workspace import scoped_workspaces
from cudatool.compiler._fusion import Player, planned_fusion
from cudatool.compiler._inputs import (
    Extents,
    placed,
    refuse_gaps,
    refuse_shared,
    refuse_views,
    shared,
    with_inputs,
)
from cudatool.compiler._plan import Plan, PlanArena
from cudatool.compiler._results import Results
from cudatool.compiler._state import Facts, Looks, ReachableState, arguments, environment
from cudatool.compiler._trace import EventCollector, Graph, captured, plan_events, traced_nodes
from cudatool.errors import GraphBreakError, UsageError
from cudatool.graphs import CUDAGraph
from cudatool.ops._pointwise import taken_over
from cudatool.ops._rows import rows_taken_over
from cudatool.runtime.allocator import note_plan, planned
from cudatool.runtime.array import DeviceArray
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
_LARGE: Final = 1 << 20  # bytes: a smaller argument is copied in the time that its copy takes to begin
_streams: dict[int, Stream] = {}  # where functions are traced, by device
_tracing = threading.RLock()  # of all functions: they share these streams, and a capture forbids another thread's calls


class _Compiled:
    """One graph with the facts that it holds for."""

    def __init__(self, facts: Facts, graph: Graph, memory: Plan, cuda_graph: CUDAGraph, arena: PlanArena) -> None:
        self.facts = facts
        self.graph = graph
        self.plan = memory
        self.cuda_graph = cuda_graph
        self.arena = arena
        self.inputs: dict[str, DeviceArray] = {}  # where the graph reads arguments
        self.copied: dict[str, DeviceArray] = {}  # those of them that are its own
        self.changed: frozenset[str] = frozenset()  # those of its own that it changes
        self.outputs: Any = None
        self.results: Results  # the same, and what the function stores
        self.state: ReachableState
        self.effects: frozenset[str] = frozenset()  # the slots that a replay sets
        self.looks: Looks
        self.extents: Extents  # of the state's arrays
        self.done: Event | None = None  # after the last call
        self.calls = 0

    def take(self, state: ReachableState, effects: frozenset[str]) -> None:
        """Note the state that the function has left, and what of it each replay sets."""
        self.state, self.effects = state, effects
        self.looks = Looks(state, effects)
        self.extents = Extents(state.arrays(effects).values())
        stored = [(put, slot.value) for path in effects if (put := (slot := state.slots[path]).put) is not None]
        self.results = Results(self.outputs, stored, self.inputs.values(), self.arena)

    def difference(self, facts: Facts, state: ReachableState) -> str:
        """Return which guard fails, empty if none does."""
        for name in {**self.facts, **facts}:
            before, now = self.facts.get(name), facts.get(name)
            if before != now:
                return f"{name} was {before}, and is {now}"
        if path := self.state.difference(state, self.effects):
            return f"{path} is another one"
        return ""

    def moved(self, arrays: dict[str, DeviceArray]) -> list[str]:
        """Return the arguments that are elsewhere than where the graph reads them."""
        return [
            path
            for path, array in arrays.items()
            if path not in self.copied and array.data_ptr() != self.inputs[path].data_ptr()
        ]

    def takes(self, arrays: dict[str, DeviceArray]) -> bool:
        """Return whether arguments share memory with nothing."""
        return not shared(arrays, {}) and not any(
            self.extents.meet(array) or self.arena.address <= array.data_ptr() < self.arena.address + self.plan.peak
            for array in arrays.values()
        )


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
        # Facts that the function ran with once already, and where its arguments were.
        self._ready: deque[tuple[Facts, dict[str, int]]] = deque(maxlen=_REMEMBERED)
        self._moving: set[str] = set()  # arguments that were in different places
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
        same = [entry.facts == facts and entry.looks.are_same() for entry in self._entries]
        # Before a ReachableState holds what is stored, too.
        held = [entry.results.is_held(in_place=each) for entry, each in zip(self._entries, same, strict=True)]
        why, state = "the first call", None
        for entry, is_same, is_held in reversed(list(zip(self._entries, same, held, strict=True))):
            if not is_same:
                state = state or ReachableState(self._function, objects)
                why = entry.difference(facts, state)
            if not why or is_same:
                why = "" if entry.takes(arrays) else "an argument shares memory with another array of the function"
            if not why and (moved := entry.moved(arrays)):
                why = f"{moved[0]} is in another place than before"
                self._moving.update(moved)
                self._ready.append((facts, {}))
            if why:
                continue
            if is_held:
                self.misses += 1
                self._reasons.append("what the last call stored is still in use elsewhere: run eagerly")
                return self._function(*args, **kwargs)
            if state is not None and not is_same:
                entry.looks = Looks(state, entry.effects)
            self.hits += 1
            return self._replay(entry, arrays)
        self.misses += 1
        return self._miss(why, facts, state or ReachableState(self._function, objects), arrays, args, kwargs)

    def _miss(
        self,
        why: str,
        facts: Facts,
        state: ReachableState,
        arrays: dict[str, DeviceArray],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Do a call for which there is no graph: run the function, or trace it if it has run like this before."""
        if facts in self._broken:
            return self._function(*args, **kwargs)
        places = next((places for ready, places in self._ready if ready == facts), None)
        if places is None:
            self._ready.append((facts, {path: array.data_ptr() for path, array in arrays.items()}))
            self._reasons.append(f"{why}: run eagerly once, traced at the next call")
            del state  # it keeps arrays that this run replaces
            with scoped_workspaces():  # a graph has its own
                return self._function(*args, **kwargs)
        try:
            others = [other for other in self._entries if other.facts != facts]
            if len(others) >= _MOST:
                raise GraphBreakError(f"the function has {_MOST} graphs already; give it fewer different arguments")
            with _tracing:
                entry = self._trace(facts, state, arrays, self._copied(arrays, places), args, kwargs)
        except GraphBreakError as error:
            self._reasons.append(f"{why}: graph break: {error}")
            if self._fullgraph:
                raise
            self._broken.append(facts)
            return self._function(*args, **kwargs)
        self._reasons.append(f"{why}: traced")
        self._ready.remove((facts, places))
        self._entries = [*others, entry]
        return self._replay(entry, arrays)

    def _copied(self, arrays: dict[str, DeviceArray], places: dict[str, int]) -> frozenset[str]:
        """Return the arguments that a graph copies: not large ones that are where they were and have not moved yet."""
        return frozenset(
            path
            for path, array in arrays.items()
            if path in self._moving or array.nbytes < _LARGE or places.get(path) != array.data_ptr()
        )

    def _trace(
        self,
        facts: Facts,
        state: ReachableState,
        arrays: dict[str, DeviceArray],
        copied: frozenset[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Compiled:
        """Run the function without executing anything, plan its memory, and capture it in the planned place."""
        for path, array in arrays.items():
            refuse_gaps(path, array)
        for path, why in state.unguarded.items():
            raise GraphBreakError(f"no guard can be made for {path}: {why}")
        device = current_device()
        stream = _streams.get(device) or _streams.setdefault(device, Stream(device))
        try:
            with _no_collection(), _no_random_numbers():
                for attempt in range(_RUNS):
                    trace, inputs, objects = self._unplanned(device, stream, arrays, copied, args, kwargs)
                    after = ReachableState(self._function, objects)
                    effects = state.changed(after)
                    refuse_views([after.slots[path].value for path in effects], inputs)
                    del after, inputs  # they keep memory
                    state.restore()
                    refuse_shared(arrays, state.arrays(effects))
                    for path in effects:
                        _put(state, path, _Replaced(path))
                    try:
                        entry = self._planned(facts, trace, device, stream, arrays, copied, args, kwargs)
                        break
                    except GraphBreakError:
                        if attempt == _RUNS - 1:
                            raise
                        state.restore()
                after = ReachableState(self._function, objects)
                # Against what was there before, where the second run began.
                if state.changed(after) != effects:
                    raise GraphBreakError("the function changes other state each time it runs")
        except BaseException:
            state.restore()
            raise
        entry.take(after, effects)
        return entry

    def _unplanned(
        self,
        device: int,
        stream: Stream,
        arrays: dict[str, DeviceArray],
        copied: frozenset[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[EventCollector, dict[str, DeviceArray], dict[str, Any]]:
        """Return what a run does, where it read arguments, and the objects among them."""
        inputs = placed(arrays, copied)
        args, kwargs = with_inputs(args, kwargs, inputs)
        before = arguments(args, kwargs)[0]
        own = {path: array for path, array in inputs.items() if path in copied}
        trace, cuda_graph = EventCollector(device, stream, own), CUDAGraph(keep_graph=True)
        with (
            captured(cuda_graph, stream, trace),
            taken_over(trace.take),
            rows_taken_over(trace.take_rows),
            products_watched(trace.product_begins),
            watched(trace.launched),
        ):
            results = self._function(*args, **kwargs)  # which must live until the trace has ended
        cuda_graph.reset()
        refuse_views(results, inputs)
        after, found, objects = arguments(args, kwargs)
        if before != after or any(found[path] is not array for path, array in inputs.items()):
            raise GraphBreakError("the function changes a container among its arguments")
        return trace, inputs, objects

    def _planned(
        self,
        facts: Facts,
        trace: EventCollector,
        device: int,
        stream: Stream,
        arrays: dict[str, DeviceArray],
        copied: frozenset[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Compiled:
        """Run the function in its planned memory, and capture what it does."""
        fusion, memory = planned_fusion(trace, self._most)
        arena = PlanArena(memory, fusion.absent, fusion.trace.same, current_stream(device))
        entry = _Compiled(facts, fusion.graph, memory, CUDAGraph(), arena)
        with planned(arena, device):
            entry.inputs = placed(arrays, copied)
        entry.copied = {path: array for path, array in entry.inputs.items() if path in copied}
        entry.changed = frozenset(buffer.line for buffer in memory.buffers[: trace.inputs] if buffer.kept)
        args, kwargs = with_inputs(args, kwargs, entry.inputs)
        again = EventCollector(device, stream)
        player = Player(fusion.trace, fusion.groups, arena.address_of, again)
        with (
            captured(entry.cuda_graph, stream, again),
            planned(arena, device),
            taken_over(player.take),
            rows_taken_over(player.take_rows),
            products_watched(again.product_begins),
            watched(again.launched),
        ):
            entry.outputs = self._function(*args, **kwargs)
        if traced_nodes(again.graph()) != traced_nodes(fusion.graph):
            raise GraphBreakError("the function does something else each time it runs")
        if again.numbers != trace.numbers:
            raise GraphBreakError("the function computes with other numbers each time it runs")
        arena.check(trace.inputs)
        events = plan_events(self._name, device, fusion.graph, arena, fusion.stacks, fusion.fused_at)
        note_plan(arena, events)
        return entry

    def _replay(self, entry: _Compiled, arrays: dict[str, DeviceArray]) -> Any:
        stream = current_stream()
        if entry.done is None:
            entry.done = Event()
        else:
            stream.wait_event(entry.done)  # the graph's memory is one place, whatever stream a call is on
        entry.arena.use(stream)
        for path, own in entry.copied.items():
            own.copy_(arrays[path])
        entry.cuda_graph.replay()
        for path in entry.changed:
            if arrays[path].layout.flags.writeable:
                arrays[path].copy_(entry.inputs[path])
        outputs = entry.results.hand_out({id(entry.inputs[path]): array for path, array in arrays.items()})
        entry.looks.renew()
        entry.results.note_holders()
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
    nothing is executed, its memory is planned, and it runs once more to be captured in the planned place. An argument
    of 1 MiB or more that is in the same memory in both calls is read there, and others are copied into the graph's; if
    it is in other memory later, the function is traced once more, and the argument copied. All further calls replay the
    graph, as long as its guards hold: device, autocast, precision switches; shapes, dtypes and strides
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
    if not isinstance(options, Mapping):
        raise UsageError(f"compile takes a dict of options, not {type(options).__name__}")
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


def _put(state: ReachableState, path: str, value: Any) -> None:
    put = state.slots[path].put
    assert put is not None  # ReachableState.changed has seen to it
    put(value)


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


@contextmanager
def _no_random_numbers() -> Iterator[None]:
    """Refuse random numbers of the host, which a replay would repeat.

    Raises
    ------
    GraphBreakError
        Python's or NumPy's own generator has given some.
    """
    before, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
        # Pickles, as states hold arrays; texts of those may leave numbers out.
        if random.getstate() != before or pickle.dumps(np.random.get_state()) != pickle.dumps(of_numpy):
            raise GraphBreakError("the function takes random numbers of the host, which a replay would repeat")
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)
