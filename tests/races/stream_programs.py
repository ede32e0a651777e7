"""Random programs of streams, events, pools, graphs, values, threads and two devices, and which of their lines race.

A program is a list of steps, each a line of its text. :class:`Player` makes the driver's calls on the software device,
:func:`races` says from the order that CUDA promises alone which lines race, and :func:`run` compares that with what the
sanitizer found::

    python tests/races/stream_programs.py --programs 5000 --seed 1

``host_programs.py`` does the same for what the host itself touches.
"""

from __future__ import annotations

import os
import queue
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from random_programs import arguments, listing, seeded

__all__ = ["Player", "Step", "differ", "draw", "programs", "races", "run"]

SIZE = 256
LEGACY, PER_THREAD = "L", "P"
STREAMS = (LEGACY, PER_THREAD, "blocking", "free", "free2")  # of device 0
OTHERS = ("other blocking", "other free")  # of device 1
BUFFERS, FAR = ("x0", "x1"), "y"  # `y` lies on device 1
FILE = str(Path(__file__).with_name("random_program.py"))
_EVENTS = {0: (0, 1), 1: (2, 3)}  # of each device
_RANGES = ((0, 64), (64, 64), (0, 128), (128, 128), (32, 64))
_CAPTURED = ("free", "free2")  # what a graph is captured from: it forks to the second and joins it

Touch = tuple[str, str, int, int]  # R or W, buffer, first byte, size
Pairs = set[tuple[int, int]]


class Step(NamedTuple):
    """One line of a program; `thread` makes the call: 0 is the main one, others are told by a queue, and awaited."""

    kind: str
    args: tuple[Any, ...]
    thread: int = 0

    @property
    def text(self) -> str:
        call = f"p.{self.kind}({', '.join(map(repr, self.args))})"
        return f"p.on({self.thread}, lambda: {call})" if self.thread else call


def _device(stream: str) -> int:
    return int(stream in OTHERS)


# ---- drawing ----


def draw(seed: int) -> list[Step]:
    """Return the program of a seed."""
    own = random.Random(seed)
    steps: list[Step] = []
    pools: list[int] = []
    graphs: list[str] = []  # the shape of each
    written = made = 0

    def touch(buffers: tuple[str, ...]) -> tuple[str, int, int]:
        return (own.choice(buffers), *own.choice(_RANGES))

    def shape_of(shape: str) -> tuple[str, list[tuple[str, int, int]]]:
        return shape, [touch(BUFFERS) for one in shape if one in "ab"]

    for _ in range(own.randint(5, 25)):
        kind = own.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
        stream = own.choice(STREAMS if kind in _ON_DEVICE_0 else STREAMS + OTHERS)
        device = _device(stream)
        here = (FAR,) if device else BUFFERS
        thread = own.choice((0, 0, 0, 1, 2)) if own.random() < 0.5 else 0
        args: tuple[Any, ...] = ()
        if kind == "fill":
            args = stream, *touch(here)
        elif kind in ("copy", "copy_now"):
            start, size = own.choice(_RANGES)
            args = *own.sample((*BUFFERS, FAR), 2), start, size
            args = (stream, *args) if kind == "copy" else args
        elif kind == "record":
            args = stream, own.choice(_EVENTS[device])
        elif kind == "wait":
            args = stream, own.randrange(4)
        elif kind in ("wait_for_event", "ask_event"):
            args = (own.randrange(4),)
        elif kind in ("wait_for_stream", "ask_stream"):
            args = (stream,)
        elif kind == "elapsed":
            args = _EVENTS[own.randrange(2)]
        elif kind == "wait_for_device":
            args = (own.randrange(2),)
        elif kind == "write_value":
            args, written = (stream, written), written + 1
        elif kind == "wait_for_value" and written:
            args = stream, own.randrange(written)
        elif kind == "allocate":
            args, made = (stream, made), made + 1
            pools.append(args[1])
        elif kind == "use" and pools:
            args = stream, own.choice(pools), *own.choice(_RANGES)
        elif kind == "free" and pools:
            args = stream, pools.pop(own.randrange(len(pools)))
        elif kind == "graph":
            graphs.append("".join(own.choice("aabfj") for _ in range(own.randint(2, 6))))
            args, thread = (len(graphs) - 1, *shape_of(graphs[-1])), 0
        elif kind == "update" and graphs:
            number = own.randrange(len(graphs))
            args, thread = (number, *shape_of(graphs[number])), 0
        elif kind == "launch" and graphs:
            args = stream, own.randrange(len(graphs))
        if args:
            steps.append(Step(kind, args, thread))
    return steps


