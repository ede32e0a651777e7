"""Random programs of copies, kernels and the host's own accesses, and which of those race by CUDA's rules.

A program is a list of steps, each a line of its text (:func:`text_of`). :class:`Player` runs it on the software device,
:func:`races` says from the order that CUDA promises alone which accesses of the host race with which lines, and
:func:`difference` compares that with what the sanitizer found::

    python tests/races/host_programs.py --programs 5000 --seed 1
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from random_programs import SCHEDULES, arguments, listing, seeded

__all__ = ["Player", "Step", "difference", "draw", "races", "run", "text_of"]

SIZE = 2 * mmap.PAGESIZE
PINNED, REGISTERED, MANAGED, DEVICE = ("p0", "p1"), ("r",), ("m",), ("d0", "d1")
ON_HOST = PINNED + REGISTERED
HOSTS = ON_HOST + MANAGED  # what the host touches without a call
_LONGEST = 18  # steps of a program
RANGES = ((0, SIZE), (0, SIZE // 2), (SIZE // 2, SIZE // 2), (0, SIZE // 4), (SIZE // 4, SIZE // 2), (1024, 512))
ROWS = (1024, 256, 4)  # of 2-D copies: pitch, width, height
LEGACY, BLOCKING, STREAMS = 0, 1, (0, 1, 2, 3)
EVENTS = (0, 1, 2)
READ, WRITE = 1, 2
FILE = str(Path(__file__).with_name("random_program.py"))


class Step(NamedTuple):
    """One line of a program; `threaded` is made in a thread that the program joins at once."""

    kind: str
    args: tuple[Any, ...]
    threaded: bool = False

    @property
    def text(self) -> str:
        call = f"p.{self.kind}({', '.join(map(repr, self.args))})"
        return f"p.in_a_thread(lambda: {call})" if self.threaded else call


def text_of(steps: list[Step]) -> str:
    """Return the text of a program."""
    return "\n".join(step.text for step in steps) + "\n"


# ---- drawing ----


class _Draw:
    def __init__(self, random_: random.Random) -> None:
        self.random = random_
        self.values = iter(range(128, 256))

    def pair(self) -> tuple[int, int]:
        return self.random.choice(RANGES)

    def two(self, *, no_managed: bool = False) -> tuple[str, str]:
        """Return target and source of a copy."""
        names = [name for name in HOSTS + DEVICE if not (no_managed and name in MANAGED)]
        target = self.random.choice(names)
        return target, self.random.choice([name for name in names if name != target])

    def node(self) -> tuple[Any, ...]:
        """Return work that a stream and a node of a graph can do: kind and arguments."""
        kind = self.random.choice(("copy", "copy", "copy", "rows", "array", "set", "fill", "through", "indirect"))
        start, size = self.pair()
        if kind == "copy":
            return kind, *self.two(), start, size
        if kind == "rows":
            return kind, *self.two()
        if kind == "array":
            return kind, self.random.choice(HOSTS + DEVICE), self.random.choice(("to", "from")), start, size
        if kind == "set":
            return kind, self.random.choice(HOSTS + DEVICE), start, size
        if kind == "indirect":
            return kind, start, size
        if kind == "fill":
            return kind, self.random.choice(HOSTS + DEVICE), start, size
        return kind, *self.two(), start, size

    def part(self) -> tuple[Any, ...]:
        """Return work that cudatool's runtime does: a copy either way, or a kernel on the host's memory."""
        choose = self.random.choice
        return (choose(("get", "put", "fill")), choose(DEVICE), choose(ON_HOST), *self.pair())

    def step(self) -> Step:
        stream, choose = self.random.choice(STREAMS), self.random.choice
        kind = self.random.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
        start, size = self.pair()
        if kind == "work":
            return Step(kind, (stream, self.node()), self.random.random() < 0.05)
        if kind == "runtime":
            return Step(kind, (stream, self.part()))
        if kind == "copy_now":
            return Step(kind, (*self.two(no_managed=True), start, size))
        if kind == "set_now":
            return Step(kind, (choose(ON_HOST + DEVICE), start, size))
        if kind == "batch":
            pairs = [("p0", "d0", 0), ("d1", "p1", 0), ("r", "d0", SIZE // 2)]
            picked = self.random.sample(pairs, self.random.randint(1, 3))
            return Step(kind, (choose((1, 2, 3)), picked, choose((1, 2))))
        if kind == "graph":
            nodes = [self.node() for _ in range(self.random.randint(1, 3))]
            return Step(kind, (stream, nodes, self.random.choice((1, 1, 2))))
        if kind == "runtime_graph":
            parts = [self.part() for _ in range(self.random.randint(1, 3))]
            return Step(kind, (choose((1, 2, 3)), parts, self.random.choice((1, 1, 2))))
        if kind == "signal":
            one, other = self.random.sample(STREAMS, 2)
            return Step(kind, (one, other, choose(("value", "copy"))))
        if kind == "host_function":
            return Step(kind, (stream, choose(ON_HOST), start, size, choose((READ, WRITE))))
        if kind == "write_value":
            return Step(kind, (stream, choose(PINNED), 8 * self.random.randrange(64)))
        if kind in ("record", "wait"):
            return Step(kind, (stream, choose(EVENTS)))
        if kind in ("wait_for_event", "ask_event"):
            return Step(kind, (choose(EVENTS),), self.random.random() < 0.05)
        if kind in ("wait_for_stream", "ask_stream", "prefetch"):
            return Step(kind, (stream,))
        if kind in ("write", "declared_write"):
            try:
                return Step(kind, (choose(HOSTS), start, size, next(self.values)), self.random.random() < 0.05)
            except StopIteration:
                return Step("wait_for_all", ())
        if kind in ("read", "declared_read"):
            return Step(kind, (choose(HOSTS), start, size), self.random.random() < 0.05)
        if kind == "renew":
            return Step(kind, (choose(PINNED),))
        return Step(kind, ())


_WEIGHTS = {
    "work": 30,
    "runtime": 8,
    "copy_now": 3,
    "set_now": 2,
    "batch": 3,
    "graph": 5,
    "runtime_graph": 4,
    "signal": 2,
    "host_function": 3,
    "write_value": 2,
    "record": 5,
    "wait": 6,
    "wait_for_event": 4,
    "ask_event": 4,
    "wait_for_stream": 5,
    "ask_stream": 2,
    "wait_for_all": 2,
    "prefetch": 1,
    "write": 18,
    "read": 10,
    "declared_write": 3,
    "declared_read": 2,
    "renew": 1,
    "sleep": 2,
}


def draw(seed: int) -> list[Step]:
    """Return the program of a seed."""
    own = random.Random(seed)
    drawn = _Draw(own)
    return [drawn.step() for _ in range(own.randint(4, _LONGEST))]


# ---- the order that CUDA promises ----


def _mask(start: int, size: int) -> int:
    return ((1 << size) - 1) << start


def _rows() -> int:
    pitch, width, height = ROWS
    return sum(_mask(y * pitch, width) for y in range(height))


def _pages(mask: int) -> int:
    """Return the bytes of all pages of which there are some: whether one was touched is all that is known of it."""
    page = mmap.PAGESIZE
    return sum(_mask(start, page) for start in range(0, SIZE, page) if mask & _mask(start, page))


@dataclass(frozen=True)
class _Touch:
    """What work touches of a buffer; not `exact` where only the memory as a whole is known."""

    buffer: str
    mask: int
    mode: int
    exact: bool = True
    watched: bool = False  # the target of a copy of its own, which the host may be seen to read


@dataclass(frozen=True)
class Race:
    """An access of the host that nothing orders with the work of an earlier line."""

    work: int
    host: int
    must: bool  # be found, by docs/accesses.md
    declared: bool


@dataclass
class _Order:
    """Everything that happens, each with what is before it."""

    after: list[set[int]] = field(default_factory=list)
    host: int = -1
    tails: dict[int, int] = field(default_factory=dict)
    recorded: dict[int, int] = field(default_factory=dict)
    work: list[tuple[int, int, list[_Touch]]] = field(default_factory=list)  # node, line, what it touches
    host_at: dict[int, int] = field(default_factory=dict)  # what the host had waited for when it enqueued this

    def node(self, *before: int) -> int:
        past = {one for one in before if one >= 0}
        self.after.append(past.union(*(self.after[one] for one in past)))
        return len(self.after) - 1

    def last(self, stream: int) -> list[int]:
        """Return what comes before anything that is put into `stream` (Driver API, Stream synchronization behavior)."""
        implied = (BLOCKING,) if stream == LEGACY else (LEGACY,) if stream == BLOCKING else ()
        return [self.tails.get(one, -1) for one in (stream, *implied)]

    def enqueue(self, stream: int, *before: int) -> int:
        self.tails[stream] = self.node(self.host, *self.last(stream), *before)
        self.host_at[self.tails[stream]] = self.host
        return self.tails[stream]

    def wait(self, *before: int) -> None:
        self.host = self.node(self.host, *before)


def _touches(node: tuple[Any, ...]) -> list[_Touch]:
    match node:
        case "copy", target, source, start, size:
            on_host = target in PINNED and source not in ON_HOST
            return [
                _Touch(source, _mask(start, size), READ),
                _Touch(target, _mask(start, size), WRITE, watched=on_host),
            ]
        case "get", device, host, start, size:
            return _touches(("copy", host, device, start, size))
        case "put", device, host, start, size:
            return _touches(("copy", device, host, start, size))
        case "fill", _, host, start, size:
            return _touches(("fill", host, start, size))
        case "rows", target, source:
            return [_Touch(source, _rows(), READ), _Touch(target, _rows(), WRITE)]
        case "array", buffer, direction, start, size:
            return [_Touch(buffer, _mask(start, size), READ if direction == "to" else WRITE)]
        case "indirect", start, size:
            return [_Touch("m", _mask(start, size), WRITE)]
        case "set", target, start, size:
            return [_Touch(target, _mask(start, size), WRITE)]
        case "fill", target, start, size:
            if target in ON_HOST:
                return [_Touch(target, _mask(0, SIZE), WRITE, exact=False)]
            return [_Touch(target, _mask(start, size), WRITE)]
        case "through", target, source, start, size:
            found = []
            for buffer, mode in ((source, READ), (target, WRITE)):
                if buffer in ON_HOST:
                    found.append(_Touch(buffer, _mask(0, SIZE), mode, exact=False))
                else:
                    found.append(_Touch(buffer, _mask(start, size), mode))
            return found
    raise ValueError(node)


def races(steps: list[Step], answers: dict[int, bool]) -> list[Race]:
    """Return the host's accesses that race; `answers` are those of the lines that asked whether work is done."""
    order, found = _Order(), []
    blurred = False  # a host function may run on another thread, during which nothing is compared
    unsure = False  # a stream has waited for a value that no trace shows: it may be after anything from then on
    own_accesses: list[tuple[int, str, int]] = []  # of the host: how much work there was before, buffer, bytes

    def is_read_seen(index: int, buffer: str, pages: int) -> bool:
        """Return whether nothing may have run since a copy that fills the pages, or use them, or have touched them."""
        node, _, touches = order.work[index]
        pending = [
            touch
            for other, _, others in order.work
            for touch in others
            if touch.buffer == buffer and other not in order.after[order.host]
        ]
        return (
            order.host == order.host_at[node]
            and pending == [touch for touch in touches if touch.buffer == buffer]
            and all(touch.watched and not pages & ~touch.mask for touch in pending)
            and not any(name == buffer and before > index for before, name, _ in own_accesses)
            and not any(kind == "signal" for kind, _, _ in steps)
        )

    def hosts_access(
        line: int, buffer: str, mask: int, mode: int, declared: bool, *, watched: bool = True
    ) -> Iterator[Race]:
        for index, (node, at, touches) in enumerate(order.work):
            seen = mask if declared or buffer not in PINNED else _pages(mask)
            hits = [t for t in touches if t.buffer == buffer and t.mask & seen and (t.mode | mode) & WRITE]
            if not hits or node in order.after[order.host]:
                continue
            # Of each byte, the engine compares with the latest accesses alone.
            latest = mask
            for _, _, others in order.work[index + 1 :]:
                for other in others:
                    latest &= ~other.mask if other.buffer == buffer else -1
            for before, name, other_mask in own_accesses:
                latest &= ~other_mask if name == buffer and before > index else -1
            must = watched and any(t.exact and t.mask & latest for t in hits)
            if mode == READ and not declared:
                must = must and is_read_seen(index, buffer, seen)
            yield Race(at, line, must and (declared or not blurred) and not unsure, declared)
        own_accesses.append((len(order.work), buffer, mask))

    order.wait()  # for what comes before the program
    for line, (kind, args, _) in enumerate(steps, 1):
        match kind, args:
            case "work", (stream, node):
                touches = _touches(node)
                order.work.append((order.enqueue(stream), line, touches))
                if node[0] == "copy" and node[1] in ON_HOST and node[2] in ON_HOST:
                    order.wait(order.tails[stream])  # "Memcpy, Asynchronous": host to host is synchronous
                if node[0] == "rows" and node[1] in ON_HOST and node[2] in ON_HOST:
                    order.wait(order.tails[stream])
            case "runtime", (stream, part):
                order.work.append((order.enqueue(stream), line, _touches(part)))
            case "signal", (one, other, how):
                order.enqueue(other, order.enqueue(one))
                unsure |= how == "copy"
            case "copy_now", (target, source, start, size):
                order.work.append((order.enqueue(LEGACY), line, _touches(("copy", target, source, start, size))))
                if target not in DEVICE or source not in DEVICE:
                    order.wait(order.tails[LEGACY])
            case "set_now", (target, start, size):
                order.work.append((order.enqueue(LEGACY), line, _touches(("set", target, start, size))))
                if target in ON_HOST:
                    order.wait(order.tails[LEGACY])
            case "batch", (stream, picked, access_order):
                for target, source, start in picked:
                    touches = _touches(("copy", target, source, start, SIZE // 2))
                    if access_order == 2:  # the host's call reads the source, in no order with streams
                        found += hosts_access(line, source, _mask(start, SIZE // 2), READ, False, watched=False)
                        touches = touches[1:]
                    order.work.append((order.enqueue(stream), line, touches))
            case (("graph" | "runtime_graph"), (stream, nodes, launches)):
                if kind == "runtime_graph":
                    order.wait(*order.tails.values())  # as torch.cuda.graph does before it captures
                for _ in range(launches):
                    for node in nodes:
                        touches = [_Touch(t.buffer, t.mask, t.mode, t.exact) for t in _touches(node)]
                        order.work.append((order.enqueue(stream), line, touches))
            case "host_function", (stream, *_):
                order.enqueue(stream)
                blurred = True
            case "write_value", (stream, buffer, start):
                order.work.append((order.enqueue(stream), line, [_Touch(buffer, _mask(start, 4), WRITE, exact=False)]))
            case "record", (stream, event):
                order.recorded[event] = order.enqueue(stream)
            case "wait", (stream, event):
                order.enqueue(stream, order.recorded.get(event, -1))
            case "prefetch", (stream,):
                order.enqueue(stream)
            case "wait_for_event", (event,):
                order.wait(order.recorded.get(event, -1))
            case "ask_event", (event,):
                order.wait(order.recorded.get(event, -1) if answers[line] else -1)
            case "wait_for_stream", (stream,):
                order.wait(*order.last(stream))
            case "ask_stream", (stream,):
                order.wait(*(order.last(stream) if answers[line] else ()))
            case "wait_for_all", ():
                order.wait(*order.tails.values())
                blurred = False
            case "renew", (buffer,):
                order.wait(*order.tails.values())
                order.work = [
                    (node, at, [one for one in touches if one.buffer != buffer]) for node, at, touches in order.work
                ]
            case (("write" | "read" | "declared_write" | "declared_read"), (buffer, start, size, *_)):
                mode, declared = (WRITE if "write" in kind else READ), kind.startswith("declared")
                found += hosts_access(line, buffer, _mask(start, size), mode, declared)
    return found


# ---- playing ----

_SOURCE = """
extern "C" __global__ void fill(unsigned char *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 77;
}
extern "C" __global__ void through(unsigned char *y, const unsigned char *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] / 2 + 1;
}
extern "C" __global__ void indirect(unsigned char **table, long long start, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) table[0][start + i] = 66;
}
"""
_kernels: dict[str, Any] = {}  # compiled once
_NAMES = ("fill", "through", "indirect")


def _ok(answer: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    status, *results = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return results[0] if results else None


class Player:
    """The memory, streams and events of a program, and what its steps do."""

    def __init__(self) -> None:
        import numpy as np
        from cuda.bindings import driver

        import cudatool as ct

        self._np, self._driver, self._ct = np, driver, ct
        ct.zeros(1).get()
        for name in _NAMES:
            if name not in _kernels:
                _kernels[name] = ct.compile(_SOURCE, name)
        self.answers: dict[int, bool] = {}
        self._streams = [0, *(int(_ok(driver.cuStreamCreate(flags))) for flags in (0, 1, 1))]
        self._capture = int(_ok(driver.cuStreamCreate(1)))
        self._events = [_ok(driver.cuEventCreate(0)) for _ in EVENTS]
        self._arrays = {name: ct.zeros(SIZE, np.uint8) for name in DEVICE}
        self._pages = mmap.mmap(-1, SIZE)
        registered = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        _ok(driver.cuMemHostRegister(registered, SIZE, 0))
        attach = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
        self._at = {
            "m": int(_ok(driver.cuMemAllocManaged(SIZE, attach))),
            "r": registered,
            **{name: int(_ok(driver.cuMemHostAlloc(SIZE, 0))) for name in PINNED},
            **{name: array.data_ptr() for name, array in self._arrays.items()},
        }
        for name in HOSTS:
            ctypes.memset(self._at[name], 1, SIZE)
        self._table = ct.asarray(np.array([self._at["m"]], np.uint64))
        shape = driver.CUDA_ARRAY_DESCRIPTOR()
        shape.Width, shape.Height, shape.NumChannels = SIZE, 0, 1
        shape.Format = driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
        self._array = _ok(driver.cuArrayCreate(shape))
        self._gates = int(_ok(driver.cuMemHostAlloc(_LONGEST * mmap.PAGESIZE, 0)))
        ctypes.memset(self._gates, 0, _LONGEST * mmap.PAGESIZE)
        self._flag = ct.ones(mmap.PAGESIZE // 4, np.int32)
        self._signals = 0
        self._own_graphs: list[Any] = []
        self._callbacks: list[Any] = []
        self._graphs: list[tuple[Any, Any]] = []
        ct.synchronize()

    def close(self) -> None:
        driver = self._driver
        _ok(driver.cuCtxSynchronize())
        for own in self._own_graphs:
            own.reset()
        for executable, graph in self._graphs:
            _ok(driver.cuGraphExecDestroy(executable))
            _ok(driver.cuGraphDestroy(graph))
        for event in self._events:
            _ok(driver.cuEventDestroy(event))
        for stream in (*self._streams[1:], self._capture):
            _ok(driver.cuStreamDestroy(stream))
        _ok(driver.cuArrayDestroy(self._array))
        _ok(driver.cuMemFreeHost(self._gates))
        _ok(driver.cuMemHostUnregister(self._at["r"]))
        for name in PINNED:
            _ok(driver.cuMemFreeHost(self._at[name]))
        _ok(driver.cuMemFree(self._at["m"]))

    def in_a_thread(self, do: Any) -> None:
        def work() -> None:
            self._ct.set_device(0)
            _ok(self._driver.cuCtxSetCurrent(context))
            do()

        context = _ok(self._driver.cuCtxGetCurrent())
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    # ---- work ----

    def work(self, stream: int, node: tuple[Any, ...]) -> None:
        self._do(self._streams[stream], node)

    def _do(self, stream: int, node: tuple[Any, ...]) -> None:
        driver, at = self._driver, self._at
        match node:
            case "copy", target, source, start, size:
                to, origin = at[target] + start, at[source] + start
                if target in ON_HOST and source in DEVICE:
                    _ok(driver.cuMemcpyDtoHAsync(to, origin, size, stream))
                elif source in ON_HOST and target in DEVICE:
                    _ok(driver.cuMemcpyHtoDAsync(to, origin, size, stream))
                else:
                    _ok(driver.cuMemcpyAsync(to, origin, size, stream))
            case "rows", target, source:
                pitch, width, height = ROWS
                box = driver.CUDA_MEMCPY2D()
                unified = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
                box.srcMemoryType = box.dstMemoryType = unified
                box.srcDevice, box.dstDevice = at[source], at[target]
                box.srcPitch = box.dstPitch = pitch
                box.WidthInBytes, box.Height = width, height
                _ok(driver.cuMemcpy2DAsync(box, stream))
            case "array", buffer, direction, start, size:
                box, unified = driver.CUDA_MEMCPY3D(), driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
                array, plain = driver.CUmemorytype.CU_MEMORYTYPE_ARRAY, at[buffer] + start
                box.WidthInBytes, box.Height, box.Depth = size, 1, 1
                if direction == "to":
                    box.dstMemoryType, box.dstArray, box.srcMemoryType, box.srcDevice = (
                        array,
                        self._array,
                        unified,
                        plain,
                    )
                else:
                    box.srcMemoryType, box.srcArray, box.dstMemoryType, box.dstDevice = (
                        array,
                        self._array,
                        unified,
                        plain,
                    )
                _ok(driver.cuMemcpy3DAsync(box, stream))
            case "indirect", start, size:
                self._launch(stream, "indirect", self._table.data_ptr(), start, size)
            case "set", target, start, size:
                _ok(driver.cuMemsetD8Async(at[target] + start, 55, size, stream))
            case "fill", target, start, size:
                self._launch(stream, "fill", at[target] + start, size)
            case "through", target, source, start, size:
                self._launch(stream, "through", at[target] + start, at[source] + start, size)

    def _launch(self, stream: int, name: str, *arguments: int) -> None:
        from cuda import core

        config = self._ct.LaunchConfig(grid=-(-arguments[-1] // 256), block=256)
        made = core.Stream.from_handle(stream or 1)
        values = (*map(self._np.uint64, arguments[:-1]), self._np.int32(arguments[-1]))
        core.launch(made, config, _kernels[name].core, *values)

    def _own(self, stream: int) -> Any:
        ct = self._ct
        return ct.default_stream() if stream == LEGACY else ct.ExternalStream(self._streams[stream])

    def runtime(self, stream: int, part: tuple[Any, ...]) -> None:
        with self._ct.stream(self._own(stream)):
            self._do_part(*part)

    def _do_part(self, what: str, device: str, host: str, start: int, size: int) -> None:
        np, ct = self._np, self._ct
        view = np.frombuffer((ctypes.c_uint8 * size).from_address(self._at[host] + start), np.uint8)
        part = self._arrays[device][start : start + size]
        if what == "get":
            part.get(view, blocking=False)
        elif what == "put":
            part.copy_(view, non_blocking=True)
        else:
            config = ct.LaunchConfig(grid=-(-size // 256), block=256)
            ct.launch(ct.current_stream(), config, _kernels["fill"], np.uint64(self._at[host] + start), np.int32(size))

    def runtime_graph(self, stream: int, parts: list[tuple[Any, ...]], launches: int) -> None:
        ct = self._ct
        graph = ct.CUDAGraph()
        with ct.graph(graph, stream=self._own(stream)):
            for part in parts:
                self._do_part(*part)
        self._own_graphs.append(graph)
        with ct.stream(self._own(stream)):
            for _ in range(launches):
                graph.replay()

    def signal(self, one: int, other: int, how: str) -> None:
        """Let a stream wait for a value in pinned memory that another one writes."""
        driver = self._driver
        gate = self._gates + self._signals * mmap.PAGESIZE
        self._signals += 1
        if how == "value":
            _ok(driver.cuStreamWriteValue32(self._streams[one], gate, 1, 0))
        else:
            _ok(driver.cuMemcpyDtoHAsync(gate, self._flag.data_ptr(), mmap.PAGESIZE, self._streams[one]))
        flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        _ok(driver.cuStreamWaitValue32(self._streams[other], gate, 1, flags))

    def copy_now(self, target: str, source: str, start: int, size: int) -> None:
        _ok(self._driver.cuMemcpy(self._at[target] + start, self._at[source] + start, size))

    def set_now(self, target: str, start: int, size: int) -> None:
        _ok(self._driver.cuMemsetD8(self._at[target] + start, 33, size))

    def batch(self, stream: int, picked: list[tuple[str, str, int]], access_order: int) -> None:
        driver = self._driver
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder(access_order)
        targets = [driver.CUdeviceptr(self._at[target] + start) for target, _, start in picked]
        sources = [driver.CUdeviceptr(self._at[source] + start) for _, source, start in picked]
        sizes = [SIZE // 2] * len(picked)
        stream = self._streams[stream]
        _ok(driver.cuMemcpyBatchAsync(targets, sources, sizes, len(picked), [attributes], [0], 1, stream))

    def graph(self, stream: int, nodes: list[tuple[Any, ...]], launches: int) -> None:
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _ok(driver.cuStreamBeginCapture(self._capture, mode))
        for node in nodes:
            self._do(self._capture, node)
        graph = _ok(driver.cuStreamEndCapture(self._capture))
        executable = _ok(driver.cuGraphInstantiate(graph, 0))
        self._graphs.append((executable, graph))
        for _ in range(launches):
            _ok(driver.cuGraphLaunch(executable, self._streams[stream]))

    def host_function(self, stream: int, host: str, start: int, size: int, mode: int) -> None:
        address = self._at[host] + start

        def function(_: Any) -> None:
            if mode == WRITE:
                ctypes.memset(address, 99, size)
            else:
                ctypes.string_at(address, size)

        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._callbacks.append(callback)
        where = self._driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
        _ok(self._driver.cuLaunchHostFunc(self._streams[stream], where, 0))

    def write_value(self, stream: int, host: str, start: int) -> None:
        _ok(self._driver.cuStreamWriteValue32(self._streams[stream], self._at[host] + start, 0x2A2B2C2D, 0))

    def prefetch(self, stream: int) -> None:
        location = self._driver.CUmemLocation()
        location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        _ok(self._driver.cuMemPrefetchAsync(self._at["m"], SIZE, location, 0, self._streams[stream]))

    # ---- order ----

    def record(self, stream: int, event: int) -> None:
        _ok(self._driver.cuEventRecord(self._events[event], self._streams[stream]))

    def wait(self, stream: int, event: int) -> None:
        _ok(self._driver.cuStreamWaitEvent(self._streams[stream], self._events[event], 0))

    def wait_for_event(self, event: int) -> None:
        _ok(self._driver.cuEventSynchronize(self._events[event]))

    def wait_for_stream(self, stream: int) -> None:
        _ok(self._driver.cuStreamSynchronize(self._streams[stream]))

    def wait_for_all(self) -> None:
        _ok(self._driver.cuCtxSynchronize())

    def ask_event(self, event: int) -> None:
        (status,) = self._driver.cuEventQuery(self._events[event])
        self._answer(status)

    def ask_stream(self, stream: int) -> None:
        (status,) = self._driver.cuStreamQuery(self._streams[stream])
        self._answer(status)

    def _answer(self, status: Any) -> None:
        frame = sys._getframe(2)
        while frame.f_code.co_filename != FILE:
            frame = frame.f_back
        self.answers[frame.f_lineno] = status == self._driver.CUresult.CUDA_SUCCESS

    def sleep(self) -> None:
        time.sleep(0.004)

    def renew(self, buffer: str) -> None:
        _ok(self._driver.cuCtxSynchronize())
        _ok(self._driver.cuMemFreeHost(self._at[buffer]))
        self._at[buffer] = int(_ok(self._driver.cuMemHostAlloc(SIZE, 0)))
        ctypes.memset(self._at[buffer], 2, SIZE)

    # ---- the host's own accesses ----

    def write(self, buffer: str, start: int, size: int, value: int) -> None:
        ctypes.memset(self._at[buffer] + start, value, size)

    def read(self, buffer: str, start: int, size: int) -> None:
        ctypes.string_at(self._at[buffer] + start, size)

    def declared_write(self, buffer: str, start: int, size: int, value: int) -> None:
        self._view(buffer, start, size)[:] = value

    def declared_read(self, buffer: str, start: int, size: int) -> None:
        self._view(buffer, start, size).sum()

    def _view(self, buffer: str, start: int, size: int) -> Any:
        memory = (ctypes.c_uint8 * size).from_address(self._at[buffer] + start)
        return self._ct.host_view(self._np.frombuffer(memory, self._np.uint8))


@dataclass
class Result:
    """What the sanitizer found and what it should have."""

    false: list[tuple[int, int]]
    missed: list[Race]
    found: int
    racy: int

    def __bool__(self) -> bool:
        return bool(self.false or self.missed)


def run(steps: list[Step], schedule: str, *, tape: bool = False) -> Result:
    """Run a program in this process under the sanitizer, and compare its findings with :func:`races`."""
    from cudatool import _driver
    from cudatool.recording import record
    from cudatool.sim.observe.tape import Tape
    from cudatool.sim.queue import Schedule
    from cudatool.trace import reader

    machine = _driver.initialize().machine
    machine.scheduler.schedule = Schedule(schedule)
    code = compile(text_of(steps), FILE, "exec")
    player = None
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "run.ctrace")
        with record(path, measure_accesses=True, checks=[], tape=Tape() if tape else None):
            player = Player()
            try:
                exec(code, {"p": player, "__file__": FILE, "__name__": "__main__"})
            finally:
                player.close()
        return difference(races(steps, player.answers), reader.read(path), len(steps))


def difference(expected: list[Race], trace: Any, lines: int) -> Result:
    """Compare the races that the sanitizer finds in a trace with those that there are.

    A report leaves out what the repair of another finding would order, too: none is looked for there by name.
    """
    from cudatool.sanitize import check
    from cudatool.sanitize.engine import Engine

    def line(record: int) -> int:
        stack = trace.stack(int(trace.records[record]["stack"]))
        return next((frame.line for frame in stack if frame.file == FILE), lines + 1)

    engine = Engine(trace)
    engine.run()
    report = check(trace, ["race"])
    sides = [
        (one.first.operation.record, one.second.operation.record)
        for one in engine.defects.values()
        if one.kind.value == "race-host"
    ]
    reported = [one for one in (*report.findings, *report.possible) if one.kind.value == "race-host"]
    sides += [(one.first.record, one.second.record) for one in reported]
    found = {(line(first), line(second)) for first, second in sides}
    false = [
        (work, noticed)
        for work, noticed in sorted(found)
        if not any(race.work == work and race.host <= noticed for race in expected)
    ]
    missed = [
        race
        for race in expected
        if race.must
        and not any(
            work == race.work and (noticed == race.host if race.declared else noticed > race.host)
            for work, noticed in found
        )
    ]
    if any(race.must for race in expected) and not (*report.findings, *report.possible):
        missed += [race for race in expected if race.must]
    return Result(false, missed, len(found), len(expected))


_HALF = SIZE // 2
ONCE_DIFFERENT: list[list[Step]] = [
    # The driver fills a part of a target that is pending already, and compares the rest.
    [
        Step("work", (LEGACY, ("copy", "p0", "m", 0, SIZE))),
        Step("work", (BLOCKING, ("copy", "p0", "d0", 0, _HALF))),
    ],
    # A stream that has no work is asked: what is noticed came before the answer.
    [
        Step("graph", (LEGACY, [("rows", "p1", "m")], 1)),
        Step("write", ("m", SIZE // 4, _HALF, 128)),
        Step("ask_stream", (BLOCKING,)),
    ],
    # A kernel finds a pointer to managed memory in memory.
    [
        Step("work", (2, ("indirect", 0, SIZE))),
        Step("write", ("m", _HALF, _HALF, 128)),
    ],
    [
        Step("work", (3, ("through", "d0", "m", 0, _HALF))),
        Step("write", ("m", _HALF, _HALF, 128)),
        Step("work", (3, ("indirect", _HALF, _HALF))),
    ],
    # A stream waits for what a copy brings, and the driver reads the value again and again.
    [
        Step("signal", (1, 3, "copy")),
        Step("ask_stream", (3,)),
        Step("ask_stream", (3,)),
    ],
    # What the host wrote is noticed at the call that fills that memory next; a tape keeps it.
    [
        Step("runtime", (3, ("get", "d0", "p0", 0, 4096))),
        Step("write", ("p0", 1024, 512, 133)),
        Step("batch", (2, [("p0", "d0", 0), ("d1", "p1", 0)], 2)),
        Step("work", (3, ("set", "p0", 4096, 4096))),
    ],
]


def programs(seed: int, count: int) -> Iterator[tuple[int, list[Step], str]]:
    """Yield a number, a program and a schedule: first what differed once, under each; then those of the seeds."""
    for number, steps in enumerate(ONCE_DIFFERENT, 1):
        for schedule in SCHEDULES:
            yield -number, steps, schedule
    yield from seeded(draw, seed, count)


def main() -> None:
    """Run what the command line asks for; the exit status is 1 if the sanitizer differs."""
    parser = arguments(main.__doc__)
    parser.add_argument("--tape", action="store_true", help="also keep what a replay needs")
    options = parser.parse_args()
    os.environ.setdefault("CUDATOOL_DEVICE", "sim")
    from cudatool.sim import queue

    queue._SOON_S = 0.0005  # the thread that runs host functions comes between the program's calls
    bad = racy = found = 0
    for number, steps, schedule in programs(options.seed, options.programs):
        result = run(steps, schedule, tape=options.tape)
        racy += result.racy
        found += result.found
        if result:
            bad += 1
            print(f"program {number}, {schedule}: false {result.false}, missed {result.missed}")
            print(listing(steps), flush=True)
    print(f"{bad} differ; {racy} races, {found} findings")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
