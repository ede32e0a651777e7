"""Launches that are made in C, because there was one like them, against those that launches.py makes."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cudatool.sim import abi
from cudatool.sim.api import module as entry_points
from cudatool.sim.kernels import Function
from cudatool.sim.launches import Launch

PTX = b"""
.version 8.3
.target sm_90
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);
.global .align 1 .b8 text[2] = {46, 0};
.visible .entry nothing() { ret; }
.visible .entry early() { griddepcontrol.launch_dependents; ret; }
.visible .entry says() {
    .reg .b64 %t;
    cvta.global.u64 %t, text;
    { .param .b64 a; .param .b64 b; .param .b32 r; st.param.b64 [a], %t; st.param.b64 [b], 0; call (r), vprintf, (a, b); }
    ret;
}
.visible .entry step(.param .u64 p, .param .u8 a, .param .u32 b) {
    .reg .b64 %p; .reg .b16 %c; .reg .b32 %a, %b, %x;
    ld.param.u64 %p, [p]; ld.param.u8 %c, [a]; ld.param.u32 %b, [b];
    cvt.u32.u16 %a, %c;
    ld.global.u32 %x, [%p]; mad.lo.u32 %x, %x, %a, %b; st.global.u32 [%p], %x; ret;
}
.visible .entry size(.param .u64 p) {
    .reg .b64 %p; .reg .b32 %a, %b;
    ld.param.u64 %p, [p]; mov.u32 %a, %nctaid.x; mov.u32 %b, %ntid.y; mad.lo.u32 %a, %a, 100, %b;
    mov.u32 %b, %dynamic_smem_size; mad.lo.u32 %a, %a, 100, %b; st.global.u32 [%p], %a; ret;
}
.visible .entry traps_if(.param .u32 a) {
    .reg .b32 %a; .reg .pred %q;
    ld.param.u32 %a, [a]; setp.ne.u32 %q, %a, 0; @%q trap; ret;
}
"""
PARAMETERS = {
    "nothing": (),
    "early": (),
    "says": (),
    "step": (ctypes.c_uint64, ctypes.c_uint8, ctypes.c_uint32),
    "size": (ctypes.c_uint64,),
    "traps_if": (ctypes.c_uint32,),
}


class Program:
    """A module, streams and memory; and what is seen of the operations that are enqueued and of those that have run."""

    def __init__(self, driver: Any, ok: Callable[[Any], Any], machine: Any) -> None:
        self._driver, self._ok, self.machine = driver, ok, machine
        self.module = ok(driver.cuModuleLoadData(PTX + b"\0"))
        self.handles = {name: int(ok(driver.cuModuleGetFunction(self.module, name.encode()))) for name in PARAMETERS}
        self.streams = [int(ok(driver.cuStreamCreate(flags))) for flags in (0, 1)]
        self.device, self.pinned = int(ok(driver.cuMemAlloc(4096))), 0
        self.seen: list[Any] = []
        self.begin = 0
        self.thread = threading.get_ident()

    def close(self) -> None:
        for stream in self.streams:
            self._ok(self._driver.cuStreamDestroy(stream))
        self._ok(self._driver.cuMemFree(self.device))
        self._ok(self._driver.cuModuleUnload(self.module))

    def launch(
        self,
        name: str,
        *values: int,
        grid: Any = (1, 1, 1),
        block: Any = (1, 1, 1),
        shared: int = 0,
        stream: int = 0,
        attributes: Any = None,
    ) -> int:
        """Launch a kernel, with cuLaunchKernelEx if `attributes` are given; a value of -1 is a pointer that is NULL."""
        handle = self.handles.get(name, 4711)
        boxes = [kind(value) for kind, value in zip(PARAMETERS.get(name, ()), values, strict=False)]
        pointers = (ctypes.c_void_p * max(len(boxes), 1))(
            *(None if value == -1 else ctypes.addressof(box) for box, value in zip(boxes, values, strict=False))
        )
        address = ctypes.addressof(pointers) if boxes else 0
        if attributes is None:
            return int(self._driver.cuLaunchKernel(handle, *grid, *block, shared, stream, address, 0)[0])
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream, config.attrs, config.numAttrs = (
            shared,
            stream,
            attributes,
            len(attributes),
        )
        return int(self._driver.cuLaunchKernelEx(config, handle, address, 0)[0])

    def programmatic(self) -> Any:
        """Return the attribute of launches that may begin before the kernel before them has ended."""
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        return attribute

    def word(self, address: int) -> int:
        out = ctypes.c_uint32()
        self._ok(self._driver.cuMemcpyDtoH(ctypes.addressof(out), address, 4))
        return out.value

    # ---- cudatool.sim.Subscriber ----

    def enter(self, entry: Any, arguments: Any, correlation: int) -> None: ...

    def gives_back(self, entry: Any, arguments: Any, correlation: int, what: Any) -> None: ...

    def leave(self, entry: Any, arguments: Any, correlation: int, result: Any) -> None:
        if threading.get_ident() == self.thread:
            self.seen.append((entry.name, result.name, abi.call.message))

    def enqueued(self, operation: Any) -> None:
        times = operation.start - self.begin, operation.end - self.begin
        what = operation.kind, operation.name, operation.stream.handle, operation.correlation == abi.call.correlation
        host_memory = sorted(operation.host_memory) if operation.kind == "kernel" else None
        self.seen.append((*what, *times, operation.programmatic, host_memory))

    def executed(self, operation: Any) -> None:
        self.seen.append((operation.sequence, operation.done))

    def unlocked(self) -> None: ...


@pytest.fixture
def program(driver: Any, ok: Callable[[Any], Any], machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    # Once a test has shared memory with other processes, a thread executes what is enqueued, when it gets to it.
    monkeypatch.setattr(machine.scheduler, "_is_shared", False)
    gc.collect()  # arrays of earlier tests call the driver when they are destroyed
    gc.disable()
    made = Program(driver, ok, machine)
    yield made
    made.close()
    gc.enable()


@pytest.fixture
def by_python(machine: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels whose launches launches.py has enqueued, and of those that it has run."""
    names: list[str] = []
    enqueue, run = entry_points._launch, Launch.run

    def enqueued(f: int, *arguments: Any, **options: Any) -> None:
        function = machine.objects.get(f)
        names.append(f"enqueue {getattr(function, 'name', 'unknown')}")
        enqueue(f, *arguments, **options)

    def ran(self: Launch, operation: Any) -> None:
        names.append(f"run {operation.name}")
        run(self, operation)

    monkeypatch.setattr(entry_points, "_launch", enqueued)
    monkeypatch.setattr(Launch, "run", ran)
    return names


