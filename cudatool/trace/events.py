"""The event schema: one fixed-size record, one row per kind.

Everything that can happen is an :class:`Event` on its way through the hooks and one 64-byte :data:`RECORD`
in a file or a column array. Names and stacks are interned; a record holds their index (0 = none).

Streams and CUDA events are named by ids that are unique in a trace, not by their handles, which the driver
reuses (:func:`cudatool.trace.hooks.stream_id`). Id 0 means "no stream"; the ``STREAM_CREATE`` record of an id
says what the stream is, also for the default streams, which no call creates.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum, IntFlag
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "ALLOCATIONS",
    "BY_SIZE",
    "ENDED_WITH_CONTEXT",
    "FAILED_REQUESTS",
    "FIELDS",
    "FREE_UNKNOWN",
    "LIVED",
    "OF_BACKWARD",
    "OF_MODULE",
    "RECORD",
    "SEGMENT_GAINS",
    "SHARED_COMMUNICATOR",
    "WORK",
    "AccessFlag",
    "Api",
    "CopyFlag",
    "Event",
    "EventFlag",
    "GeneratedFact",
    "GeneratedFlag",
    "GraphLaunchFlag",
    "HostFlag",
    "Kind",
    "LaunchFlag",
    "PlanFlag",
    "ProcessFlag",
    "StreamFlag",
    "TensorRole",
    "UseFlag",
    "WarningCode",
    "WarningFlag",
    "float_bits",
    "launch_flags",
    "pack_dims",
    "pack_pool",
    "pack_product",
    "join_records",
    "pack_record",
    "unpack_dims",
    "unpack_pool",
    "unpack_product",
]


class Kind(IntEnum):
    """What happened. Numbers are part of the file format: add, never renumber."""

    # The caching allocator: blocks are what it hands out, segments what it gets from the driver.
    BLOCK_ALLOC = 1
    BLOCK_FREE_REQUESTED = 2
    BLOCK_FREE_COMPLETED = 3
    BLOCK_RECORD_STREAM = 4
    SEGMENT_ALLOC = 5
    SEGMENT_FREE = 6
    SEGMENT_MAP = 7
    SEGMENT_UNMAP = 8
    OOM = 9
    # Memory that a program takes from the driver itself.
    MEM_ALLOC = 10
    MEM_FREE = 11
    HOST_ALLOC = 12
    HOST_FREE = 13
    # Virtual memory management: one piece of memory may have several addresses.
    MEM_MAP = 14
    MEM_UNMAP = 15
    PHYSICAL_ALLOC = 16
    PHYSICAL_FREE = 17
    # What a program asks of the caching allocator itself.
    MEMORY_FRACTION = 18
    # What the driver charges for all of it.
    DEVICE_USE = 19
    # Streams and events.
    STREAM_CREATE = 20
    STREAM_DESTROY = 21
    STREAM_WAIT_EVENT = 22
    STREAM_SYNCHRONIZE = 23
    STREAM_QUERY = 24
    EVENT_CREATE = 25
    EVENT_DESTROY = 26
    EVENT_RECORD = 27
    EVENT_SYNCHRONIZE = 28
    EVENT_QUERY = 29
    DEVICE_SYNCHRONIZE = 30
    STREAM_WRITE_VALUE = 31
    STREAM_WAIT_VALUE = 32
    STREAM_WAIT_UNKNOWN = 33
    # A library's own memory pool, inside of what it took from the driver.
    POOL_ALLOC = 34
    POOL_FREE = 35
    POOL_USE = 36
    POOL_HELD = 37
    # Work on a stream. `correlation` names the operation.
    KERNEL_LAUNCH = 40
    MEMCPY = 41
    MEMSET = 42
    GEMM = 43
    HOST_FUNCTION = 44
    GRAPH_CAPTURE_BEGIN = 45
    GRAPH_CAPTURE_END = 46
    GRAPH_LAUNCH = 47
    # What a graph consists of: reported when it is made, not at each launch.
    GRAPH_NODE_ADDED = 48
    GRAPH_INSTANTIATE = 49
    GRAPH_UPDATE = 50
    GRAPH_NODE = 51
    GRAPH_EDGE = 52
    GRAPH_POINTER = 53
    # Work of several devices together.
    COLLECTIVE = 54
    # Memory of a graph that was planned ahead.
    MEMORY_PLAN = 55
    PLANNED_BUFFER = 56
    FUSED_OPERATION = 57
    # Code that another compiler made for the program, PyTorch's: which of its statements allocate what.
    GENERATED_FILE = 58
    GENERATED_LINE = 59
    # What an operation touched, and when it ran.
    ACCESS = 60
    HOST_ACCESS = 61
    EXECUTION = 62
    # Host threads, and host functions, that tell each other something through objects of Python's.
    HAND_OVER = 63
    TAKE_OVER = 64
    GENERATED_FACT = 65
    # Everything else.
    RANGE_PUSH = 70
    RANGE_POP = 71
    MODULE_LOAD = 72
    WARNING = 73
    FINDING = 74
    CALL = 75
    MARK = 76
    RANGE_START = 77
    RANGE_END = 78
    CHILD_PROCESS = 79
    CHILD_RECORDED = 80
    LIBRARY_OOM = 81
    # What PyTorch's modules and optimizers hold.
    MODULE_TENSOR = 82


FAILED_REQUESTS: Final = (Kind.OOM, Kind.LIBRARY_OOM)
"""A request found no memory: of the caching allocator, or of another library."""

WORK: Final = (
    *(Kind.KERNEL_LAUNCH, Kind.MEMCPY, Kind.MEMSET, Kind.GEMM, Kind.HOST_FUNCTION, Kind.GRAPH_LAUNCH),
    Kind.COLLECTIVE,
)
"""Calls that enqueue work of the device."""

ALLOCATIONS: Final = (Kind.BLOCK_ALLOC, Kind.MEM_ALLOC, Kind.HOST_ALLOC)
"""Memory that the program got."""

SEGMENT_GAINS: Final = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)
"""What the caching allocator takes from the driver."""

BY_SIZE: Final[dict[Kind, int]] = {
    **dict.fromkeys((*SEGMENT_GAINS, Kind.MEM_ALLOC), 1),
    **dict.fromkeys((Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP, Kind.MEM_FREE), -1),
}
"""Calls that take device memory from the driver by size (1), and that give it back (-1)."""

OF_MODULE: Final = 8
"""Flag of BLOCK_ALLOC: its name is the path of a module of PyTorch."""

OF_BACKWARD: Final = 16
"""Flag of BLOCK_ALLOC: a node of PyTorch's backward graph allocates it."""

