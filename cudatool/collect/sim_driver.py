"""Turns the software driver's calls into events: what any cuda.core or cuda.bindings program does.

Calls that our runtime makes are left out (it emits its own events); what the device reports about them, execution times
and accesses, is tied to the runtime's operation. CUPTI on a GPU is the same shape and fits beside this module.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

from cudatool.collect.byte_sets import compress
from cudatool.collect.callers import calling_api
from cudatool.collect.sim_blocks import BlockWatcher
from cudatool.collect.sim_graphs import GraphWatcher
from cudatool.memory import observers
from cudatool.ptx.kernel_names import kernel_name
from cudatool.trace import hooks
from cudatool.trace.events import (
    AccessFlag,
    CopyFlag,
    EventFlag,
    Kind,
    StreamFlag,
    WarningCode,
    WarningFlag,
    launch_flags,
    pack_dims,
)
from cudatool.trace.libraries import Library

if TYPE_CHECKING:
    from cudatool.sim import Entry, Machine, Operation, Result
    from cudatool.sim.machine import Context
    from cudatool.sim.observe.checkers import CheckFinding

__all__ = ["SimDriverCollector"]

_WORK = frozenset(["kernel", "memcpy", "memset", "host"])
_TOUCHES_MEMORY = _WORK - {"host"}
# Programs use these as queries: a failure is an answer and needs no warning.
_QUESTIONS = ("cuPointerGet", "cuDeviceGet", "cuGetError", "cuCtxGet")


# Results of cuStreamEndCapture that end the capture too, without a graph.
_ENDED = ("STREAM_CAPTURE_INVALIDATED", "STREAM_CAPTURE_UNJOINED")

# Calls that are recorded although they did not succeed: their error is a finding, or the answer to a query.
_TOLD = (
    ("cuStreamWaitEvent", "CAPTURED_EVENT"),
    ("cuStreamQuery", "NOT_READY"),
    ("cuEventQuery", "NOT_READY"),
)


# Calls that ask for memory of a device.
_ALLOCATES = frozenset(
    [
        *("cuMemAlloc", "cuMemAllocPitch", "cuMemAllocManaged", "cuMemAllocAsync", "cuMemAllocFromPoolAsync"),
        *("cuMemCreate", "cuArrayCreate", "cuArray3DCreate", "cuMipmappedArrayCreate"),
    ]
)

_BLOCKING = StreamFlag(0)
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL

# Copies and fills whose arguments are not one address and one size for each side.
_OF_BOXES = (
    *("cuMemcpy2D", "cuMemcpy3D", "cuMemcpyBatch", "cuMemsetD2D"),
    *("cuMemcpyHtoA", "cuMemcpyAtoH", "cuMemcpyDtoA", "cuMemcpyAtoD", "cuMemcpyAtoA"),
)


@lru_cache(maxsize=1024)
def _packed(grid: tuple[int, int, int], block: tuple[int, int, int]) -> tuple[int, int]:
    return pack_dims(*grid), pack_dims(*block)


class _Call:
    """The driver call in progress on a thread."""

    __slots__ = (
        "copies",
        "device",
        "is_ready",
        "later",
        "memory",
        "memory_of_array",
        "on_host",
        "operation",
        "owners",
        "shape",
        "size",
        "values",
    )

    def __init__(self) -> None:
        self.operation: Any = None  # the last operation that it enqueued
        self.shape: Any = None  # of that, if it is a launch: the kernel, the grid, the block
        self.copies: tuple[Any, ...] = ()  # those of them that copy or fill
        self.memory: tuple[Any, ...] = ()  # those of them that allocate or free
        self.values: tuple[Any, ...] = ()  # those of them that wait for a value in memory or write it
        self.is_ready = False  # whether what it asks for has completed
        self.later: list[Any] | None = None  # operations executed during the call, reported after the call itself
        self.size = 0  # of the allocation that it is about to free
        self.on_host = False  # whether that is host memory
        self.device = 0  # of the stream that it is about to destroy
        self.memory_of_array: Any = None  # that it is about to destroy
        # Correlation and stream id of each operation that it enqueued; another thread may have run it since.
        self.owners: dict[int, tuple[int, int]] = {}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.call = _Call()


class SimDriverCollector:
    """Turns driver calls into events. Pass it to :func:`cudatool.sim.subscribe` while hooks have subscribers.

    Parameters
    ----------
    machine
        The software device.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.blocks = BlockWatcher(machine.checkers) if machine.checkers is not None else None
        self._graphs = GraphWatcher(machine)
        self._thread = _Thread()
        self._stream_ids = hooks.stream_ids()
        self._owners: dict[int, tuple[int, int]] = {}  # operation -> correlation, stream id
        self._failed: set[int] = set()  # contexts
        self._launches: dict[int, int] = {}  # first operation of a graph launch -> correlation of all of them

    # ---- what the driver calls (cudatool.sim.Subscriber) ----

    def enter(self, entry: Entry, arguments: tuple[Any, ...], correlation: int) -> None:
        """Note what the call is about to destroy, while it still exists."""
        call, name = self._thread.call, entry.name
        call.operation = None
        call.owners.clear()
        call.later = None if hooks.current_operation() else []
        if name in _REPORT_OFTEN:
            return
        call.memory, call.copies, call.values, call.size = (), (), (), 0
        if name.startswith(("cuMemFree", "cuMemHostUnregister")):
            found = self._machine.allocations.at(arguments[0])
            call.size = found.size if found else 0
            call.on_host = found is not None and found.device < 0
        elif name in ("cuArrayDestroy", "cuMipmappedArrayDestroy"):
            call.memory_of_array = getattr(self._machine.objects.get(arguments[0]), "allocation", None)
        elif name == "cuStreamDestroy" and arguments[0] in self._machine.objects:
            call.device = self._stream(arguments[0])[0]

    def enqueued(self, operation: Operation) -> None:
        """Tie the operation to the call that enqueued it."""
        call, stream, sequence, launch, kind = (
            self._thread.call,
            operation.stream,
            operation.sequence,
            operation.launch,
            operation.kind,
        )
        ordinal = stream.context.device.ordinal
        stream_id = self._stream_ids.get((ordinal, stream.handle, 0))
        if stream_id is None:
            flags = StreamFlag.NON_BLOCKING if stream.flags & 1 else _BLOCKING
            stream_id = hooks.stream_id(ordinal, stream.handle, flags=flags, priority=stream.priority, api=calling_api)
        correlation = self._launches.get(launch.sequence) if launch is not None else None
        if correlation is None:
            correlation = hooks.current_operation() or hooks.new_correlation()
            if launch is operation:
                self._launches[sequence] = correlation
        self._owners[sequence] = call.owners[sequence] = correlation, stream_id
        if self._machine.tape is not None:
            self._machine.tape.owners[sequence] = correlation
        call.operation = operation
        if kind == "kernel":
            call.shape = getattr(operation.run, "shape", None)  # of a launch; when it has run, `run` is gone
        elif kind in ("alloc", "free"):
            call.memory += (operation,)
        elif kind in ("memcpy", "memset"):
            call.copies += (operation,)
        elif kind in ("write_value", "wait_value"):
            call.values += (operation,)
        elif kind == "host" and operation.run is not None:
            operation.run = _as_host_function(operation.run, correlation)
        if self.blocks is not None:
            self.blocks.enqueued(operation, stream_id, correlation)

    def executed(self, operation: Operation) -> None:
        """Report when the operation ran and what it touched, after the call in progress if there is one."""
        if self.blocks is not None:
            correlation, stream = self._owners.get(operation.sequence, (0, 0))
            self.blocks.executed(operation, stream, correlation)
        later = self._thread.call.later
        if later is not None:
            later.append(operation)
        else:
            self._execution(operation)

    def leave(self, entry: Entry, arguments: tuple[Any, ...], correlation: int, result: Result) -> None:
        """Emit the event that the call stands for."""
        call = self._thread.call
        later, call.later = call.later, None
        name = entry.name
        checkers = self._machine.checkers
        if checkers is not None and result.name == "INVALID_VALUE":
            found = checkers.explain_call(name, arguments[0])
            if found is not None:
                self._finding(found, device=self._device)
        if result == 0 and self._machine.captures:
            self._graphs.captured(correlation)
        if later is None:
            return  # our runtime's own call
        if name == "cuStreamEndCapture" and (result == 0 or result.name in _ENDED):
            self._capture_end(arguments)
        if result == 0 and (often := _REPORT_OFTEN.get(name)) is not None:
            often(self, *arguments)
        elif result == 0 or (name, result.name) in _TOLD:
            call.is_ready = result == 0
            _report_of(name)(self, dict(zip(entry.parameters, arguments, strict=True)), name)
        elif not name.startswith(_QUESTIONS) and result.name != "NOT_READY":
            self._failure(entry, arguments, result)
        for operation in later:
            self._execution(operation)

    def _failure(self, entry: Entry, arguments: tuple[Any, ...], result: Result) -> None:
        why = self._machine.last_message()
        text = f"{entry.name} returned {result.c_name}{': ' if why else ''}{why}"
        hooks.emit(Kind.WARNING, name=text, aux0=WarningCode.CALL_FAILED)
        if result.name == "OUT_OF_MEMORY" and entry.name in _ALLOCATES:
            self._out_of_memory(dict(zip(entry.parameters, arguments, strict=True)))

    # ---- helpers ----

    @property
    def _device(self) -> int:
        stack = self._machine.thread.contexts
        return stack[-1].device.ordinal if stack else 0

    def _stream(self, handle: int) -> tuple[int, int]:
        """Return device and stream id for a handle that a program passed."""
        handle = handle or self._machine.null_stream
        found = self._machine.objects.get(handle)
        ordinal = found.context.device.ordinal if found is not None else self._device
        return ordinal, hooks.stream_id(ordinal, handle, api=calling_api)

    def _owner(self) -> tuple[int, int, int]:
        """Return correlation, device and stream id of what the call enqueued; zeros if it enqueued nothing."""
        operation = self._thread.call.operation
        if operation is None:
            return 0, self._device, 0
        correlation, stream = self._thread.call.owners[operation.sequence]
        return correlation, operation.stream.context.device.ordinal, stream

    def _execution(self, operation: Operation) -> None:
        correlation, stream = self._owners.pop(operation.sequence, (0, 0))
        kind = operation.kind
        if kind == "graph_end" and operation.launch is not None:
            self._launches.pop(operation.launch.sequence, None)
        if kind not in _WORK or not correlation:
            return
        is_kernel = kind == "kernel"
        context = operation.stream.context
        ordinal = context.device.ordinal
        if operation.footprint:
            self._accesses(operation, ordinal, correlation)
        if operation.findings:
            self._findings(operation, device=ordinal, stream=stream, correlation=correlation)
        hooks.emit(
            Kind.EXECUTION,
            device=ordinal,
            stream=stream,
            correlation=correlation,
            name=kernel_name(operation.name) if is_kernel else operation.name,
            flags=int(is_kernel and operation.launch is not None),
            address=operation.node,
            aux0=operation.start,
            aux1=operation.end,
            stack=0,
        )
        if context.error is not None:
            self._report_error(context)

    @staticmethod
    def _accesses(operation: Operation, device: int, correlation: int) -> None:
        for address, size, flags, aux0, aux1 in compress(operation.footprint, of_boxes=operation.kind != "kernel"):
            hooks.emit(
                Kind.ACCESS,
                device=device,
                stream=operation.node,
                correlation=correlation,
                address=address,
                size=size,
                flags=flags,
                aux0=aux0,
                aux1=aux1,
                stack=0,
            )

    def _findings(self, operation: Operation, **who: int) -> None:
        for found in operation.findings:
            if found.is_gap:
                is_part = found.kind == "unchecked"
                hooks.emit(
                    Kind.WARNING,
                    name=found.text,
                    flags=WarningFlag.RACES if is_part else WarningFlag.UNSEEN,
                    correlation=who["correlation"],
                    stack=0,
                    aux0=WarningCode.RACECHECK_PARTIAL if is_part else WarningCode.ACCESSES_NOT_KNOWN,
                )
            else:
                self._finding(found, **who)

    def _report_error(self, context: Context) -> None:
        """Report once that a context has failed: nothing of it runs any more."""
        if context.error is None or context.handle in self._failed:
            return
        self._failed.add(context.handle)
        hooks.emit(
            Kind.WARNING,
            device=context.device.ordinal,
            name=f"work after {context.error.result.c_name} ({context.error})",
            flags=WarningFlag.UNSEEN,
            stack=0,
            aux0=WarningCode.WORK_AFTER_ERROR,
        )

    @staticmethod
    def _finding(found: CheckFinding, **who: int) -> None:
        rest = asdict(found)
        address, size, count = (rest.pop(name) for name in ("address", "size", "count"))
        text = json.dumps({key: value for key, value in rest.items() if value})
        hooks.emit(Kind.FINDING, name=text, address=address, size=size, aux0=count, **who)

    # ---- one method per kind of call ----

    def _stream_create(self, values: dict[str, Any], name: str) -> None:
        handle = _pointed(values["phStream"])
        flags = StreamFlag.NON_BLOCKING if values.get("flags", values.get("Flags", 0)) & 1 else StreamFlag(0)
        device = self._machine.objects[handle].context.device.ordinal
        hooks.stream_id(device, handle, flags=flags, priority=values.get("priority", 0), api=calling_api)

    def _stream_destroy(self, values: dict[str, Any], name: str) -> None:
        device = self._thread.call.device
        stream = hooks.close_stream(device, values["hStream"])
        if stream:
            hooks.emit(Kind.STREAM_DESTROY, device=device, stream=stream)

    def _stream_synchronize(self, handle: int) -> None:
        device, stream = self._stream(handle)
        hooks.emit(Kind.STREAM_SYNCHRONIZE, device=device, stream=stream)

    def _stream_wait_event(self, values: dict[str, Any], name: str) -> None:
        device, stream = self._stream(values["hStream"])
        event = hooks.event_id(values["hEvent"])
        hooks.emit(
            Kind.STREAM_WAIT_EVENT,
            device=device,
            stream=stream,
            aux0=event,
            flags=EventFlag.EXTERNAL if values["Flags"] & _EXTERNAL else 0,
            correlation=self._owner()[0],
        )

    def _values(self, values: dict[str, Any], name: str) -> None:
        device, stream = self._stream(values["hStream"])
        for operation in self._thread.call.values:
            address, size, value, flags = operation.value
            hooks.emit(
                Kind.STREAM_WRITE_VALUE if operation.kind == "write_value" else Kind.STREAM_WAIT_VALUE,
                device=device,
                stream=stream,
                address=address,
                size=size,
                aux0=value,
                flags=flags,
                correlation=self._thread.call.owners[operation.sequence][0],
            )

    def _is_on_device(self, address: int) -> bool:
        found = self._machine.allocations.holding(address)
        return found is None or found.device >= 0

    def _device_synchronize(self, values: dict[str, Any], name: str) -> None:
        hooks.emit(Kind.DEVICE_SYNCHRONIZE, device=self._device)

    def _event_create(self, values: dict[str, Any], name: str) -> None:
        handle = _pointed(values["phEvent"])
        timed, shared = not values["Flags"] & 2, values["Flags"] & 4
        flags = int(timed) | (2 if shared else 0)
        hooks.emit(Kind.EVENT_CREATE, device=self._device, aux0=hooks.event_id(handle), address=handle, flags=flags)

    def _event_open(self, values: dict[str, Any], name: str) -> None:
        handle = _pointed(values["phEvent"])
        hooks.emit(Kind.EVENT_CREATE, device=self._device, aux0=hooks.event_id(handle), address=handle, flags=2)

    def _other(self, values: dict[str, Any], name: str) -> None:
        """Say of a call that no event describes that it enqueued accesses, if it did."""
        operation = self._thread.call.operation
        if operation is not None and operation.kind in _TOUCHES_MEMORY:
            self._not_recorded(values, name)

    def _not_recorded(self, values: dict[str, Any], name: str) -> None:
        text = f"{name}: what it enqueues is not recorded"
        hooks.emit(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.CALL_NOT_RECORDED)

    def _share(self, values: dict[str, Any], name: str) -> None:
        opened = values.get("pdptr") or values.get("ptr_out")
        address = _pointed(opened) if opened else values["dptr" if "dptr" in values else "ptr"]
        found = self._machine.allocations.at(address)
        size = found.size if found is not None else 0
        hooks.emit(Kind.WARNING, name=name, device=self._device, address=address, size=size, flags=WarningFlag.SHARED)

    def _share_physical(self, values: dict[str, Any], name: str) -> None:
        handle = _pointed(values["handle"]) if "osHandle" in values else values["handle"]
        size = self._machine.objects[handle].size
        hooks.emit(Kind.WARNING, name=name, device=self._device, size=size, flags=WarningFlag.SHARED)

    def _event_destroy(self, values: dict[str, Any], name: str) -> None:
        event = hooks.close_event(values["hEvent"])
        if event:
            hooks.emit(Kind.EVENT_DESTROY, device=self._device, aux0=event)

    def _event_record(self, values: dict[str, Any], name: str) -> None:
        device, stream = self._stream(values["hStream"])
        correlation = self._owner()[0]
        event = hooks.event_id(values["hEvent"])
        flags = EventFlag.EXTERNAL if values.get("flags", 0) & _EXTERNAL else 0
        hooks.emit(Kind.EVENT_RECORD, device=device, stream=stream, aux0=event, flags=flags, correlation=correlation)

    def _context_record_event(self, values: dict[str, Any], name: str) -> None:
        """Report an event that stands for all streams of a context as one of a stream that waits for all of them."""
        context = self._machine.objects[values["hCtx"]]
        device = context.device.ordinal
        own = hooks.stream_id(device, values["hCtx"], flags=StreamFlag.NON_BLOCKING)
        for stream in self._machine.streams_of(context):
            part = hooks.event_id(stream.handle)
            hooks.emit(Kind.EVENT_RECORD, device=device, stream=hooks.stream_id(device, stream.handle), aux0=part)
            hooks.emit(Kind.STREAM_WAIT_EVENT, device=device, stream=own, aux0=part)
        hooks.emit(Kind.EVENT_RECORD, device=device, stream=own, aux0=hooks.event_id(values["hEvent"]))

    def _context_wait_event(self, values: dict[str, Any], name: str) -> None:
        context = self._machine.objects[values["hCtx"]]
        device, event = context.device.ordinal, hooks.event_id(values["hEvent"])
        for stream in self._machine.streams_of(context):
            waiting = hooks.stream_id(device, stream.handle)
            hooks.emit(Kind.STREAM_WAIT_EVENT, device=device, stream=waiting, aux0=event)

    def _event_synchronize(self, values: dict[str, Any], name: str) -> None:
        hooks.emit(Kind.EVENT_SYNCHRONIZE, device=self._device, aux0=hooks.event_id(values["hEvent"]))

    def _event_elapsed_time(self, values: dict[str, Any], name: str) -> None:
        """Report that two events have completed: only completed events have an elapsed time."""
        for event in (values["hStart"], values["hEnd"]):
            hooks.emit(Kind.EVENT_QUERY, device=self._device, aux0=hooks.event_id(event), aux1=1)

    def _event_query(self, values: dict[str, Any], name: str) -> None:
        event, is_ready = hooks.event_id(values["hEvent"]), self._thread.call.is_ready
        hooks.emit(Kind.EVENT_QUERY, device=self._device, aux0=event, aux1=int(is_ready))

    def _stream_query(self, values: dict[str, Any], name: str) -> None:
        device, stream = self._stream(values["hStream"])
        hooks.emit(Kind.STREAM_QUERY, device=device, stream=stream, aux1=int(self._thread.call.is_ready))

    def _mem_alloc(self, values: dict[str, Any], name: str) -> None:
        address = _pointed(values["dptr"])
        found = self._machine.allocations.at(address)
        if found is None:
            return  # captured: graphs allocate when they are launched
        _, device, stream = self._owner()
        if found.device < 0:  # from a pool of pinned memory
            hooks.emit(Kind.HOST_ALLOC, address=address, size=found.size, name=name)
            return
        hooks.emit(Kind.MEM_ALLOC, device=device, stream=stream, address=address, size=found.size, name=name)

    def _mem_free(self, values: dict[str, Any], name: str) -> None:
        if values["dptr"] and (self._thread.call.operation is not None or name == "cuMemFree"):
            _, device, stream = self._owner()
            size = self._thread.call.size
            if self._thread.call.on_host:
                hooks.emit(Kind.HOST_FREE, address=values["dptr"], size=size, name=name)
                return
            hooks.emit(Kind.MEM_FREE, device=device, stream=stream, address=values["dptr"], size=size, name=name)

    def _out_of_memory(self, values: dict[str, Any]) -> None:
        """Report that the program asked the driver for memory and did not get it."""
        pool = self._machine.objects.get(values.get("pool", 0))
        if pool is not None and pool.device < 0:
            return  # of the host
        device = self._stream(values["hStream"])[0] if "hStream" in values else self._device
        size = values.get("bytesize", values.get("size", 0)) or values.get("WidthInBytes", 0) * values.get("Height", 0)
        limit = pool.max_size if pool is not None else 0
        memory = self._machine.devices[device].memory
        free = memory.size - memory.used
        hooks.emit(Kind.LIBRARY_OOM, device=device, size=size, aux0=free, aux1=limit, name=Library.DRIVER)
        observers.notify(device, size, limit, free)

    def _physical_alloc(self, values: dict[str, Any], name: str) -> None:
        physical = self._machine.objects[_pointed(values["handle"])]
        device = physical.device.ordinal
        hooks.emit(Kind.PHYSICAL_ALLOC, device=device, aux0=physical.handle, size=physical.size, name=name)

    def _physical_free(self, values: dict[str, Any], name: str) -> None:
        """Report memory whose last handle or mapping the call dropped."""
        for physical in self._machine.virtual.dropped:
            device = physical.device.ordinal
            hooks.emit(Kind.PHYSICAL_FREE, device=device, aux0=physical.handle, size=physical.size, name=name)

    def _mem_map(self, values: dict[str, Any], name: str) -> None:
        mapping = self._machine.virtual.mapping_at(values["ptr"])
        assert mapping is not None  # the call has just made it
        other = self._machine.virtual.mapped_elsewhere(mapping)
        elsewhere = other.address if other is not None else 0
        device = mapping.device
        hooks.emit(Kind.MEM_MAP, device=device, address=values["ptr"], size=values["size"], aux0=elsewhere, name=name)

    def _mem_unmap(self, values: dict[str, Any], name: str) -> None:
        hooks.emit(Kind.MEM_UNMAP, device=self._device, address=values["ptr"], size=values["size"], name=name)
        self._physical_free(values, name)

    def _array_create(self, values: dict[str, Any], name: str) -> None:
        array = self._machine.objects[_pointed(values["pHandle"])]
        found = array.allocation
        hooks.emit(Kind.MEM_ALLOC, device=found.device, address=found.address, size=found.size, name=name)

    def _array_destroy(self, values: dict[str, Any], name: str) -> None:
        found = self._thread.call.memory_of_array
        hooks.emit(Kind.MEM_FREE, device=found.device, address=found.address, size=found.size, name=name)

    def _host_alloc(self, values: dict[str, Any], name: str) -> None:
        hooks.emit(Kind.HOST_ALLOC, address=_pointed(values["pp"]), size=values["bytesize"], name=name)

    def _host_register(self, values: dict[str, Any], name: str) -> None:
        hooks.emit(Kind.HOST_ALLOC, address=values["p"], size=values["bytesize"], name=name)

    def _host_free(self, values: dict[str, Any], name: str) -> None:
        hooks.emit(Kind.HOST_FREE, address=values["p"], size=self._thread.call.size, name=name)

    def _launch(self, *_: int) -> None:
        call = self._thread.call
        operation = call.operation
        if operation is None:
            return  # captured
        shape = call.shape
        grid, block = _packed(shape.grid, shape.block)
        correlation, stream = call.owners[operation.sequence]
        hooks.emit(
            Kind.KERNEL_LAUNCH,
            device=operation.stream.context.device.ordinal,
            stream=stream,
            correlation=correlation,
            name=kernel_name(operation.name),
            size=shape.shared,
            aux0=grid,
            aux1=block,
            flags=launch_flags(*operation.programmatic),
        )

    def _host_function(self, values: dict[str, Any], name: str) -> None:
        correlation, device, stream = self._owner()
        if correlation:  # else captured
            hooks.emit(Kind.HOST_FUNCTION, device=device, stream=stream, correlation=correlation, name=name)

    def _capture_begin(self, values: dict[str, Any], name: str) -> None:
        device, stream = self._stream(values["hStream"])
        hooks.emit(Kind.GRAPH_CAPTURE_BEGIN, device=device, stream=stream)

    def _capture_end(self, arguments: tuple[Any, ...]) -> None:
        device, stream = self._stream(arguments[0])
        graph = self._machine.objects.get(_pointed(arguments[1]))
        hooks.emit(Kind.GRAPH_CAPTURE_END, device=device, stream=stream, aux0=graph.id if graph is not None else 0)

    def _graph_instantiate(self, values: dict[str, Any], name: str) -> None:
        self._graphs.instantiated(_pointed(values["phGraphExec"]))

    def _graph_added(self, values: dict[str, Any], name: str) -> None:
        if "phGraphNode" in values:  # unlike cuGraphAddDependencies
            self._graphs.added(_pointed(values["phGraphNode"]))

    def _graph_update(self, values: dict[str, Any], name: str) -> None:
        self._graphs.updated(values["hGraphExec"])

    def _graph_launch(self, values: dict[str, Any], name: str) -> None:
        correlation, device, stream = self._owner()
        if not correlation:
            return  # captured
        memory = self._thread.call.memory
        before = [op for op in memory if op.launch is None]  # what the launch frees because an earlier launch did not
        inside = [op for op in memory if op.launch is not None]
        for operation in [*before, *(op for op in inside if op.kind == "alloc")]:
            self._graph_memory(operation, device, stream, name)
        graph = self._machine.objects[values["hGraphExec"]].id
        hooks.emit(Kind.GRAPH_LAUNCH, device=device, stream=stream, correlation=correlation, aux0=graph, name=name)
        for operation in (op for op in inside if op.kind == "free"):
            self._graph_memory(operation, device, stream, name)

    @staticmethod
    def _graph_memory(operation: Operation, device: int, stream: int, name: str) -> None:
        kind = Kind.MEM_ALLOC if operation.kind == "alloc" else Kind.MEM_FREE
        for address, size, _ in operation.footprint:
            hooks.emit(kind, device=device, stream=stream, address=address, size=size, name=name)

    def _module_load(self, values: dict[str, Any], name: str) -> None:
        handle = _pointed(values.get("library") or values["module"])
        library = self._machine.objects[handle]
        hooks.emit(
            Kind.MODULE_LOAD,
            device=self._device,
            name=", ".join(map(kernel_name, library.names)),
            size=len(library.image),
        )

    def _copy(self, values: dict[str, Any], name: str) -> None:
        if name.startswith(_OF_BOXES):
            self._boxes(Kind.MEMCPY, values, name)
            return
        to = values.get("dst") or values.get("dstDevice") or values.get("dstHost") or 0
        source = values.get("src") or values.get("srcDevice") or values.get("srcHost") or 0
        size = values.get("ByteCount", values.get("size", 0))
        correlation, device, stream = self._owner()
        if not correlation:
            return  # nothing to copy
        target, origin = self._machine.allocations.holding(to), self._machine.allocations.holding(source)
        devices = {found.device for found in (target, origin) if found is not None and found.device >= 0}
        flags = CopyFlag.ASYNC if "hStream" in values else CopyFlag(0)
        if target is None:
            flags |= CopyFlag.DESTINATION_PAGEABLE
        elif target.device >= 0:
            flags |= CopyFlag.DESTINATION_DEVICE
        if origin is None:
            flags |= CopyFlag.SOURCE_PAGEABLE
        elif origin.device >= 0:
            flags |= CopyFlag.SOURCE_DEVICE
        hooks.emit(
            Kind.MEMCPY,
            device=device,
            stream=stream,
            correlation=correlation,
            address=to,
            size=size,
            aux0=source,
            aux1=sum(1 << device for device in devices) if len(devices) > 1 else 0,
            flags=flags,
            name=name,
        )
        self._access(correlation, device, source, size, AccessFlag.READ, "source")
        self._access(correlation, device, to, size, AccessFlag.WRITE, "destination")

    def _boxes(self, kind: Kind, values: dict[str, Any], name: str) -> None:
        """Report copies or fills of several rows, or of several ranges. What each touches is reported when it runs."""
        for operation in self._thread.call.copies:
            correlation, stream = self._thread.call.owners[operation.sequence]
            read = [(address, size) for address, size, flags in operation.footprint if flags == AccessFlag.READ]
            written = [(address, size) for address, size, flags in operation.footprint if flags == AccessFlag.WRITE]
            flags = CopyFlag.ASYNC if "hStream" in values else CopyFlag(0)
            for ranges, on_device, pageable in (
                (written, CopyFlag.DESTINATION_DEVICE, CopyFlag.DESTINATION_PAGEABLE),
                (read, CopyFlag.SOURCE_DEVICE, CopyFlag.SOURCE_PAGEABLE),
            ):
                found = self._machine.allocations.holding(ranges[0][0]) if ranges else None
                on_host = found is not None and found.device < 0
                # CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL: when the call returns, even pinned memory has been read.
                staged = on_host and ranges is read and CopyFlag.ASYNC in flags and not any(operation.host_source)
                if (ranges and found is None) or staged:
                    flags |= pageable
                elif found is not None and found.device >= 0:
                    flags |= on_device
            hooks.emit(
                kind,
                device=operation.stream.context.device.ordinal,
                stream=stream,
                correlation=correlation,
                address=written[0][0],
                size=sum(size for _, size in written),
                aux0=read[0][0] if read else 0,
                flags=flags,
                name=name,
            )

    def _memset(self, values: dict[str, Any], name: str) -> None:
        if name.startswith(_OF_BOXES):
            self._boxes(Kind.MEMSET, values, name)
            return
        width = {"cuMemsetD8": 1, "cuMemsetD16": 2, "cuMemsetD32": 4}[name.removesuffix("Async")]
        value = next(values[key] for key in ("uc", "us", "ui") if key in values)
        size = values["N"] * width
        correlation, device, stream = self._owner()
        if not correlation:
            return
        hooks.emit(
            Kind.MEMSET,
            device=device,
            stream=stream,
            correlation=correlation,
            address=values["dstDevice"],
            size=size,
            aux0=value,
            aux1=width,
            flags=(CopyFlag.ASYNC if "hStream" in values else 0)
            | (CopyFlag.DESTINATION_DEVICE if self._is_on_device(values["dstDevice"]) else 0),
            name=name,
        )
        self._access(correlation, device, values["dstDevice"], size, AccessFlag.WRITE, "destination")

    @staticmethod
    def _access(correlation: int, device: int, address: int, size: int, flags: AccessFlag, name: str) -> None:
        hooks.emit(
            Kind.ACCESS,
            device=device,
            correlation=correlation,
            address=address,
            size=size,
            flags=flags,
            name=name,
            stack=0,
        )