_WEIGHTS = {
    "fill": 14,
    "copy": 8,
    "copy_now": 2,
    "record": 8,
    "wait": 9,
    "wait_for_event": 2,
    "ask_event": 2,
    "wait_for_stream": 2,
    "ask_stream": 2,
    "elapsed": 1,
    "wait_for_device": 1,
    "write_value": 2,
    "wait_for_value": 3,
    "allocate": 4,
    "use": 8,
    "free": 6,
    "graph": 4,
    "update": 3,
    "launch": 10,
}
_ON_DEVICE_0 = ("allocate", "use", "free", "launch")


# ---- the order that CUDA promises ----


class _Order:
    """Everything that happens, each as a bit in the numbers of what comes after it."""

    def __init__(self) -> None:
        self.past: list[int] = []
        self.tails: dict[str, int] = {}
        self.recorded: dict[int, int] = {}
        self.values: dict[int, int] = {}
        self.launched: dict[int, int] = {}
        self.touched: list[tuple[int, Touch, int]] = []  # by which node, what, and its line
        self.host = self.node()

    def node(self, *before: int | None) -> int:
        known = [one for one in before if one is not None]
        past = 0
        for one in known:
            past |= self.past[one] | 1 << one
        self.past.append(past)
        return len(self.past) - 1

    def name(self, stream: str, thread: int) -> str:
        return f"{PER_THREAD}{thread}" if stream == PER_THREAD else stream

    def last(self, stream: str) -> list[int | None]:
        """Return what comes before anything in `stream` (Driver API, Stream synchronization behavior)."""
        blocking = [one for one in self.tails if one == "blocking" or one.startswith(PER_THREAD)]
        implied = blocking if stream == LEGACY else [LEGACY] if stream in blocking or stream[0] in "Pb" else []
        return [self.tails.get(one) for one in (stream, *implied)]

    def enqueue(self, stream: str, *before: int | None) -> int:
        self.tails[stream] = self.node(self.host, *self.last(stream), *before)
        return self.tails[stream]

    def wait(self, *before: int | None) -> None:
        self.host = self.node(self.host, *before)

    def touch(self, node: int, line: int, *touches: Touch) -> None:
        self.touched += [(node, touch, line) for touch in touches]


def _nodes(shape: str, touches: list[tuple[str, int, int]]) -> Iterator[tuple[list[int], Touch]]:
    """Yield for each node of a captured graph the numbers of those before it, and what it touches."""
    tail: list[list[int]] = [[], []]  # of the two captured streams
    forked, left = False, iter(touches)
    number = 0
    for one in shape:
        if one in "ab":
            branch = int(one == "b" and forked)
            yield list(tail[branch]), ("W", *next(left))
            tail[branch], number = [number], number + 1
        elif one == "f":
            forked, tail[1] = True, sorted({*tail[0], *tail[1]})
        elif forked:
            tail[0] = sorted({*tail[0], *tail[1]})


