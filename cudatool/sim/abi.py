"""From a Python function to a C entry point, and back.

An entry point is declared by its C prototype, as NVIDIA's reference prints it::

    @entry("cuMemAlloc(CUdeviceptr *dptr, size_t bytesize)")
    def cuMemAlloc(dptr: int, bytesize: int) -> None: ...

Every argument arrives as an int (pointers as addresses, NULL as 0; floats as float). A handler returns None for
success or raises :class:`~cudatool.sim.results.DriverError`; whatever else escapes becomes CUDA_ERROR_UNKNOWN and is
logged, because an exception must never cross into C.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from cudatool.sim import _calls
from cudatool.sim.driver_log import DriverLog
from cudatool.sim.results import DriverError, Result
from cudatool.sim.signals import Interrupted

if TYPE_CHECKING:
    from logging import Logger

__all__ = [
    "ENTRIES",
    "EntryPoint",
    "GivenBack",
    "Handler",
    "IpcHandleStruct",
    "Subscriber",
    "after_call",
    "call",
    "driver_log",
    "entry",
    "function_pointer",
    "gives_back",
    "guard",
    "invoke",
    "lock",
    "log_message",
    "logger",
    "read_name",
    "read_string",
    "subscribe",
    "subscribers",
    "unlocked",
    "unsubscribe",
    "write",
]

driver_log: Final = DriverLog()
"""What was said with :func:`log_message`, for programs that ask."""

Handler = Callable[..., None]
GivenBack = Literal["allocation", "mapping", "physical", "context"]
"""Kinds of what a call gives back: an Allocation; a mapping (address, size); a Physical; what a context has, a list of
Allocations."""


class IpcHandleStruct(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle, the structures of several words that entry points take by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


# C types by the words of a parameter declaration. Anything with a star, and every handle, is an address.
_SCALARS: Final[dict[str, Any]] = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "unsigned short": ctypes.c_ushort,
    "unsigned char": ctypes.c_ubyte,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "unsigned long long": ctypes.c_uint64,
    "cuuint32_t": ctypes.c_uint32,
    "cuuint64_t": ctypes.c_uint64,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
    # enumerations
    "CUdevice_attribute": ctypes.c_int,
    "CUdevResourceType": ctypes.c_int,
    "CUfunc_cache": ctypes.c_int,
    "CUfunction_attribute": ctypes.c_int,
    "CUtexObject": ctypes.c_uint64,
    "CUsurfObject": ctypes.c_uint64,
    "CUgraphConditionalHandle": ctypes.c_uint64,
    "CUgraphMem_attribute": ctypes.c_int,
    "CUipcEventHandle": IpcHandleStruct,
    "CUipcMemHandle": IpcHandleStruct,
    "CUjitInputType": ctypes.c_int,
    "CUkernelNodeAttrID": ctypes.c_int,
    "CUlimit": ctypes.c_int,
    "CUmem_advise": ctypes.c_int,
    "CUmem_range_attribute": ctypes.c_int,
    "CUmemAllocationGranularity_flags": ctypes.c_int,
    "CUmemAllocationHandleType": ctypes.c_int,
    "CUmemAllocationType": ctypes.c_int,
    "CUmemGenericAllocationHandle": ctypes.c_uint64,
    "CUmemLocation": ctypes.c_uint64,  # type and id, which by value are one machine word
    "CUmemPool_attribute": ctypes.c_int,
    "CUpointer_attribute": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "CUdevice_P2PAttribute": ctypes.c_int,
    "CUexecAffinityType": ctypes.c_int,
    "CUstreamAttrID": ctypes.c_int,
    "CUstreamCaptureMode": ctypes.c_int,
}
_HANDLES: Final = frozenset(
    [
        "CUarray",
        "CUcontext",
        "CUdevResourceDesc",
        "CUevent",
        "CUfunction",
        "CUgraph",
        "CUgraphExec",
        "CUgraphNode",
        "CUgreenCtx",
        "CUhostFn",
        "CUkernel",
        "CUlibrary",
        "CUlinkState",
        "CUlogsCallback",
        "CUlogsCallbackHandle",
        "CUmemoryPool",
        "CUmipmappedArray",
        "CUmodule",
        "CUoccupancyB2DSize",
        "CUstream",
        "CUstreamCallback",
        "CUuserObject",
    ]
)


class EntryPoint:
    """One driver entry point: its name, its C parameters, and the handler."""

    __slots__ = ("_declared", "handler", "name", "prototype")

    def __init__(self, prototype: str, handler: Handler) -> None:
        self.prototype = prototype
        self.name, _, _ = prototype.partition("(")
        self.handler = handler
        self._declared: tuple[tuple[str, ...], tuple[Any, ...]] | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return self._parsed()[0]

    @property
    def types(self) -> tuple[Any, ...]:
        """Their types in C."""
        return self._parsed()[1]

    def _parsed(self) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return names and types, which are read off the prototype when they are first asked for."""
        if self._declared is None:
            match = re.fullmatch(r"\w+\((.*)\)", self.prototype, re.DOTALL)
            assert match, self.prototype
            declared = [_declared(one) for part in match[1].split(",") if (one := part.strip())]
            self._declared = tuple(name for name, _ in declared), tuple(kind for _, kind in declared)
        return self._declared


