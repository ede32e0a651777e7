"""The calls of a GPU's driver that CUPTI is asked to log, and how each is read: one row, one call.

Names are those of CUPTI's callbacks, which have versions that cuda.h hides. The methods that rows name are in
:mod:`cudatool.collect.cupti_memory`, and with ``_`` before the name in :mod:`cudatool.collect.cupti_events`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cudatool.collect.copied_boxes import MEMCPY_2D, MEMCPY_3D
from cudatool.trace.events import CopyFlag, Kind, UseFlag

__all__ = [
    "CALLS",
    "CALLS_OF_CODE",
    "CALLS_OF_MEMORY",
    "DESCRIBED",
    "KERNEL_ERRORS",
    "PER_THREAD",
    "LoggedCall",
    "Order",
    "fill_item",
    "layout",
    "plain_name",
    "public_name",
    "sides",
]


class Order(NamedTuple):
    """A call that only orders work: the positions of the arguments that its event needs, -1 for none."""

    kind: Kind
    stream: int = -1
    event: int = -1
    flags: int = -1

    @property
    def asks(self) -> bool:
        """Whether the result is an answer: not yet."""
        return self.kind in (Kind.STREAM_QUERY, Kind.EVENT_QUERY)


class LoggedCall(NamedTuple):
    """How a call is recorded: its arguments as :file:`_cupti.c` spells them, what reads them, and what it may take."""

    arguments: str
    read: str | Order | None  # None: the call makes no event, but may take memory
    at_enter: bool = False
    with_library: bool = False
    with_stream_id: bool = False
    use: int = 0  # a UseFlag, or one of the two below
    launches: bool = False  # kernels: it makes no event, but may be called for an operation of our runtime

    @property
    def is_of_events(self) -> bool:
        """Whether it has to do with a CUDA event."""
        return self.read.event >= 0 if isinstance(self.read, Order) else self.read in ("event_create", "event_destroy")

    @property
    def enqueues(self) -> bool:
        """Whether the device has something to do then."""
        return self.launches or self.read in _WORK


_WORK = ("copy", "copy_box", "copy_peer", "fill", "fill_rows", "graph_launch")
_CAPTURE_BEGINS, _CAPTURE_ENDS = 256, 512
DESCRIBED = {"d": 24, "D": 40, "c": MEMCPY_2D.size, "C": MEMCPY_3D.size}
"""The bytes of the structures that are noted for these letters: ``CUDA_ARRAY_DESCRIPTOR``, ``CUDA_ARRAY3D_DESCRIPTOR``,
``CUDA_MEMCPY2D`` and ``CUDA_MEMCPY3D``."""


CALLS: dict[str, LoggedCall] = {
    "cuMemAlloc_v2": LoggedCall("Pq", "alloc", with_library=True),
    "cuMemAllocManaged": LoggedCall("Pq", "alloc", with_library=True),
    "cuMemAllocPitch_v2": LoggedCall("PPqqi", "alloc_pitch", with_library=True),
    "cuMemAllocAsync": LoggedCall("Pqq", "alloc_async", with_library=True, use=UseFlag.POOL),
    "cuMemAllocFromPoolAsync": LoggedCall("Pq.q", "alloc_from_pool", with_library=True, use=UseFlag.POOL),
    "cuMemFree_v2": LoggedCall("q", "free", at_enter=True),
    "cuMemFreeAsync": LoggedCall("qq", "free_async", at_enter=True, use=UseFlag.POOL),
    "cuMemMap": LoggedCall("qqqqq", "map", with_library=True),
    "cuMemUnmap": LoggedCall("qq", "unmap", at_enter=True),
    "cuArrayCreate_v2": LoggedCall("Pd", "array_create", with_library=True),
    "cuArray3DCreate_v2": LoggedCall("PD", "array_create", with_library=True),
    "cuMipmappedArrayCreate": LoggedCall("PDi", "array_create", with_library=True),
    "cuArrayDestroy": LoggedCall("q", "array_destroy", at_enter=True),
    "cuMipmappedArrayDestroy": LoggedCall("q", "array_destroy", at_enter=True),
    "cuMemAllocHost_v2": LoggedCall("Pq", "host_alloc", with_library=True),
    "cuMemHostAlloc": LoggedCall("Pq", "host_alloc", with_library=True),
    "cuMemHostRegister_v2": LoggedCall("qq", "host_alloc", with_library=True),
    "cuMemFreeHost": LoggedCall("q", "host_free", at_enter=True),
    "cuMemHostUnregister": LoggedCall("q", "host_free", at_enter=True),
    "cuIpcGetMemHandle": LoggedCall(".q", "give"),
    "cuIpcOpenMemHandle_v2": LoggedCall("P", "take"),
    "cuMemExportToShareableHandle": LoggedCall(".q", "give"),
    "cuMemImportFromShareableHandle": LoggedCall("P", "take"),
    "cuMemPoolExportPointer": LoggedCall(".q", "give"),
    "cuMemPoolImportPointer": LoggedCall("P", "take"),
    "cuStreamCreate": LoggedCall("Pi", "stream_create", with_stream_id=True, use=UseFlag.STREAM),
    "cuStreamCreateWithPriority": LoggedCall("Pii", "stream_create", with_stream_id=True, use=UseFlag.STREAM),
    "cuGreenCtxStreamCreate": LoggedCall("P.ii", "green_stream_create", with_stream_id=True, use=UseFlag.STREAM),
    "cuStreamDestroy_v2": LoggedCall("q", "stream_destroy", at_enter=True),
    "cuStreamSynchronize": LoggedCall("q", Order(Kind.STREAM_SYNCHRONIZE, stream=0)),
    "cuStreamQuery": LoggedCall("q", Order(Kind.STREAM_QUERY, stream=0)),
    "cuStreamWaitEvent": LoggedCall("qqi", Order(Kind.STREAM_WAIT_EVENT, stream=0, event=1, flags=2)),
    "cuStreamBeginCapture_v2": LoggedCall("qi", "capture_begin", use=_CAPTURE_BEGINS),
    "cuStreamEndCapture": LoggedCall("qP", "capture_end", use=_CAPTURE_ENDS),
    "cuStreamBeginCaptureToGraph": LoggedCall("q", "capture_to_graph", use=_CAPTURE_BEGINS),
    "cuEventCreate": LoggedCall("Pi", "event_create"),
    "cuEventRecord": LoggedCall("qq", Order(Kind.EVENT_RECORD, stream=1, event=0)),
    "cuEventRecordWithFlags": LoggedCall("qqi", Order(Kind.EVENT_RECORD, stream=1, event=0, flags=2)),
    "cuEventSynchronize": LoggedCall("q", Order(Kind.EVENT_SYNCHRONIZE, event=0)),
    "cuEventQuery": LoggedCall("q", Order(Kind.EVENT_QUERY, event=0)),
    "cuEventDestroy_v2": LoggedCall("q", "event_destroy", at_enter=True),
    "cuCtxSynchronize": LoggedCall("", Order(Kind.DEVICE_SYNCHRONIZE)),
    "cuCtxSynchronize_v2": LoggedCall("q", Order(Kind.DEVICE_SYNCHRONIZE)),
    "cuMemcpyHtoD_v2": LoggedCall("qqq", "copy"),
    "cuMemcpyDtoH_v2": LoggedCall("qqq", "copy"),
    "cuMemcpyDtoD_v2": LoggedCall("qqq", "copy"),
    "cuMemcpy": LoggedCall("qqq", "copy"),
    "cuMemcpyHtoDAsync_v2": LoggedCall("qqqq", "copy"),
    "cuMemcpyDtoHAsync_v2": LoggedCall("qqqq", "copy"),
    "cuMemcpyDtoDAsync_v2": LoggedCall("qqqq", "copy"),
    "cuMemcpyAsync": LoggedCall("qqqq", "copy"),
    "cuMemsetD8_v2": LoggedCall("qbq", "fill"),
    "cuMemsetD16_v2": LoggedCall("qhq", "fill"),
    "cuMemsetD32_v2": LoggedCall("qiq", "fill"),
    "cuMemsetD8Async": LoggedCall("qbqq", "fill"),
    "cuMemsetD16Async": LoggedCall("qhqq", "fill"),
    "cuMemsetD32Async": LoggedCall("qiqq", "fill"),
    **{name: LoggedCall("c", "copy_box") for name in ("cuMemcpy2D_v2", "cuMemcpy2DUnaligned_v2")},
    "cuMemcpy2DAsync_v2": LoggedCall("cq", "copy_box"),
    **{name: LoggedCall("C", "copy_box") for name in ("cuMemcpy3D_v2", "cuMemcpy3DPeer")},
    **{name: LoggedCall("Cq", "copy_box") for name in ("cuMemcpy3DAsync_v2", "cuMemcpy3DPeerAsync")},
    "cuMemcpyPeer": LoggedCall("qqqqq", "copy_peer"),
    "cuMemcpyPeerAsync": LoggedCall("qqqqqq", "copy_peer"),
    "cuMemsetD2D8_v2": LoggedCall("qqbqq", "fill_rows"),
    "cuMemsetD2D16_v2": LoggedCall("qqhqq", "fill_rows"),
    "cuMemsetD2D32_v2": LoggedCall("qqiqq", "fill_rows"),
    "cuMemsetD2D8Async": LoggedCall("qqbqqq", "fill_rows"),
    "cuMemsetD2D16Async": LoggedCall("qqhqqq", "fill_rows"),
    "cuMemsetD2D32Async": LoggedCall("qqiqqq", "fill_rows"),
    "cuGraphLaunch": LoggedCall("qq", "graph_launch"),
    **{
        name: LoggedCall(".", None, launches=True)
        for name in ("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel")
    },
    "cuDevicePrimaryCtxRetain": LoggedCall("Pi", None, use=UseFlag.CONTEXT),
    **{name: LoggedCall("i", "reset") for name in ("cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxReset_v2")},
    "cuCtxCreate_v2": LoggedCall("Pii", None, use=UseFlag.CONTEXT),
    "cuCtxCreate_v3": LoggedCall("Pqiii", None, use=UseFlag.CONTEXT),
    "cuCtxCreate_v4": LoggedCall("Pqii", None, use=UseFlag.CONTEXT),
    "cuCtxSetLimit": LoggedCall(".", None, use=UseFlag.HEAP),
    **{
        name: LoggedCall(".", None, use=UseFlag.MODULE)
        for name in (
            *("cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary", "cuLibraryLoadData"),
            "cuLibraryLoadFromFile",
        )
    },
    **{
        name: LoggedCall(".", None, use=UseFlag.GRAPH)
        for name in (
            *("cuGraphInstantiate_v2", "cuGraphInstantiateWithFlags", "cuGraphInstantiateWithParams", "cuGraphUpload"),
            *("cuGraphExecUpdate", "cuGraphExecUpdate_v2"),
        )
    },
}
CALLS_OF_MEMORY = {name: call for name, call in CALLS.items() if not call.is_of_events}
"""Those of the level ``memory``: where memory goes needs no events, and JAX makes six calls for them in each step."""

_NODES = ("", "BatchMemOp", "ChildGraph", "Empty", "EventRecord", "EventWait", "ExternalSemaphoresSignal",
          "ExternalSemaphoresWait", "Host", "Kernel", "MemAlloc", "MemFree", "Memcpy", "Memset")  # fmt: skip
_EVENTS = ("EventRecordNodeSetEvent", "EventWaitNodeSetEvent")
_CHANGES_OF_GRAPHS = {
    **{f"cuGraph{change}Dependencies": LoggedCall("q", "graph_changed") for change in ("Add", "Remove")},
    **{f"cuGraphAdd{kind}Node": LoggedCall(".q", "node_added") for kind in _NODES},
    **{f"cuGraph{kind}NodeSetParams": LoggedCall(".", "node_changed") for kind in _NODES},
    **{f"cuGraph{change}": LoggedCall(".", "node_changed") for change in ("DestroyNode", *_EVENTS)},
    **{f"cuGraphExec{kind}NodeSetParams": LoggedCall("q", "executable_changed") for kind in _NODES},
    **{f"cuGraphExec{change}": LoggedCall("q", "executable_changed") for change in _EVENTS},
    "cuGraphNodeSetEnabled": LoggedCall("q", "executable_changed"),
}
CALLS_OF_CODE: dict[str, LoggedCall] = {
    # How code is found that a launch runs; and what is not recorded as work with its accesses.
    **{name: LoggedCall("Ps", "code_file", use=UseFlag.MODULE) for name in ("cuModuleLoad", "cuLibraryLoadFromFile")},
    **{
        name: LoggedCall("Pm", "code", use=UseFlag.MODULE)
        for name in ("cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary", "cuLibraryLoadData")
    },
    **{name: LoggedCall("Pqs", "function") for name in ("cuModuleGetFunction", "cuLibraryGetKernel")},
    **{
        name: LoggedCall("Pn", "same_code", use=UseFlag.MODULE)
        for name in ("cuLibraryGetModule", "cuKernelGetFunction")
    },
    **{name: LoggedCall("q", "code_unloaded", at_enter=True) for name in ("cuModuleUnload", "cuLibraryUnload")},
    # Which graph is launched, and whether all that is in it was captured.
    **{
        f"cuGraphInstantiate{ending}": LoggedCall("Pq", "graph_instantiated", use=UseFlag.GRAPH)
        for ending in ("_v2", "WithFlags", "WithParams")
    },
    **{
        name: LoggedCall("qq", "executable_updated", use=UseFlag.GRAPH)
        for name in ("cuGraphExecUpdate", "cuGraphExecUpdate_v2")
    },
    "cuGraphCreate": LoggedCall("P", "graph_created"),
    "cuGraphClone": LoggedCall("Pq", "graph_cloned"),
    **{name + version: call for name, call in _CHANGES_OF_GRAPHS.items() for version in ("", "_v2")},
    **{
        name + version: LoggedCall(".", "unseen")
        for name in (
            *("cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync", "cuMemcpyWithAttributesAsync"),
            *("cuMemcpy3DWithAttributesAsync", "cuFabricCpyBatchAsync", "cuMemBatchDecompressAsync"),
            *("cuMemcpyDtoA", "cuMemcpyAtoD", "cuMemcpyHtoA", "cuMemcpyAtoH", "cuMemcpyAtoA"),
            *("cuMemcpyHtoAAsync", "cuMemcpyAtoHAsync", "cuStreamUpdateCaptureDependencies"),
            *("cuMemPrefetchAsync", "cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync"),
            *("cuMemDiscardAndPrefetchBatchAsync", "cuMemMapArrayAsync", "cuStreamAttachMemAsync"),
            *("cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync", "cuLaunchCooperativeKernelMultiDevice"),
            *("cuLaunchHostFunc", "cuStreamAddCallback", "cuStreamBatchMemOp", "cuStreamWaitValue32"),
            *("cuStreamWaitValue64", "cuStreamWriteValue32", "cuStreamWriteValue64"),
            *("cuSignalExternalSemaphoresAsync", "cuWaitExternalSemaphoresAsync", "cuGraphicsMapResources"),
            *("cuGraphicsUnmapResources", "cuCtxRecordEvent", "cuCtxWaitEvent"),
            *("cuGreenCtxRecordEvent", "cuGreenCtxWaitEvent"),
        )
        for version in ("", "_v2", "_v3")
    },
}
"""What :class:`~cudatool.collect.gpu_launches.Launches` needs, too."""

KERNEL_ERRORS = {
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    721: "CUDA_ERROR_TENSOR_MEMORY_LEAK",
}
"""Results that say that a kernel failed, after which no work of its context runs (the driver's reference, CUresult)."""

_VERSION = re.compile(r"_v\d+$")
PER_THREAD = ("_ptsz", "_ptds")
"""Ends of the names of calls in programs compiled for default streams of each thread."""


def plain_name(name: str) -> str:
    """Return a call's name without the suffix for per-thread default streams."""
    return name.removesuffix("_ptsz").removesuffix("_ptds")


def public_name(name: str) -> str:
    """Return a call's name as programs spell it."""
    return _VERSION.sub("", plain_name(name))


def sides(name: str) -> CopyFlag:
    """Return which sides of a copy are on a device, if the call's name says so."""
    source = CopyFlag.SOURCE_DEVICE if "DtoH" in name or "DtoD" in name else CopyFlag(0)
    return source | (CopyFlag.DESTINATION_DEVICE if "HtoD" in name or "DtoD" in name else CopyFlag(0))


def fill_item(name: str) -> int:
    """Return the bytes of the value that a fill repeats."""
    return int(name.removesuffix("_v2").removesuffix("Async").rpartition("D")[2]) // 8


def layout(call: LoggedCall) -> tuple[str, bool, bool, bool]:
    return call.arguments or ".", call.at_enter, call.with_library, call.with_stream_id