def races(steps: list[Step], answers: dict[int, bool]) -> Pairs:
    """Return the pairs of lines that race; `answers` are those of the lines that asked whether work is done.

    Memory of a pool races with its allocation and with its free: it is there only between the two, in stream order.
    """
    order = _Order()
    graphs: dict[int, list[tuple[list[int], Touch]]] = {}
    for line, (kind, args, thread) in enumerate(steps, 1):
        stream = order.name(args[0], thread) if isinstance(args[0], str) else ""
        match kind, args:
            case "fill", (_, buffer, start, size):
                order.touch(order.enqueue(stream), line, ("W", buffer, start, size))
            case "copy", (_, target, source, start, size):
                order.touch(order.enqueue(stream), line, ("R", source, start, size), ("W", target, start, size))
            case "copy_now", (target, source, start, size):  # "no host-side synchronization is performed"
                node = order.enqueue(LEGACY)
                order.touch(node, line, ("R", source, start, size), ("W", target, start, size))
            case "record", (_, event):
                order.recorded[event] = order.enqueue(stream)
            case "wait", (_, event):
                order.enqueue(stream, order.recorded.get(event))
            case (("wait_for_event" | "ask_event"), (event,)):
                if answers.get(line, True):
                    order.wait(order.recorded.get(event))
            case (("wait_for_stream" | "ask_stream"), _):
                if answers.get(line, True):
                    order.wait(*order.last(stream))
            case "elapsed", both:
                if answers[line]:
                    order.wait(*map(order.recorded.get, both))
            case "wait_for_device", (device,):
                order.wait(*(tail for name, tail in order.tails.items() if _device(name) == device))
            case "write_value", (_, number):
                order.values[number] = order.enqueue(stream)
            case "wait_for_value", (_, number):
                order.enqueue(stream, order.values[number])
            case (("allocate" | "free"), (_, number)):
                order.touch(order.enqueue(stream), line, ("W", f"pool {number}", 0, SIZE))
            case "use", (_, number, start, size):
                order.touch(order.enqueue(stream), line, ("W", f"pool {number}", start, size))
            case (("graph" | "update"), (number, shape, touches)):
                graphs[number] = list(_nodes(shape, touches))
            case "launch", (_, number):
                made: list[int] = []
                begin = order.enqueue(stream, order.launched.get(number))
                for before, touch in graphs[number]:
                    made.append(order.node(begin, *(made[one] for one in before)))
                    order.touch(made[-1], line, touch)
                order.launched[number] = order.enqueue(stream, *made)
    return {
        (min(at, line), max(at, line))
        for index, (node, (mode, buffer, start, size), line) in enumerate(order.touched)
        for other, (mode2, buffer2, start2, size2), at in order.touched[:index]
        if buffer == buffer2 and "W" in (mode, mode2) and start < start2 + size2 and start2 < start + size
        if other != node and not order.past[node] >> other & 1
    }


# ---- playing ----


def _ok(answer: tuple[Any, ...]) -> Any:
    if answer[0]:
        raise RuntimeError(answer[0].name)
    return answer[1] if len(answer) > 1 else None