LIVED: Final = 4
"""Flag of MEM_ALLOC, HOST_ALLOC and POOL_ALLOC: the memory was there when the recording began."""

ENDED_WITH_CONTEXT: Final = 1
"""Flag of MEM_FREE: the program did not free the memory, which ended with the context that it was of."""

FIELDS: Final[dict[Kind, str]] = {
    # What the fields mean for each kind. Where a field is not named it is 0.
    Kind.BLOCK_ALLOC: "address, size=rounded block, aux0=requested bytes, aux1=pack_pool (0 default), stream, stack, "
    "flags=OF_MODULE: name=path of the module of PyTorch that allocates, as ResNet.layer1.0.conv1: the class of the "
    "outermost one, then attributes; +OF_BACKWARD, and then it is the module that made the node",
    Kind.BLOCK_FREE_REQUESTED: "address, size=rounded block, aux0=requested bytes, aux1=pool, stream, stack",
    Kind.BLOCK_FREE_COMPLETED: "address, size=rounded block, aux0=requested bytes, aux1=pool, stream",
    Kind.BLOCK_RECORD_STREAM: "address=block, size, stream=the other stream, stack",
    Kind.SEGMENT_ALLOC: "address, size, aux1=pool, stream, flags=1 small pool, stack",
    Kind.SEGMENT_FREE: "address, size, aux1=pool, stream, flags=1 small pool, stack",
    Kind.SEGMENT_MAP: "address, size, aux1=pool, stream, flags=1 small pool, stack",
    Kind.SEGMENT_UNMAP: "address, size, aux1=pool, stream, flags=1 small pool, stack",
    Kind.OOM: "size=rounded block, aux0=free bytes on the device, flags=1 not known, aux1=pool, stream, stack",
    Kind.LIBRARY_OOM: "size=bytes requested (0 not known), aux0=free bytes on the device, flags=1 not known, "
    "aux1=limit of the library's pool (0 none), name=trace.libraries.Library, stack",
    Kind.MEMORY_FRACTION: "size=bytes of the device, aux0=bits of a float64: the share that may be reserved, stack",
    Kind.DEVICE_USE: "memory use by NVML, after calls that may have changed it: size=bytes that the driver charges to "
    "this process (0 if it does not say), address=bytes of the device in use by all processes, aux0=bytes of the "
    "device, flags=UseFlag",
    Kind.MEM_ALLOC: "address, size, stream (0 for cuMemAlloc, which is not stream-ordered), name=API, "
    "flags=LIVED if it was there when the recording began, stack",
    Kind.MEM_FREE: "address, size, stream (0 for cuMemFree), name=API, flags=ENDED_WITH_CONTEXT if nothing freed it, "
    "stack",
    Kind.POOL_ALLOC: "a block of a library's own memory pool: address, size=rounded block, aux0=requested bytes, "
    "name=Library, flags=LIVED if it was there when the recording began, stack; the MEM_ALLOC that contains it is "
    "memory of the pool",
    Kind.POOL_FREE: "a block went back to the pool: address, size, name=Library, stack",
    Kind.POOL_USE: "what a library says of its pool: name=Library, size=bytes in use, aux0=most bytes in use so far, "
    "aux1=bytes that it may use at most (0 if it does not say)",
    Kind.POOL_HELD: "what a library says that one call site holds in its pool at one moment: name=Library, size=bytes, "
    "aux0=number of blocks, correlation=the same for all of the moment, stack",
    Kind.HOST_ALLOC: "address, size, flags=HostFlag: name=API, or aux0=rounded size of a block; +LIVED if it was there "
    "when the recording began; stack",
    Kind.HOST_FREE: "address, size, flags=HostFlag: name=API, or aux0=rounded size of a block; stack",
    Kind.MEM_MAP: "memory was mapped (cuMemMap): address, size, aux0=where it is mapped already (0 for nowhere), "
    "name=API, stack",
    Kind.MEM_UNMAP: "address, size, name=API, stack",
    Kind.PHYSICAL_ALLOC: "memory without an address (cuMemCreate): aux0=its handle, size, name=API, stack",
    Kind.PHYSICAL_FREE: "it has no handle and no mapping any more: aux0=the handle that it was created with, size, "
    "name=API, stack",
    Kind.STREAM_CREATE: "stream, flags=StreamFlag, address=handle, aux0=priority (two's complement), aux1=Api, "
    "size=number of its context (0: the device's primary one, or not known), stack",
    Kind.STREAM_DESTROY: "stream, stack",
    Kind.STREAM_WAIT_EVENT: "stream, aux0=event, flags=EventFlag, correlation, stack",
    Kind.STREAM_SYNCHRONIZE: "stream, aux1=when the call began (0: not known), stack",
    Kind.STREAM_QUERY: "stream, aux1=1 if all its work had completed, stack",
    Kind.EVENT_CREATE: "aux0=event, address=handle, flags=1 timing enabled, +2 other processes can record it, stack",
    Kind.EVENT_DESTROY: "aux0=event, stack",
    Kind.EVENT_RECORD: "stream, aux0=event, flags=EventFlag, correlation, stack",
    Kind.EVENT_SYNCHRONIZE: "aux0=event, aux1=when the call began (0: not known), stack",
    Kind.EVENT_QUERY: "aux0=event, aux1=1 if it had completed, stack",
    Kind.DEVICE_SYNCHRONIZE: "device, aux0=number of the context as of STREAM_CREATE, aux1=when the call began (0: not "
    "known), stack (cuCtxSynchronize and torch.cuda's synchronize)",
    Kind.STREAM_WRITE_VALUE: "stream, address, aux0=value, size=4 or 8, flags=CUstreamWriteValue_flags, "
    "correlation, stack",
    Kind.STREAM_WAIT_VALUE: "stream, address, aux0=value, size=4 or 8, flags=CUstreamWaitValue_flags, "
    "correlation, stack",
    Kind.STREAM_WAIT_UNKNOWN: "a stream waits for what no trace can show, as an external semaphore: stream, name=API, "
    "correlation, stack",
    Kind.KERNEL_LAUNCH: "stream, correlation, name=kernel, aux0=pack_dims(grid), aux1=pack_dims(block), "
    "size=shared bytes, flags=LaunchFlag, stack",
    Kind.MEMCPY: "stream, correlation, address=destination, size, aux0=source, flags=CopyFlag, name=API, stack; "
    "aux1=1 << ordinal of each device of a copy between devices",
    Kind.MEMSET: "stream, correlation, address, size, aux0=value, aux1=bytes per element, flags=CopyFlag, name=API, "
    "stack",
    Kind.GEMM: "stream, correlation, name=routine, address=C, size=bytes of C, aux0 and aux1=pack_product(m, n, k), "
    "stack",
    Kind.HOST_FUNCTION: "stream, correlation, name, stack",
    Kind.GRAPH_CAPTURE_BEGIN: "stream, stack",
    Kind.GRAPH_CAPTURE_END: "stream, aux0=graph (0 if the capture failed), aux1=pool of the caching allocator that has "
    "the graph's memory (0 if it is not known), stack",
    Kind.GRAPH_LAUNCH: "stream, correlation (of the executions of all its nodes too), aux0=executable graph, "
    "flags=GraphLaunchFlag, name=API, stack",
    Kind.GRAPH_NODE_ADDED: "a call added a node: aux0=graph, correlation (of our runtime's call too, else of nothing), "
    "flags=CUgraphNodeType, stream=the one it was captured in (0 if added by hand), name=kernel or what it is, stack",
    Kind.GRAPH_INSTANTIATE: "aux0=executable graph, aux1=graph it is made of, stack; "
    "its GRAPH_NODE, GRAPH_EDGE and GRAPH_POINTER records follow",
    Kind.GRAPH_UPDATE: "aux0=executable graph, stack; its GRAPH_NODE and GRAPH_POINTER records follow, the edges stay, "
    "or aux1=the graph whose nodes and edges it has now, if that is not 0",
    Kind.GRAPH_NODE: "aux0=executable graph, aux1=node (from 1 on, those of graphs inside too), flags=CUgraphNodeType "
    "(EMPTY while it is off: cuGraphNodeSetEnabled), "
    "correlation=of GRAPH_NODE_ADDED (0 if not seen), address=event of an event node, name; "
    "a node that contains graphs stands for their end",
    Kind.GRAPH_EDGE: "aux0=executable graph, address=the node that comes first, aux1=the node after it; "
    "edges lead into graphs inside; the nodes of a loop's body are in one line, as its rounds order them",
    Kind.GRAPH_POINTER: "an address among a node's parameters, which are fixed until an update: "
    "aux0=executable graph, aux1=node, address, size (0 if not known)",
    Kind.COLLECTIVE: "the part of one rank in an operation of several devices: stream, correlation, name=operation, "
    "address=buffer of its result (of what is sent, where it gets none), size=bytes there, aux0=communicator "
    "(from SHARED_COMMUNICATOR on the same number in all processes), "
    "aux1=pack_dims(rank, number of ranks), flags=1 if it is in one group with the thread's record before it, stack",
    Kind.MEMORY_PLAN: "memory of a graph was planned: name=the function that was compiled, address, size=planned, "
    "aux0=bytes up to the end of the highest buffer in use when the graph was made, aux1=nodes of the graph, "
    "correlation=number of the plan, stack; its PLANNED_BUFFER and FUSED_OPERATION records follow",
    Kind.PLANNED_BUFFER: "correlation=number of the plan, address, size, aux0=the first node after its allocation, "
    "aux1=the first node after it was freed, flags=PlanFlag, name=operation of that first node, stack",
    Kind.FUSED_OPERATION: "correlation=number of the plan, aux0=the node, a kernel that computes several operations, "
    "aux1=0: name=the kernel; else which of its operations this is, counted from 1: name=the operation; stack",
    Kind.GENERATED_FILE: "PyTorch's compiler made or loaded a file of code: name=its path, correlation=number of the "
    "file, flags=GeneratedFlag; its GENERATED_LINE and GENERATED_FACT records follow",
    Kind.GENERATED_LINE: "a statement of a generated file that may allocate: correlation=number of the file, aux0=its "
    "first line, aux1=its last line, name=the buffer (empty: temporary memory of a kernel), "
    "stack=the lines of the program that it was made from",
    Kind.GENERATED_FACT: "about the GENERATED_LINE that begins at line aux0 of file number correlation: "
    "flags=GeneratedFact, name=the node, module or buffer",
    Kind.MODULE_TENSOR: "a tensor that a module of PyTorch or an optimizer holds, reported after it was made: "
    "address and size=of its storage, flags=TensorRole, name=path of the parameter or buffer: that of the module as of "
    "BLOCK_ALLOC, and its own name",
    Kind.ACCESS: "correlation=the operation, address, size, flags=AccessFlag, name=argument or source line, "
    "stream=the node of a graph launch whose GRAPH_NODE records are there (else it says nothing); "
    "a strided set has aux0=distance between rows, aux1=number of rows, and size=bytes per row; "
    "for a mask see AccessFlag",
    Kind.HOST_ACCESS: "address, size, flags=AccessFlag, aux0 and aux1 as of ACCESS, "
    "correlation=the host function that does it (0 for none), stream=the node of a graph launch that calls this "
    "function, stack",
    Kind.HAND_OVER: "aux0=object, correlation and stream as of HOST_ACCESS: the thread that takes it "
    "over knows that what came before is done",
    Kind.TAKE_OVER: "aux0=object, correlation and stream as of HOST_ACCESS: what was handed over with it so far came "
    "before",
    Kind.EXECUTION: "correlation, stream, device, name, aux0=start, aux1=end, both ns on the device's clock, "
    "flags=1 a kernel that a graph launch ran, address=the node of a graph launch (0 outside of one)",
    Kind.RANGE_PUSH: "name",
    Kind.RANGE_POP: "",
    Kind.MARK: "name: a moment that the program names",
    Kind.RANGE_START: "name, aux0=range: one that need not be inside of others, and that any thread may end",
    Kind.RANGE_END: "aux0=range",
    Kind.CHILD_PROCESS: "the program started a process: name=its program, aux0=its id (0 if not known), "
    "flags=ProcessFlag, aux1=the process that started it, if that is another than the recorded one, stack",
    Kind.CHILD_RECORDED: "at the end of the recording, a process that it watched, too: aux0=its id, "
    "name=the file of its trace, which lies beside this one (empty if it did not use a device), flags=ProcessFlag, "
    "aux1=its exit status, negative (two's complement) the signal that ended it; 0 if it succeeded or nothing waited",
    Kind.MODULE_LOAD: "name, size=bytes of the image, stack",
    Kind.WARNING: "name=the text, flags=WarningFlag, aux0=WarningCode; of SHARED name=the call, address (0 for none), "
    "size, stack",
    Kind.CALL: "a public function of cudatool has ended: name, aux0=ns it took, aux1=how many others it was called by, "
    "stack",
    Kind.FINDING: "what a checker of the device found: correlation=the operation, else stack=the call; stream, "
    "address, size, aux0=how often, name=JSON of the rest (cudatool.sim.observe.checkers.CheckFinding)",
}