def forget(machine: Any) -> None:
    """Let the next launch of each kernel be like none before."""
    for function in [one for one in machine.objects.values() if isinstance(one, Function)]:
        function.fitting.clear()


def execute(program: Program, seed: int, *, forgets: bool) -> list[Any]:
    """Make the launches of this seed, and return all that can be seen of them."""
    driver, ok, machine = program._driver, program._ok, program.machine
    choose = random.Random(seed)
    ok(driver.cuCtxSynchronize())
    program.seen = []
    ok(driver.cuMemsetD32(program.device, 1, 1024))
    ok(driver.cuCtxSynchronize())
    program.begin = machine.scheduler.host_time
    abi.subscribe(program)
    results = []
    try:
        for _ in range(60):
            if forgets:
                forget(machine)
            action, stream = choose.random(), choose.choice([0, 1, 2, *program.streams, 4712])
            place = program.device + 4 * choose.randrange(3)
            if action < 0.75:
                name = choose.choice(["nothing", "early", "step", "step", "step", "size", "unknown"])
                values = {"step": (place, choose.randrange(256), choose.randrange(9)), "size": (place,)}.get(name, ())
                if choose.random() < 0.1:
                    values = (*values[:-1], -1) if choose.random() < 0.5 else ()
                grid = choose.choice([(1, 1, 1), (1, 1, 1), (2, 1, 1), (0, 1, 1)])
                block = choose.choice([(1, 1, 1), (1, 1, 1), (1, 2, 1), (2048, 1, 1)])
                options = {
                    "shared": choose.choice([0, 0, 16, 1 << 20]),
                    "attributes": choose.choice([None, None, [], [program.programmatic()]]),
                }
                results.append(program.launch(name, *values, grid=grid, block=block, stream=stream, **options))
            elif action < 0.85:
                ok(driver.cuStreamSynchronize(choose.choice(program.streams)))
            elif action < 0.9:
                results.append(program.word(place))
            elif action < 0.95:
                ok(driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE, choose.choice([1024, 2048])))
            else:
                driver.cuStreamQuery(stream)
        ok(driver.cuCtxSynchronize())
        results += [program.word(program.device + 4 * n) for n in range(3)]
    finally:
        abi.unsubscribe(program)
    firsts = [one[0] for one in program.seen if isinstance(one[0], int)]
    return [results, [(one[0] - min(firsts), *one[1:]) if isinstance(one[0], int) else one for one in program.seen]]