class Player:
    """What a program's lines call."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        _ok(driver.cuInit(0))
        self.contexts = [_ok(driver.cuDevicePrimaryCtxRetain(device)) for device in (1, 0)][::-1]
        self.answers: dict[int, bool] = {}
        self._graphs: dict[int, Any] = {}
        self._templates: list[Any] = []
        self._pools: dict[int, int] = {}
        self._threads: dict[int, tuple[queue.Queue[Any], queue.Queue[Any], threading.Thread]] = {}
        self.streams = {LEGACY: 1, PER_THREAD: 2}
        self.memory: dict[str, int] = {}
        self._events: list[Any] = []
        for device, names in enumerate(((*STREAMS[2:], *BUFFERS), (*OTHERS, FAR))):
            self._use(device)
            for name in names:
                if name in STREAMS + OTHERS:
                    self.streams[name] = int(_ok(driver.cuStreamCreate(int("free" in name))))
                else:
                    self.memory[name] = int(_ok(driver.cuMemAlloc(SIZE)))
            self._events += [_ok(driver.cuEventCreate(0)) for _ in _EVENTS[device]]
        self._values = int(_ok(driver.cuMemAlloc(4 * 32)))
        _ok(driver.cuMemsetD32(self._values, 0, 32))
        _ok(driver.cuCtxSynchronize())

    def _use(self, device: int) -> None:
        _ok(self._driver.cuCtxSetCurrent(self.contexts[device]))

    def _at(self, stream: str) -> int:
        """Return a stream's handle, and make its device the current one."""
        self._use(_device(stream))
        return self.streams[stream]

    def close(self) -> None:
        for ask, _, thread in self._threads.values():
            ask.put(None)
            thread.join()
        driver = self._driver
        for device in (1, 0):
            self._use(device)
            _ok(driver.cuCtxSynchronize())
        for graph in self._graphs.values():
            _ok(driver.cuGraphExecDestroy(graph))
        for template in self._templates:
            _ok(driver.cuGraphDestroy(template))
        for event in self._events:
            _ok(driver.cuEventDestroy(event))
        for address in (*self.memory.values(), self._values, *self._pools.values()):
            _ok(driver.cuMemFree(address))
        for name in (*STREAMS[2:], *OTHERS):
            _ok(driver.cuStreamDestroy(self._at(name)))
        for device in (0, 1):
            _ok(driver.cuDevicePrimaryCtxRelease(device))

    def on(self, thread: int, call: Callable[[], None]) -> None:
        """Let another thread make a call, and wait until it has."""
        if thread not in self._threads:
            ask, done = queue.Queue[Any](), queue.Queue[Any]()

            def work() -> None:
                while (one := ask.get()) is not None:
                    one()
                    done.put(None)

            self._threads[thread] = ask, done, threading.Thread(target=work)
            self._threads[thread][2].start()
        ask, done, _ = self._threads[thread]
        ask.put(call)
        done.get(timeout=60)

    def fill(self, stream: str, buffer: str, start: int, size: int) -> None:
        _ok(self._driver.cuMemsetD8Async(self.memory[buffer] + start, 1, size, self._at(stream)))

    def copy(self, stream: str, target: str, source: str, start: int, size: int) -> None:
        one, other = self.memory[target] + start, self.memory[source] + start
        _ok(self._driver.cuMemcpyDtoDAsync(one, other, size, self._at(stream)))

    def copy_now(self, target: str, source: str, start: int, size: int) -> None:
        self._use(0)
        _ok(self._driver.cuMemcpyDtoD(self.memory[target] + start, self.memory[source] + start, size))

    def record(self, stream: str, event: int) -> None:
        _ok(self._driver.cuEventRecord(self._events[event], self._at(stream)))

    def wait(self, stream: str, event: int) -> None:
        _ok(self._driver.cuStreamWaitEvent(self._at(stream), self._events[event], 0))

    def wait_for_event(self, event: int) -> None:
        _ok(self._driver.cuEventSynchronize(self._events[event]))

    def ask_event(self, event: int) -> None:
        self._answer(self._driver.cuEventQuery(self._events[event])[0])

    def wait_for_stream(self, stream: str) -> None:
        _ok(self._driver.cuStreamSynchronize(self._at(stream)))

    def ask_stream(self, stream: str) -> None:
        self._answer(self._driver.cuStreamQuery(self._at(stream))[0])

    def elapsed(self, one: int, other: int) -> None:
        self._answer(self._driver.cuEventElapsedTime(self._events[one], self._events[other])[0])

    def _answer(self, status: Any) -> None:
        frame = sys._getframe(2)
        self.answers[frame.f_lineno] = not status

    def wait_for_device(self, device: int) -> None:
        self._use(device)
        _ok(self._driver.cuCtxSynchronize())

    def write_value(self, stream: str, number: int) -> None:
        _ok(self._driver.cuStreamWriteValue32(self._at(stream), self._values + 4 * number, 1, 0))

    def wait_for_value(self, stream: str, number: int) -> None:
        _ok(self._driver.cuStreamWaitValue32(self._at(stream), self._values + 4 * number, 1, 0))

    def allocate(self, stream: str, number: int) -> None:
        self._pools[number] = int(_ok(self._driver.cuMemAllocAsync(SIZE, self._at(stream))))

    def use(self, stream: str, number: int, start: int, size: int) -> None:
        _ok(self._driver.cuMemsetD8Async(self._pools[number] + start, 1, size, self._at(stream)))

    def free(self, stream: str, number: int) -> None:
        _ok(self._driver.cuMemFreeAsync(self._pools.pop(number), self._at(stream)))

    def graph(self, number: int, shape: str, touches: list[tuple[str, int, int]]) -> None:
        self._graphs[number] = _ok(self._driver.cuGraphInstantiate(self._captured(shape, touches), 0))

    def update(self, number: int, shape: str, touches: list[tuple[str, int, int]]) -> None:
        _ok(self._driver.cuGraphExecUpdate(self._graphs[number], self._captured(shape, touches)))

    def launch(self, stream: str, number: int) -> None:
        _ok(self._driver.cuGraphLaunch(self._graphs[number], self._at(stream)))

    def _captured(self, shape: str, touches: list[tuple[str, int, int]]) -> Any:
        driver, (first, second) = self._driver, _CAPTURED
        stream = self._at(first)
        _ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        forked, left = False, iter(touches)

        def join(one: str, other: str) -> None:
            event = _ok(driver.cuEventCreate(0))
            _ok(driver.cuEventRecord(event, self.streams[one]))
            _ok(driver.cuStreamWaitEvent(self.streams[other], event, 0))
            _ok(driver.cuEventDestroy(event))

        for one in shape:
            if one in "ab":
                self.fill(second if one == "b" and forked else first, *next(left))
            elif one == "f":
                join(first, second)
                forked = True
            elif forked:
                join(second, first)
        if forked:
            join(second, first)
        self._templates.append(_ok(driver.cuStreamEndCapture(stream)))
        return self._templates[-1]