class Api(IntEnum):
    """Through which library a program made a stream, or first used one that it did not make: `aux1` of
    ``STREAM_CREATE``. Advice is given in its words.
    """

    UNKNOWN = 0
    CUDATOOL = 1
    CUDA_CORE = 2
    CUDA_BINDINGS = 3
    NUMBA = 4
    TORCH = 5


SHARED_COMMUNICATOR: Final = 1 << 52
"""``COLLECTIVE`` only: from this number on, a communicator has the same one in all processes; below, each process
counts its own. Two times it is 2**53, up to which JSON has whole numbers exactly.
"""

FREE_UNKNOWN: Final = 1
"""Flag of ``OOM`` and ``LIBRARY_OOM``: the recording does not say how much the device had free."""


class HostFlag(IntFlag):
    """Flags of ``HOST_ALLOC`` and ``HOST_FREE``, beside LIVED, which only the former has."""

    BLOCK = 1
    """A block that a caching allocator hands out, in memory that it has from the driver."""
    REPORTS_USES = 2
    """The allocator tells by ``BLOCK_RECORD_STREAM`` which streams it will wait for."""


class StreamFlag(IntFlag):
    """Flags of ``STREAM_CREATE``: how the stream is ordered against the legacy default stream."""

    NON_BLOCKING = 1
    LEGACY_DEFAULT = 2
    PER_THREAD_DEFAULT = 4