@pytest.mark.some_of("seed", range(40), 12)
def test_launches_like_one_before_do_what_first_ones_do(program, seed, by_python):
    expected = execute(program, seed, forgets=True)
    first = len(by_python)
    results, seen = execute(program, seed, forgets=False)
    assert expected[0] == results
    for wanted, found in zip(expected[1], seen, strict=False):
        assert wanted == found
    assert len(expected[1]) == len(seen)
    assert len(by_python) - first <= first


def test_a_launch_like_one_before_needs_no_python(program, ok, by_python):
    for number in range(10):
        assert 0 == program.launch("step", program.device, 2, number, stream=program.streams[number % 2])
        ok(program._driver.cuStreamSynchronize(program.streams[number % 2]))
    assert ["enqueue step", "run step"] == by_python


def test_pinned_memory_that_a_kernel_may_use_is_known_of_each_launch(program, ok):
    driver, scheduler = program._driver, program.machine.scheduler
    pinned = int(ok(driver.cuMemAllocHost(4096)))
    for place, may_read in ((program.device, False), (program.device, False), (pinned, True), (pinned + 4, True)):
        assert 0 == program.launch("step", place, 2, 1, stream=program.streams[0])
        with abi.lock:
            assert may_read == scheduler.may_read_host(pinned, 4096)
    ok(driver.cuCtxSynchronize())
    ok(driver.cuMemFreeHost(pinned))


def test_a_limit_that_is_lowered_holds_for_launches_like_one_before(program, ok):
    driver = program._driver
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert [0, 0] == [program.launch("size", program.device, shared=512) for _ in range(2)]
    ok(driver.cuFuncSetAttribute(program.handles["size"], attribute, 256))
    assert 1 == program.launch("size", program.device, shared=512)


def test_a_limit_of_the_context_is_looked_at_in_launches_like_one_before(program, ok, by_python):
    driver = program._driver
    for stack_bytes in (0, 2048):
        if stack_bytes:
            ok(driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE, stack_bytes))
        for _ in range(2):
            assert 0 == program.launch("nothing", stream=program.streams[0])
            ok(driver.cuCtxSynchronize())
    assert ["enqueue nothing", "run nothing", "run nothing", "run nothing"] == by_python


def test_what_prints_is_prepared_for_in_each_context(driver, ok, program):
    library = ok(driver.cuLibraryLoadData(PTX + b"\0", [], [], 0, [], [], 0))  # a module's runs in one context only
    program.handles["says"] = int(ok(driver.cuLibraryGetKernel(library, b"says")))
    assert [0, 0] == [program.launch("says") for _ in range(2)]
    other = ok(driver.cuCtxCreate(None, 0, 0))
    assert 0 == program.launch("says")
    ok(driver.cuCtxSynchronize())
    # A limit that cannot be changed any more, once a kernel that prints was launched.
    assert 1 == int(driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_PRINTF_FIFO_SIZE, 4096)[0])
    ok(driver.cuCtxDestroy(other))
    ok(driver.cuLibraryUnload(library))


def test_a_pending_launch_is_few_objects_for_the_search_for_garbage(program, ok):
    """The launch, its operation, and the two lists that order it after the one before."""
    assert [0, 0] == [program.launch("nothing", stream=program.streams[1]) for _ in range(2)]
    pending = program.machine.scheduler._pending
    operation = list(pending.values())[-1]
    own = [each for each in gc.get_referents(operation, operation.run) if gc.is_tracked(each)]
    assert ["list"] == [type(each).__name__ for each in own if type(each) in (list, dict, set)]
    assert [(), (), (), (), ()] == [
        getattr(operation, name) for name in ("dependents", "footprint", "findings", "host_target", "host_memory")
    ]
    ok(program._driver.cuCtxSynchronize())
    assert ((), ()) == (operation.predecessors, operation.dependents)


