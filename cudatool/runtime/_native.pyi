"""What _native.c offers."""

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

class Launcher:
    """Converts the arguments of one kernel and launches it.

    Parameters
    ----------
    launch
        Address of the driver's cuLaunchKernel.
    function
        The kernel's handle.
    parameters
        Offset and size in bytes of each parameter.
    array
        A type; of its instances, ``_address`` is passed, unless that is negative.
    scalar
        A type; of its instances, the bytes are passed.
    convert
        Called with index and value of each argument that is none of these, no integer and no float, or that does not
        fit; returns its bytes or raises.
    """

    def __init__(
        self,
        launch: int,
        function: int,
        parameters: list[tuple[int, int]],
        array: type,
        scalar: type,
        convert: Callable[[int, Any], bytes],
    ) -> None: ...
    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        stream: int,
        arguments: tuple[Any, ...],
        /,
    ) -> int:
        """Enqueue the kernel and return the driver's status. `arguments` must be as many as there are parameters."""

    def pack(self, arguments: tuple[Any, ...], /) -> bytes:
        """Return the bytes of all parameters, each at its offset."""

class Region:
    """Bytes at a device's address, in the form of a buffer, over which NumPy can lay an array. It must not be read.

    When the last array in it is gone, ``owner.free(address)`` is called, unless the process ends anyway.
    """

    def __init__(self, address: int, size: int, owner: Any = None) -> None: ...
    @property
    def address(self) -> int:
        """Where it begins."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def owner(self) -> Any:
        """Whose ``free(address)`` is called at the end."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def call(function: int, /, *words: int) -> int:
    """Call a function of the driver by its address and return its status.

    At most three words; with three, the last one is an unsigned int.
    """

def address_of(array: npt.NDArray[Any], /) -> int:
    """Return the address of the first element of a NumPy array."""

def last_words(message: bytes, /) -> None:
    """Let a signal write a message to stderr before it ends this process; ``b""`` undoes it.

    A signal that the program handles itself, or ignores, is left alone.
    """