def run(steps: list[Step], schedule: str) -> tuple[Pairs, Pairs]:
    """Run a program under the sanitizer; return the pairs of lines that race, and those that it found.

    It keeps of each byte the latest accesses alone, so it may name fewer partners of a line: see :func:`differ`.
    """
    from cudatool import _driver
    from cudatool.recording import record
    from cudatool.sanitize.engine import Engine
    from cudatool.sim.queue import Schedule
    from cudatool.trace import reader

    if any(step.kind == "allocate" for step in steps):
        schedule = "fifo"  # in another order a use before the allocation fails, which ends the context
    _driver.initialize().machine.scheduler.schedule = Schedule(schedule)
    code = compile("\n".join(step.text for step in steps), FILE, "exec")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "run.ctrace")
        with record(path, measure_accesses=True, checks=[]):
            player = Player()
            try:
                exec(code, {"p": player, "__file__": FILE, "__name__": "__main__"})
            finally:
                player.close()
        trace = reader.read(path)
        engine = Engine(trace)
        engine.run()

    def line(record: int) -> int:
        stack = trace.stack(int(trace.records[record]["stack"]))
        return next((frame.line for frame in stack if frame.file == FILE), 0)

    sides = (
        (line(d.first.operation.record), line(d.second.operation.record)) for d in engine.defects.values() if d.size
    )
    return races(steps, player.answers), {(min(pair), max(pair)) for pair in sides}


def differ(expected: Pairs, found: Pairs) -> bool:
    """Return whether the sanitizer found a pair that does not race, or missed a line that races with an earlier one.

    Nodes of one graph that race are found once, at one of its launches.
    """

    def later(pairs: Pairs) -> set[int]:
        return {second for first, second in pairs if first != second}

    inside = [any(first == second for first, second in pairs) for pairs in (expected, found)]
    return bool(found - expected) or later(found) != later(expected) or inside[0] != inside[1]


ONCE_DIFFERENT: list[list[Step]] = [
    # Nothing uses the memory, and nothing orders its free after its allocation.
    [Step("allocate", ("blocking", 0)), Step("free", ("free", 0))],
]


def programs(seed: int, count: int) -> Iterator[tuple[int, list[Step], str]]:
    """Yield a number, a program and a schedule: first what differed once, then those of the seeds."""
    for number, steps in enumerate(ONCE_DIFFERENT, 1):
        yield -number, steps, "fifo"
    yield from seeded(draw, seed, count)


def main() -> None:
    """Run what the command line asks for; the exit status is 1 if the sanitizer differs."""
    options = arguments(main.__doc__).parse_args()
    os.environ["CUDATOOL_DEVICE"] = "sim:count=2"
    bad = racy = pairs = 0
    for number, steps, schedule in programs(options.seed, options.programs):
        expected, found = run(steps, schedule)
        racy += bool(expected)
        pairs += len(found)
        if differ(expected, found):
            bad += 1
            print(f"program {number}, {schedule}: expected {sorted(expected)}, found {sorted(found)}")
            print(listing(steps), flush=True)
    print(f"{bad} differ; {racy} programs race, {pairs} pairs found")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