def test_device_memory_is_named_for_who_watches_the_host(program, ok):
    assert 0 == program.launch("step", program.device, 2, 1, stream=program.streams[0])
    pending = program.machine.scheduler._pending
    with abi.lock:
        program.machine.watch_host(lambda *_: None)
    try:
        assert 0 == program.launch("step", program.device + 4, 2, 1, stream=program.streams[0])
        assert [[(program.device, 4096)]] * 2 == [operation.host_memory for operation in pending.values()]
        ok(program._driver.cuCtxSynchronize())
    finally:
        with abi.lock:
            program.machine.unwatch_host()


def test_a_cooperative_launch_is_none_like_a_plain_one_before(program, ok, by_python):
    for _ in range(2):
        assert 0 == program.launch("nothing")
        ok(program._driver.cuCtxSynchronize())
    by_python.clear()
    ok(program._driver.cuLaunchCooperativeKernel(program.handles["nothing"], 1, 1, 1, 1, 1, 1, 0, 0, 0))
    ok(program._driver.cuCtxSynchronize())
    assert ["enqueue nothing", "run nothing"] == by_python


def test_launches_wait_for_their_kernels_where_they_are_to(program, machine, monkeypatch):
    assert 0 == program.launch("nothing", stream=program.streams[0])
    monkeypatch.setattr(machine.options, "launch_blocking", True)
    assert machine.scheduler.is_busy
    assert 0 == program.launch("nothing", stream=program.streams[0])
    assert not machine.scheduler.is_busy


def test_launches_are_measured_from_when_that_is_asked_for(program, ok, by_python, monkeypatch):
    driver, machine = program._driver, program.machine
    ran: list[list[Any]] = []
    monkeypatch.setattr(program, "executed", lambda operation: ran.append(operation.footprint))
    abi.subscribe(program)
    try:
        for measures in (False, True, False):
            assert 0 == program.launch("step", program.device, 1, 1, stream=program.streams[0])
            with abi.lock:
                machine.measure_accesses = measures
            assert 0 == program.launch("step", program.device, 1, 1, stream=program.streams[0])
            ok(driver.cuStreamSynchronize(program.streams[0]))
    finally:
        abi.unsubscribe(program)
        machine.measure_accesses = False
    assert [False, False, True, True, False, False] == [bool(footprint) for footprint in ran]
    assert by_python.count("enqueue step") == 2  # and once for the code that measures


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize(
    ("name", "harmless", "harmful", "result", "text"),
    [
        ("traps_if", (0,), (1,), "LAUNCH_FAILED", "traps_if: block (0, 0, 0), thread 0: trap at"),
        ("step", None, (8, 1, 1), "ILLEGAL_ADDRESS", "step: illegal access at 0x8, outside every allocation"),
    ],
)
def test_what_ends_a_launch_early_is_the_error_of_its_context(
    driver, ok, machine, by_python, forgets, name, harmless, harmful, result, text
):
    context = ok(driver.cuCtxCreate(None, 0, 0))
    program = Program(driver, ok, machine)
    assert 0 == program.launch(name, *(harmless or (program.device, 1, 1)))
    ok(driver.cuCtxSynchronize())
    if forgets:
        forget(machine)
    assert 0 == program.launch(name, *harmful)
    assert f"CUDA_ERROR_{result}" == driver.cuCtxSynchronize()[0].name
    assert text in str(machine.objects[int(context)].error)
    assert [f"enqueue {name}", f"run {name}"] * (2 if forgets else 1) == by_python
    ok(driver.cuCtxDestroy(context))


INTERRUPTED = """
import signal
import cudatool as ct
source = 'extern "C" __global__ void k(int *x, int n) { x[0] = n; while (n) asm volatile(""); }'
kernel = ct.compile(source, "k")[(1,), (1,)]
x = ct.zeros(1, dtype="int32")
kernel(x, 0)
ct.synchronize()
before = signal.getsignal(signal.SIGINT)
try:
    for _ in range(5):
        kernel(x, 0)
    kernel(x, 1)
    print("launched", flush=True)
    ct.synchronize()
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is before, flush=True)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("again", flush=True)
"""


def test_control_c_ends_the_last_of_launches_that_follow_each_other():
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "launched\n"
            time.sleep(0.5)
            program.send_signal(signal.SIGINT)
            program.wait(timeout=60)
        finally:
            program.kill()
        assert program.stdout.read() == "interrupted True\nagain\n"
