"""The driver's result codes, with NVIDIA's numbers and names, and what each says in words."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["AddressSpaceError", "DriverError", "Result"]


class Result(IntEnum):
    """CUresult. The C name is :attr:`c_name`, the sentence that cuGetErrorString gives is :attr:`text`."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    DEINITIALIZED = 4
    PROFILER_DISABLED = 5
    PROFILER_NOT_INITIALIZED = 6
    PROFILER_ALREADY_STARTED = 7
    PROFILER_ALREADY_STOPPED = 8
    STUB_LIBRARY = 34
    CALL_REQUIRES_NEWER_DRIVER = 36
    DEVICE_UNAVAILABLE = 46
    MULTICAST_RESOURCE_FULL = 47
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    DEVICE_NOT_LICENSED = 102
    INVALID_IMAGE = 200
    INVALID_CONTEXT = 201
    CONTEXT_ALREADY_CURRENT = 202
    MAP_FAILED = 205
    UNMAP_FAILED = 206
    ARRAY_IS_MAPPED = 207
    ALREADY_MAPPED = 208
    NO_BINARY_FOR_GPU = 209
    ALREADY_ACQUIRED = 210
    NOT_MAPPED = 211
    NOT_MAPPED_AS_ARRAY = 212
    NOT_MAPPED_AS_POINTER = 213
    ECC_UNCORRECTABLE = 214
    UNSUPPORTED_LIMIT = 215
    CONTEXT_ALREADY_IN_USE = 216
    PEER_ACCESS_UNSUPPORTED = 217
    INVALID_PTX = 218
    INVALID_GRAPHICS_CONTEXT = 219
    NVLINK_UNCORRECTABLE = 220
    JIT_COMPILER_NOT_FOUND = 221
    UNSUPPORTED_PTX_VERSION = 222
    JIT_COMPILATION_DISABLED = 223
    UNSUPPORTED_EXEC_AFFINITY = 224
    UNSUPPORTED_DEVSIDE_SYNC = 225
    CONTAINED = 226
    INSUFFICIENT_LOADER_VERSION = 227
    INVALID_SOURCE = 300
    FILE_NOT_FOUND = 301
    SHARED_OBJECT_SYMBOL_NOT_FOUND = 302
    SHARED_OBJECT_INIT_FAILED = 303
    OPERATING_SYSTEM = 304
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    LOSSY_QUERY = 402
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_OUT_OF_RESOURCES = 701
    LAUNCH_TIMEOUT = 702
    LAUNCH_INCOMPATIBLE_TEXTURING = 703
    PEER_ACCESS_ALREADY_ENABLED = 704
    PEER_ACCESS_NOT_ENABLED = 705
    PRIMARY_CONTEXT_ACTIVE = 708
    CONTEXT_IS_DESTROYED = 709
    ASSERT = 710
    TOO_MANY_PEERS = 711
    HOST_MEMORY_ALREADY_REGISTERED = 712
    HOST_MEMORY_NOT_REGISTERED = 713
    HARDWARE_STACK_ERROR = 714
    ILLEGAL_INSTRUCTION = 715
    MISALIGNED_ADDRESS = 716
    INVALID_ADDRESS_SPACE = 717
    INVALID_PC = 718
    LAUNCH_FAILED = 719
    COOPERATIVE_LAUNCH_TOO_LARGE = 720
    TENSOR_MEMORY_LEAK = 721
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    SYSTEM_NOT_READY = 802
    SYSTEM_DRIVER_MISMATCH = 803
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
    MPS_CONNECTION_FAILED = 805
    MPS_RPC_FAILURE = 806
    MPS_SERVER_NOT_READY = 807
    MPS_MAX_CLIENTS_REACHED = 808
    MPS_MAX_CONNECTIONS_REACHED = 809
    MPS_CLIENT_TERMINATED = 810
    CDP_NOT_SUPPORTED = 811
    CDP_VERSION_MISMATCH = 812
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    STREAM_CAPTURE_MERGE = 902
    STREAM_CAPTURE_UNMATCHED = 903
    STREAM_CAPTURE_UNJOINED = 904
    STREAM_CAPTURE_ISOLATION = 905
    STREAM_CAPTURE_IMPLICIT = 906
    CAPTURED_EVENT = 907
    STREAM_CAPTURE_WRONG_THREAD = 908
    TIMEOUT = 909
    GRAPH_EXEC_UPDATE_FAILURE = 910
    EXTERNAL_DEVICE = 911
    INVALID_CLUSTER_SIZE = 912
    FUNCTION_NOT_LOADED = 913
    INVALID_RESOURCE_TYPE = 914
    INVALID_RESOURCE_CONFIGURATION = 915
    KEY_ROTATION = 916
    STREAM_DETACHED = 917
    GRAPH_RECAPTURE_FAILURE = 918
    FABRIC_NOT_READY = 919
    UNKNOWN = 999

    @property
    def c_name(self) -> str:
        """The name in cuda.h, for example ``"CUDA_ERROR_INVALID_VALUE"``."""
        return "CUDA_SUCCESS" if self == 0 else f"CUDA_ERROR_{self.name}"

    @property
    def text(self) -> str:
        """A sentence for people. Codes without one of their own are spelled out from their name."""
        return _TEXTS.get(self, self.name.lower().replace("_", " "))