class WarningFlag(IntFlag):
    """Flags of ``WARNING``: what it means for the trace. Without any it limits nothing."""

    LOST = 1
    """Events are missing: something stopped or interrupted a recorder."""
    UNSEEN = 2
    """The program did something on the device that no event tells, or not all of it."""
    RACES = 4
    """Racecheck looked at a part of a launch only: correlation=the launch."""
    SHARED = 8
    """Other processes can use this memory, which may be theirs: what they do with it is not recorded."""
    IN_STEP = 16
    """A launch has volatile accesses of lanes of a warp that nothing orders: correlation=the launch."""


class WarningCode(IntEnum):
    """What a ``WARNING`` is about. Its text is for people; programs read the code, and reports name it as `label`."""

    NOT_SAID = 0
    """An older recorder, which wrote the text alone, or a newer one, whose code is not known."""
    CALL_FAILED = 1
    CALL_NOT_RECORDED = 2
    """A driver call whose work no event describes."""
    NODES_NOT_RECORDED = 3
    """Graph nodes whose accesses no event describes."""
    WORK_AFTER_ERROR = 4
    """Work that did not run, because the device had failed before."""
    ACCESSES_NOT_KNOWN = 5
    """A kernel may access more than its arguments show."""
    PYTORCH_NOT_WATCHED = 6
    PYTORCH_BLOCKS_NOT_WATCHED = 7
    """Only the segments of PyTorch's allocator are recorded."""
    PYTORCH_BACKWARD_LINES = 8
    """Memory of the backward pass has no line of the forward pass."""
    SUBSCRIBER_FAILED = 9
    RECORDING_INTERRUPTED = 10
    CUPTI_RECORDS_LOST = 11
    RACECHECK_PARTIAL = 12
    HELD_BEFORE = 13
    """In a trace's header: memory that was in use when the recording began, and of which no more is known."""
    LIBRARY_NOT_WATCHED = 14
    """In a trace's header: a library whose calls are not recorded on a GPU."""
    POOL_NOT_WATCHED = 15
    """A library's own memory pool is known by what it took from the driver alone."""
    RANGES_NOT_RECORDED = 16
    """Ranges that a library gives to NVTX, which found no tool there before the recording began; or those of a child
    process, of which there were too many before it used a device."""
    IN_FLIGHT_BEFORE = 17
    """In a trace's header: operations that had yet to complete when the recording began."""
    DEVICE_RESET = 18
    """The program reset a device, which gave back all memory of its context without an event for each."""
    WARP_IN_STEP = 19
    """A kernel may rely on warps whose lanes run in step."""

    @property
    def label(self) -> str:
        """The code in reports: ``call-not-recorded``."""
        return self.name.lower().replace("_", "-")