@cache
def _declared(parameter: str) -> tuple[str, Any]:
    """Return the name and the type of a parameter that is declared so; many entry points have the same ones."""
    words = re.fullmatch(r"(?:const )?(.*?)\s*(\**)(\w+)(\[\])?", parameter)
    assert words, parameter
    base, stars, name, array = words.groups()
    pointer = stars or array or "*" in base or base in _HANDLES
    assert pointer or base in _SCALARS, f"no row of _SCALARS or _HANDLES for {parameter}"
    return name, ctypes.c_size_t if pointer else _SCALARS[base]


ENTRIES: Final[dict[str, EntryPoint]] = {}
"""Every entry point that the software driver has, by the name that cuGetProcAddress is asked for."""


def entry(prototype: str) -> Callable[[Handler], Handler]:
    """Register the decorated handler as the driver entry point with this C prototype."""

    def register(handler: Handler) -> Handler:
        new = EntryPoint(prototype, handler)
        assert new.name == handler.__name__ and new.name not in ENTRIES, prototype
        ENTRIES[new.name] = new
        return handler

    return register


# ---- callbacks: who watches the driver, as CUPTI's callback API does on a GPU --------------------------------------


class Subscriber(Protocol):
    """What a driver-level observer implements. Calls come on the thread that made the driver call.

    The driver's lock is held during :meth:`enqueued` and :meth:`executed`, which must not wait for anything.
    """

    def enter(self, entry: EntryPoint, arguments: tuple[Any, ...], correlation: int) -> None:
        """A driver call begins; work it enqueues will carry `correlation`."""

    def leave(self, entry: EntryPoint, arguments: tuple[Any, ...], correlation: int, result: Result) -> None:
        """The call is about to return `result`."""

    def gives_back(
        self, entry: EntryPoint, arguments: tuple[Any, ...], correlation: int, what: tuple[GivenBack, Any]
    ) -> None:
        """The call is about to give something back, and nothing can keep it from that.

        Until this returns, no other call can get it. The driver's lock is not held, unless by a call around this one.
        """

    def enqueued(self, operation: Any) -> None:
        """The call in progress put a :class:`cudatool.sim.queue.Operation` into its stream."""

    def executed(self, operation: Any) -> None:
        """An operation has run. May come during any call that waits."""

    def unlocked(self) -> None:
        """A thread that has executed operations outside of any call does not hold the driver's lock any more."""


subscribers: tuple[Subscriber, ...] = ()