_TEXTS = {
    Result.SUCCESS: "no error",
    Result.INVALID_VALUE: "invalid argument",
    Result.NOT_INITIALIZED: "initialization error",
    Result.DEINITIALIZED: "driver shutting down",
    Result.NO_DEVICE: "no CUDA-capable device is detected",
    Result.INVALID_DEVICE: "invalid device ordinal",
    Result.INVALID_IMAGE: "device kernel image is invalid",
    Result.INVALID_CONTEXT: "invalid device context",
    Result.NO_BINARY_FOR_GPU: "no kernel image is available for execution on the device",
    Result.INVALID_PTX: "a PTX JIT compilation failed",
    Result.INVALID_HANDLE: "invalid resource handle",
    Result.NOT_FOUND: "named symbol not found",
    Result.NOT_READY: "device not ready",
    Result.ILLEGAL_ADDRESS: "an illegal memory access was encountered",
    Result.LAUNCH_OUT_OF_RESOURCES: "too many resources requested for launch",
    Result.LAUNCH_TIMEOUT: "the launch timed out and was terminated",
    Result.CONTEXT_IS_DESTROYED: "context is destroyed",
    Result.ASSERT: "device-side assert triggered",
    Result.LAUNCH_FAILED: "unspecified launch failure",
    Result.STREAM_CAPTURE_UNSUPPORTED: "operation not permitted when stream is capturing",
    Result.STREAM_CAPTURE_INVALIDATED: "operation failed due to a previous error during capture",
    Result.STREAM_CAPTURE_MERGE: "operation would result in a merge of separate capture sequences",
    Result.STREAM_CAPTURE_UNMATCHED: "capture was not ended in the same stream as it began",
    Result.STREAM_CAPTURE_UNJOINED: "capturing stream has unjoined work",
    Result.STREAM_CAPTURE_ISOLATION: "dependency created on uncaptured work in another stream",
    Result.STREAM_CAPTURE_IMPLICIT: "operation would make the legacy stream depend on a capturing blocking stream",
    Result.CAPTURED_EVENT: "operation not permitted on an event last recorded in a capturing stream",
    Result.STREAM_CAPTURE_WRONG_THREAD: "attempt to terminate a thread-local capture sequence from another thread",
    Result.GRAPH_EXEC_UPDATE_FAILURE: "the graph update was not performed because it included changes which "
    "violated constraints specific to instantiated graph update",
    Result.NOT_PERMITTED: "operation not permitted",
    Result.NOT_SUPPORTED: "operation not supported",
    Result.UNKNOWN: "unknown error",
}


class DriverError(Exception):
    """A driver call fails with `result`; `message` is what the driver log would say, empty if no more than the result.

    `address` is that of the memory which it is about, 0 if it is about no memory.
    """

    def __init__(self, result: Result, message: str = "", *, address: int = 0) -> None:
        super().__init__(message or result.text)
        self.result = result
        self.message = message
        self.address = address
        self.logged = False


class AddressSpaceError(DriverError):
    """The process may not have as many addresses (``ulimit -v``) as the machine needs: `size` bytes more."""

    def __init__(self, size: int) -> None:
        super().__init__(Result.OUT_OF_MEMORY, f"cannot reserve {size} bytes of address space")
        self.size = size