class ProcessFlag(IntFlag):
    """Flags of ``CHILD_PROCESS`` and ``CHILD_RECORDED``."""

    REPLACED = 1
    """``CHILD_PROCESS``: the program took the place of the process (exec)."""
    RUNNING = 2
    """``CHILD_RECORDED``: the process was running when the recording ended."""
    UNRECORDED = 4
    """``CHILD_RECORDED``: it may have used a device, and is not recorded. The name says why."""


class UseFlag(IntFlag):
    """Flags of ``DEVICE_USE``: what may have taken device memory implicitly since the previous one."""

    CONTEXT = 1
    """A context was made."""
    MODULE = 2
    """Modules were loaded: their code and variables, buffers of ``printf``, the heap of ``malloc`` in kernels."""
    GRAPH = 4
    """Graphs were instantiated or changed."""
    STREAM = 8
    KERNEL = 16
    """A kernel needed more local memory for each thread than those before."""
    HEAP = 32
    """A limit of the context was set: heap, stack, buffer of ``printf``."""
    POOL = 64
    """Memory was taken from a pool of the driver's, or given back to one (cuMemAllocAsync): the pool keeps more."""


class PlanFlag(IntFlag):
    """Flags of ``PLANNED_BUFFER``."""

    KEPT = 1
    """It outlives the function: a result, or what the function stores."""
    ALONE = 2
    """No other buffer may have its place, since another stream uses it."""


