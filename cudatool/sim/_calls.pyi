"""What _calls.c offers: what every driver call does before and after its handler, and two steps of launches."""

from collections.abc import Callable
from typing import Any

class _Call:
    """The driver call in progress on the running thread.

    Attributes
    ----------
    depth
        Calls that the thread is in, one inside of the other.
    correlation
        Number of the innermost.
    null_stream
        What stream handle 0 means in it: CU_STREAM_LEGACY, or CU_STREAM_PER_THREAD if compiled so.
    message, address
        Why the last call failed, where the driver knows more than the error code says, and the memory that is meant.
    """

    depth: int
    correlation: int
    null_stream: int
    message: str
    address: int

call: _Call
TARGET: int
"""Address of the C function that slots call."""

def install(
    *,
    names: dict[str, Any],
    acquire: Callable[[], object],
    release: Callable[[], object],
    refusal: type[Exception],
    refused: Callable[[Any, Any], int],
    crashed: Callable[[Any, Any], int],
    results: dict[int, Any],
    finish: Callable[[], None],
    deferred: list[Any],
    callbacks: list[Any],
) -> None:
    """Give what calls need of abi.py; `names` is its namespace, whose `guard` and `subscribers` each call looks at.

    `results` has what subscribers get in place of each CUresult.
    """

def bind(slot: int, entry: Any, kinds: str, deferrable: bool, null_stream: int, /) -> None:
    """Let a slot call the handler of `entry`; `kinds` are its arguments' types as letters of :mod:`struct`."""

def invoke(entry: Any, deferrable: bool, arguments: tuple[Any, ...], null_stream: int, /) -> int:
    """Make a driver call and return its CUresult. What is no error of the driver's API is raised."""

def notify(method: str, what: Any, /) -> None:
    """Call this method of each subscriber with the call in progress and `what`, without the driver's lock.

    A call that is made inside of another one keeps the lock: the other one may be in the middle of a change.
    """

def launch_config(address: int, /) -> tuple[tuple[int, int, int], tuple[int, int, int], int, int, int]:
    """Return a CUlaunchConfig's grid, block, bytes of shared memory, stream and number of attributes."""

def guarded_call(function: int, argument: int, address: int, interruptible: bool, limit_ns: int, /) -> int:
    """See ``cudatool_guarded_call`` of _libcuda.c."""

def set_guard(call: int, /) -> None:
    """Give the address of ``cudatool_guarded_call``."""

def begin_thread(starter: int, function: Callable[[], object], /) -> None:
    """Call `function`: the first that a thread does which a driver call starts, on the thread with the id `starter`."""