def subscribe(subscriber: Subscriber) -> None:
    """Report every driver call and every finished operation to `subscriber`."""
    global subscribers
    if subscriber not in subscribers:
        subscribers = (*subscribers, subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Stop reporting to `subscriber`."""
    global subscribers
    subscribers = tuple(s for s in subscribers if s is not subscriber)


call: Final = _calls.call
"""The driver call in progress on this thread."""
_rlock = threading.RLock()
lock: Final = threading.Condition(_rlock)
"""Guards all state of the driver. Held by every entry point, released while an operation runs."""

# A garbage collection can start inside a handler and destroy handles, which calls the driver again on the same
# thread, in the middle of a change of its state. Such calls return at once and are carried out when the outer one ends.
_DEFERRABLE: Final = frozenset(
    [
        "cuArrayDestroy",
        "cuDevicePrimaryCtxRelease",
        "cuEventDestroy",
        "cuGraphDestroy",
        "cuGraphExecDestroy",
        "cuGreenCtxDestroy",
        "cuIpcCloseMemHandle",
        "cuLibraryUnload",
        "cuLinkDestroy",
        "cuMemFree",
        "cuMemFreeAsync",
        "cuMemFreeHost",
        "cuMemPoolDestroy",
        "cuMipmappedArrayDestroy",
        "cuModuleUnload",
        "cuStreamDestroy",
        "cuSurfObjectDestroy",
        "cuTexObjectDestroy",
        "cuUserObjectRelease",
    ]
)
_deferred: list[tuple[EntryPoint, tuple[Any, ...], int]] = []
_callbacks: list[Callable[[], None]] = []
guard: Callable[[EntryPoint, tuple[Any, ...]], None] | None = None
"""Carries out a call in place of its handler, while there is something that changes what calls do (stream capture)."""


_RESULTS: Final = {int(result): result for result in Result}


def _refused(entry: EntryPoint, error: DriverError) -> int:
    """Note why a call fails, and return the result that it returns."""
    result = error.result
    if error.message:
        text = str(error).encode(errors="backslashreplace").decode()  # names in it may be no UTF-8 (read_name)
        call.message, call.address = text, error.address
        if not error.logged:
            log_message(f"{entry.name}: {result.c_name}: {text}")
    return int(result)


def _crashed(
    entry: EntryPoint,
    error: BaseException,
    # Bound here, because module globals may be gone when handles are destroyed at interpreter shutdown.
    interrupted: type[BaseException] = Interrupted,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
    in_progress: Any = call,
    unknown: int = int(Result.UNKNOWN),
    gone: int = int(Result.DEINITIALIZED),
) -> int:
    """Return what a call returns whose handler has failed."""
    if isinstance(error, interrupted):
        return 0  # the caller gets its KeyboardInterrupt, and no other error, as soon as it is back in Python
    if is_finalizing():
        return gone  # with the driver's own modules
    logger().error("%s failed inside the software driver", entry.name, exc_info=error)
    in_progress.message = f"{entry.name} failed inside the software driver: {error!r}"
    return unknown


def _finish() -> None:
    """Carry out what was put off until the call is over."""
    while _deferred and not call.depth:
        invoke(*_deferred.pop(0))
    while _callbacks and not call.depth:
        _callbacks.pop(0)()


def invoke(entry: EntryPoint, arguments: tuple[Any, ...], null_stream: int) -> int:
    """Make a driver call, and return its CUresult. A failure of the software driver itself is raised."""
    return _calls.invoke(entry, entry.name in _DEFERRABLE, arguments, null_stream)


_calls.install(
    names=globals(),
    acquire=_rlock.acquire,
    release=_rlock.release,
    refusal=DriverError,
    refused=_refused,
    crashed=_crashed,
    results=_RESULTS,
    finish=_finish,
    deferred=_deferred,
    callbacks=_callbacks,
)


def unlocked() -> None:
    """Notify the subscribers that this thread has executed operations outside of any call, and given the lock back."""
    for subscriber in subscribers:
        subscriber.unlocked()


def gives_back(kind: GivenBack, what: Any) -> None:
    """Notify the subscribers of what the call in progress is about to give back.

    It gives the driver's lock back for that long: `what` must be such by now that no other call can get it or end it.
    """
    _calls.notify("gives_back", (kind, what))


def after_call(callback: Callable[[], None]) -> None:
    """Call a function of the program when the driver call in progress is over, without any lock held."""
    _callbacks.append(callback)


def logger() -> Logger:
    """Return where the device says what goes wrong: the logger ``cudatool.sim``."""
    from logging import getLogger  # takes a while to load, and most programs make no mistakes

    return getLogger("cudatool.sim")


def log_message(text: str) -> None:
    """Say `text` where NVIDIA's driver would with ``CUDA_LOG_FILE=stderr``: as a warning of ``cudatool.sim``."""
    driver_log.add(text)
    logger().warning("%s", text)


_pointers: dict[tuple[str, int], int] = {}
# Letters of struct for what is passed in one machine word.
_KINDS: Final[dict[Any, str]] = {
    ctypes.c_int: "i",
    ctypes.c_uint: "I",
    ctypes.c_ushort: "H",
    ctypes.c_ubyte: "B",
    ctypes.c_size_t: "Q",
    ctypes.c_uint64: "Q",
}


def function_pointer(name: str, thunk: Callable[[int, int | None], int], *, per_thread: bool = False) -> int:
    """Return the address of a C function for entry point `name`, 0 if there is none.

    `thunk` gives the n-th function for C (``cudatool_thunk`` of _libcuda.c). `per_thread` gives the variant in which
    stream handle 0 means the per-thread default stream.
    """
    found = ENTRIES.get(name)
    if found is None:
        return 0
    null_stream = 2 if per_thread else 1
    key = (name, null_stream)
    if key not in _pointers:
        slot, target = len(_pointers), None
        if all(one in _KINDS for one in found.types):
            kinds = "".join(_KINDS[one] for one in found.types)
            _calls.bind(slot, found, kinds, name in _DEFERRABLE, null_stream)
        else:
            target = _trampoline(found, null_stream)
        address = thunk(slot, target)
        assert address, "more entry points than the stub library has slots"
        _pointers[key] = address
    return _pointers[key]


def _trampoline(entry: EntryPoint, null_stream: int) -> int | None:
    """Return the address of a C function for an entry point with structures among its arguments."""

    def called(*arguments: Any, invoke: Callable[..., int] = invoke, crashed: Callable[..., int] = _crashed) -> int:
        try:
            return invoke(entry, arguments, null_stream)
        except BaseException as error:
            return crashed(entry, error)

    function = ctypes.CFUNCTYPE(ctypes.c_int, *entry.types)(called)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))  # must outlive this module's own end
    return ctypes.cast(function, ctypes.c_void_p).value


def write(address: int, ctype: Any, value: Any) -> None:
    """Store `value` as C type `ctype` at `address`; NULL is CUDA_ERROR_INVALID_VALUE."""
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    ctype.from_address(address).value = value


def read_string(address: int) -> bytes:
    """Return the NUL-terminated bytes at `address`; NULL is CUDA_ERROR_INVALID_VALUE."""
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    return ctypes.string_at(address)


def read_name(address: int) -> str:
    """Return the text at `address`; bytes that are no UTF-8 become what :func:`os.fsencode` turns back."""
    return read_string(address).decode(errors="surrogateescape")