class GeneratedFlag(IntFlag):
    """Flags of ``GENERATED_FILE``: how its lines are known."""

    NO_GRAPH = 1
    """Not from the compiler's graph, which only the process that compiles has, but from the file and what PyTorch keeps
    beside it: it was loaded from PyTorch's cache, or compiled before the recording began."""
    UNREADABLE = 2
    """It could not be analyzed: no lines follow."""
    BACKWARD = 4
    """It is the backward pass of what was compiled."""


class GeneratedFact(IntEnum):
    """Flags of ``GENERATED_FACT``: what its name is."""

    NODE = 1
    """A node of the graph that the buffer was made from; in the order of the graph, the one that makes it last."""
    MODULE = 2
    """The path of the module, as ``layers.3.self_attn.q_proj``."""
    REUSED_BY = 3
    """A later buffer that takes over the memory."""


class TensorRole(IntEnum):
    """Flags of ``MODULE_TENSOR``: what the tensor is to the module."""

    PARAMETER = 1
    BUFFER = 2
    OPTIMIZER_STATE = 3
    """Of the parameter that the name says."""


class EventFlag(IntFlag):
    """Flags of ``EVENT_RECORD`` and ``STREAM_WAIT_EVENT``."""

    EXTERNAL = 1
    """In a stream that is captured: a node of the graph, which each launch does again, and no edge of it."""