# The method that reports a call. The calls that programs make most get their arguments as they are: a dictionary takes
# as long as an event.
_REPORT_OFTEN: Final[dict[str, Callable[..., None]]] = {
    "cuLaunchKernel": SimDriverCollector._launch,
    "cuLaunchCooperativeKernel": SimDriverCollector._launch,
    "cuLaunchKernelEx": SimDriverCollector._launch,
    "cuStreamSynchronize": SimDriverCollector._stream_synchronize,
}
_REPORT: Final[dict[str, Callable[[SimDriverCollector, dict[str, Any], str], None]]] = {
    "cuStreamCreateWithPriority": SimDriverCollector._stream_create,
    "cuStreamCreate": SimDriverCollector._stream_create,
    "cuGreenCtxStreamCreate": SimDriverCollector._stream_create,
    "cuStreamDestroy": SimDriverCollector._stream_destroy,
    "cuStreamQuery": SimDriverCollector._stream_query,
    "cuStreamWaitEvent": SimDriverCollector._stream_wait_event,
    "cuStreamWriteValue32": SimDriverCollector._values,
    "cuStreamWriteValue64": SimDriverCollector._values,
    "cuStreamWaitValue32": SimDriverCollector._values,
    "cuStreamWaitValue64": SimDriverCollector._values,
    "cuStreamBatchMemOp": SimDriverCollector._values,
    "cuCtxSynchronize": SimDriverCollector._device_synchronize,
    "cuEventCreate": SimDriverCollector._event_create,
    "cuIpcOpenEventHandle": SimDriverCollector._event_open,
    "cuIpcGetMemHandle": SimDriverCollector._share,
    "cuIpcOpenMemHandle": SimDriverCollector._share,
    "cuMemPoolExportPointer": SimDriverCollector._share,
    "cuMemPoolImportPointer": SimDriverCollector._share,
    "cuMemExportToShareableHandle": SimDriverCollector._share_physical,
    "cuMemImportFromShareableHandle": SimDriverCollector._share_physical,
    "cuEventDestroy": SimDriverCollector._event_destroy,
    "cuEventRecord": SimDriverCollector._event_record,
    "cuEventRecordWithFlags": SimDriverCollector._event_record,
    "cuGreenCtxRecordEvent": SimDriverCollector._context_record_event,
    "cuCtxRecordEvent": SimDriverCollector._context_record_event,
    "cuGreenCtxWaitEvent": SimDriverCollector._context_wait_event,
    "cuCtxWaitEvent": SimDriverCollector._context_wait_event,
    "cuEventQuery": SimDriverCollector._event_query,
    "cuEventSynchronize": SimDriverCollector._event_synchronize,
    "cuEventElapsedTime": SimDriverCollector._event_elapsed_time,
    "cuMemAlloc": SimDriverCollector._mem_alloc,
    "cuMemAllocPitch": SimDriverCollector._mem_alloc,
    "cuMemAllocManaged": SimDriverCollector._mem_alloc,
    "cuMemAllocAsync": SimDriverCollector._mem_alloc,
    "cuMemAllocFromPoolAsync": SimDriverCollector._mem_alloc,
    "cuMemFree": SimDriverCollector._mem_free,
    "cuMemFreeAsync": SimDriverCollector._mem_free,
    "cuMemCreate": SimDriverCollector._physical_alloc,
    "cuMemRelease": SimDriverCollector._physical_free,
    "cuMemMap": SimDriverCollector._mem_map,
    "cuMemUnmap": SimDriverCollector._mem_unmap,
    "cuArrayCreate": SimDriverCollector._array_create,
    "cuArray3DCreate": SimDriverCollector._array_create,
    "cuMipmappedArrayCreate": SimDriverCollector._array_create,
    "cuArrayDestroy": SimDriverCollector._array_destroy,
    "cuMipmappedArrayDestroy": SimDriverCollector._array_destroy,
    "cuMemAllocHost": SimDriverCollector._host_alloc,
    "cuMemHostAlloc": SimDriverCollector._host_alloc,
    "cuMemHostRegister": SimDriverCollector._host_register,
    "cuMemFreeHost": SimDriverCollector._host_free,
    "cuMemHostUnregister": SimDriverCollector._host_free,
    "cuLaunchHostFunc": SimDriverCollector._host_function,
    "cuStreamAddCallback": SimDriverCollector._host_function,
    "cuStreamBeginCapture": SimDriverCollector._capture_begin,
    "cuStreamBeginCaptureToGraph": SimDriverCollector._capture_begin,
    "cuGraphInstantiateWithFlags": SimDriverCollector._graph_instantiate,
    "cuGraphInstantiateWithParams": SimDriverCollector._graph_instantiate,
    "cuGraphExecUpdate": SimDriverCollector._graph_update,
    "cuGraphExecNodeSetParams": SimDriverCollector._graph_update,
    "cuGraphExecKernelNodeSetParams": SimDriverCollector._graph_update,
    "cuGraphExecMemcpyNodeSetParams": SimDriverCollector._graph_update,
    "cuGraphExecMemsetNodeSetParams": SimDriverCollector._graph_update,
    "cuGraphExecHostNodeSetParams": SimDriverCollector._graph_update,
    "cuGraphExecBatchMemOpNodeSetParams": SimDriverCollector._graph_update,
    "cuGraphExecChildGraphNodeSetParams": SimDriverCollector._graph_update,
    "cuGraphExecEventRecordNodeSetEvent": SimDriverCollector._graph_update,
    "cuGraphExecEventWaitNodeSetEvent": SimDriverCollector._graph_update,
    "cuGraphLaunch": SimDriverCollector._graph_launch,
    "cuLibraryLoadData": SimDriverCollector._module_load,
    "cuModuleLoadData": SimDriverCollector._module_load,
    "cuModuleLoadDataEx": SimDriverCollector._module_load,
}
_REPORT_ALIKE: Final[dict[str, Callable[[SimDriverCollector, dict[str, Any], str], None]]] = {
    # All other calls whose names begin so.
    "cuMemcpy": SimDriverCollector._copy,
    "cuMemset": SimDriverCollector._memset,
    "cuMemDiscard": SimDriverCollector._not_recorded,  # what is discarded has no value after it
    "cuGraphAdd": SimDriverCollector._graph_added,
}


@cache
def _report_of(name: str) -> Callable[[SimDriverCollector, dict[str, Any], str], None]:
    alike = (report for begin, report in _REPORT_ALIKE.items() if name.startswith(begin))
    return _REPORT.get(name) or next(alike, SimDriverCollector._other)


def _as_host_function(run: Callable[[Operation], None], correlation: int) -> Callable[[Operation], None]:
    """Wrap `run` so that what it does is attributed to its operation."""

    def called(operation: Operation) -> None:
        with hooks.host_function(correlation, operation.node):
            run(operation)

    return called


def _pointed(address: int) -> int:
    """Return the 64-bit word that a call stored through an output pointer."""
    return ctypes.c_uint64.from_address(address).value