class CopyFlag(IntFlag):
    """Flags of ``MEMCPY`` and ``MEMSET``: the kinds of memory, and whether the call was an asynchronous one."""

    SOURCE_DEVICE = 1
    DESTINATION_DEVICE = 2
    SOURCE_PAGEABLE = 4
    DESTINATION_PAGEABLE = 8
    ASYNC = 16
    BATCHED = 32
    """A copy of the same batch as the copy before it, with which it comes in no order (``cuMemcpyBatchAsync``)."""


class LaunchFlag(IntFlag):
    """Flags of ``KERNEL_LAUNCH``: what a kernel does about the order of work.

    The first three are of programmatic dependent launch (CUDA Programming Guide, section of that name).
    """

    PROGRAMMATIC = 1
    """Launched with the attribute programmaticStreamSerialization: it may begin before the kernel before it ends."""
    WAITS = 2
    """The kernel waits for the end of that one (``griddepcontrol.wait``)."""
    TRIGGERS = 4
    """The kernel lets such a kernel after it begin early (``griddepcontrol.launch_dependents``)."""
    SYSTEM_SCOPE = 8
    """The kernel has volatile accesses, or others of system scope, outside of shared memory: it and the host, or
    another such kernel, may order each other by flags in memory (PTX ISA, Memory Consistency Model, Scope)."""
    CAPTURED = 16
    """It became a node of a graph, though no record may say that its stream is captured."""


class GraphLaunchFlag(IntFlag):
    """Flags of ``GRAPH_LAUNCH``."""

    BESIDE_NODES = 1
    """What it touches is in ``ACCESS`` records, but for captured calls that have records of their own; if there are
    none, it is not known."""


@cache  # a sum of flags takes longer than the rest of an event
def launch_flags(programmatic: bool, waits: bool, triggers: bool, system_scope: bool) -> LaunchFlag:
    """Return the flags of a launch."""
    flags = LaunchFlag.PROGRAMMATIC if programmatic else LaunchFlag(0)
    flags |= (LaunchFlag.WAITS if waits else 0) | (LaunchFlag.TRIGGERS if triggers else 0)
    return flags | (LaunchFlag.SYSTEM_SCOPE if system_scope else 0)


class AccessFlag(IntFlag):
    """Flags of ``ACCESS`` and ``HOST_ACCESS``."""

    READ = 1
    WRITE = 2
    ATOMIC = 4
    """A read-modify-write that does not race with another atomic."""
    INEXACT = 8
    """A conservative range: the operation may touch less."""
    MASK = 16
    """``ACCESS`` only: those of 128 elements of `size` bytes whose bits are set, the first 64 in aux0, then aux1."""
    NOTICED = 32
    """``HOST_ACCESS`` only: found by comparing bytes. It happened before the call whose stack this is, and after the
    host's call before."""


class Event(NamedTuple):
    """One event as subscribers receive it; the same facts as a :data:`RECORD`, with the name spelled out."""

    time: int  # ns, CLOCK_MONOTONIC
    kind: Kind
    device: int  # ordinal, -1 = none
    flags: int
    thread: int  # hooks.thread_id(): unlike threading.get_ident(), never reused
    stream: int
    correlation: int
    stack: int  # index into the process-wide stack table, 0 = none
    name: str
    address: int
    size: int
    aux0: int
    aux1: int


RECORD: Final = np.dtype(
    [
        ("time", "<i8"),
        ("kind", "u1"),
        ("device", "i1"),
        ("flags", "<u2"),
        ("thread", "<u2"),  # index into the trace's thread table
        ("reserved", "<u2"),
        ("stream", "<u4"),
        ("correlation", "<u4"),
        ("stack", "<u4"),
        ("name", "<u4"),
        ("address", "<u8"),
        ("size", "<u8"),
        ("aux0", "<u8"),
        ("aux1", "<u8"),
    ]
)
_PACKED: Final = struct.Struct("<qBbHHHIIIIQQQQ")
assert RECORD.itemsize == _PACKED.size == 64


def join_records(parts: Iterable[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """Return arrays of one structured dtype, such as :data:`RECORD`, one after the other.

    As ``np.concatenate`` does, which copies field by field and takes ten times as long.
    """
    parts = list(parts)
    return np.concatenate([np.ascontiguousarray(part).view(f"V{part.itemsize}") for part in parts]).view(parts[0].dtype)


def pack_record(*words: int) -> bytes:
    """Return a record's bytes. A word that is too wide for its field is better cut than lost."""
    try:
        return _PACKED.pack(*words)
    except struct.error:
        cut = []
        for word, code in zip(words, _PACKED.format[1:], strict=True):
            bits = struct.calcsize(f"<{code}") * 8
            word &= (1 << bits) - 1
            cut.append(word - (1 << bits) if code.islower() and word >> (bits - 1) else word)
        return _PACKED.pack(*cut)


def pack_dims(x: int, y: int = 1, z: int = 1) -> int:
    """Pack three extents into one word: 32 bits for `x`, 16 each for `y` and `z` (CUDA's own limits fit)."""
    return x & 0xFFFFFFFF | (y & 0xFFFF) << 32 | (z & 0xFFFF) << 48


def unpack_dims(word: int) -> tuple[int, int, int]:
    """Return the three extents that :func:`pack_dims` packed."""
    return word & 0xFFFFFFFF, word >> 32 & 0xFFFF, word >> 48 & 0xFFFF


def float_bits(value: float) -> int:
    """Return the bits of a float64 as one word."""
    bits: int = np.float64(value).view(np.uint64).item()
    return bits


def pack_pool(pool: tuple[int, int]) -> int:
    """Pack the two parts of a memory pool's id into one word."""
    return pool[0] & 0xFFFFFFFF | (pool[1] & 0xFFFFFFFF) << 32


def unpack_pool(word: int) -> tuple[int, int]:
    """Return the id that :func:`pack_pool` packed."""
    return word & 0xFFFFFFFF, word >> 32 & 0xFFFFFFFF


def pack_product(m: int, n: int, k: int) -> tuple[int, int]:
    """Pack the extents of a product of matrices into two words: 32 bits each for `m` and `n`, and one word for `k`."""
    return m & 0xFFFFFFFF | (n & 0xFFFFFFFF) << 32, k


def unpack_product(first: int, second: int) -> tuple[int, int, int]:
    """Return the three extents that :func:`pack_product` packed."""
    return first & 0xFFFFFFFF, first >> 32, second
