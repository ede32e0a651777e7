"""Generators: where the next random number of a device comes from.

A generator is two numbers of the host, a seed and an offset. A kernel that draws gets both; the offset then moves on
by how many numbers one of its threads may have drawn, before the kernel has run. Inside the capture of a graph,
kernels read both from device memory instead, where each replay writes the current ones (``cudatool.graphs``).
"""

from __future__ import annotations

import operator
import secrets
import threading
from typing import Any, Final, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from cudatool import _driver
from cudatool.errors import UsageError
from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.capture import capturing_graph, is_capturing
from cudatool.runtime.device import DeviceLike, current_device, device_index
from cudatool.runtime.stream import Stream, current_stream
from cudatool.runtime.traced_calls import traced

__all__ = ["DEFAULT_SEED", "Drawn", "Generator", "default_generator", "seed_all_with"]

DEFAULT_SEED: Final = 67280421310721
"""What a new generator begins with, as in PyTorch."""
_WORD: Final = 1 << 64
_STATE: Final = np.dtype("<u8")


class Drawn(NamedTuple):
    """Where a kernel's numbers come from; its last three arguments."""

    seed: int
    offset: int
    place: Any
    """Null, or two 64-bit numbers in device memory: the seed, and what is added to the offset."""


class _State:
    """Seed and offset. Generators made by :meth:`Generator.graphsafe_get_state` share one."""

    def __init__(self, seed: int, offset: int = 0) -> None:
        self.seed = seed
        self.offset = offset
        self.places: dict[int, _Place] = {}  # by the id of the graph
        self.lock = threading.Lock()


class _Place:
    """Where the kernels of one graph read seed and offset, and by how much they have moved the offset so far."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array  # first written by the first replay, on whatever stream
        self.drawn = 0

    def write(self, seed: int, offset: int) -> None:
        # Pageable memory has been read when the copy returns.
        self.array.copy_(np.array([seed, offset], _STATE), non_blocking=True)
        self.array.record_stream(current_stream(self.array.device))


class Generator:
    """A source of random numbers for one device, as :class:`torch.Generator`.

    The numbers are Philox4x32-10's, and the same as PyTorch's for the same seed and offset.

    Parameters
    ----------
    device
        Default: the current device.
    """

    def __init__(self, device: DeviceLike = None) -> None:
        self._set_up(device_index(device), _State(DEFAULT_SEED))

    def _set_up(self, device: int, state: _State) -> None:
        self._device = device
        self._state = state
        self._captured: dict[int, _State] = {}  # what the state was when a capture began, by the id of the graph

    @classmethod
    def _of(cls, device: int, state: _State) -> Generator:
        found = cls.__new__(cls)
        found._set_up(device, state)
        return found

    @property
    def device(self) -> int:
        """Ordinal of the device that it is for."""
        return self._device

    @traced
    def manual_seed(self, seed: SupportsIndex) -> Generator:
        """Set the seed, begin at the first number again, and return the generator.

        While the current stream is captured nothing can be set; the seed that the generator has changes nothing.

        Raises
        ------
        UsageError
            The seed is not in [-2^63, 2^64), or is another one and the current stream is being captured.
        """
        number = _as_seed(seed)
        if number != self._state.seed or not self._in_capture():
            self._set(number, 0)
        return self

    @traced
    def seed(self) -> int:
        """Set an unpredictable seed, and return it."""
        chosen = secrets.randbits(52)  # exact in a double too
        self._set(chosen, 0)
        return chosen

    @traced
    def initial_seed(self) -> int:
        """Return the seed."""
        return self._state.seed

    @traced
    def get_offset(self) -> int:
        """Return how many numbers each thread has drawn."""
        return self._state.offset

    @traced
    def set_offset(self, offset: SupportsIndex) -> None:
        """Set how many numbers each thread has drawn.

        Raises
        ------
        UsageError
            It is no multiple of 4, or not in [0, 2^63).
        """
        self._set(self._state.seed, _as_offset(offset))

    @traced
    def get_state(self) -> npt.NDArray[np.uint8]:
        """Return seed and offset as 16 bytes, PyTorch's layout."""
        return np.array([self._state.seed, self._state.offset], _STATE).view(np.uint8)

    @traced
    def set_state(self, new_state: Any) -> None:
        """Set seed and offset to what :meth:`get_state` returned, here or in PyTorch.

        Parameters
        ----------
        new_state
            16 bytes, or the 8 of the seed alone: then the offset is 0.

        Raises
        ------
        UsageError
            It is something else, or the current stream is being captured.
        """
        found = np.asarray(new_state)
        if found.dtype != np.uint8 or found.size not in (8, 16):
            raise UsageError(
                f"a state is 16 bytes (uint8), as get_state() returns, not shape {found.shape}, dtype {found.dtype}"
            )
        seed, offset = (*map(int, found.ravel().view(_STATE)), 0)[:2]
        self._set(seed, _as_offset(offset))

    @traced
    def clone_state(self) -> Generator:
        """Return a generator that goes on from here by itself."""
        return Generator._of(self._device, _State(self._state.seed, self._state.offset))

    @traced
    def graphsafe_get_state(self) -> Generator:
        """Return a generator that shares this one's state: what moves one of them moves both."""
        return Generator._of(self._device, self._state)

    @traced
    def graphsafe_set_state(self, state: Generator) -> None:
        """Share another generator's state from now on; allowed while a graph is captured.

        Raises
        ------
        UsageError
            `state` is no generator, or one for another device.
        """
        if not isinstance(state, Generator):
            raise UsageError(f"expected a Generator, as graphsafe_get_state() returns, not {type(state).__name__}")
        if state.device != self._device:
            raise UsageError(f"this generator is for device {self._device}, that one for device {state.device}")
        self._state = state._state

    def __repr__(self) -> str:
        return f"<Generator device={self._device} seed={self._state.seed} offset={self._state.offset}>"

    def _set(self, seed: int, offset: int) -> None:
        if self._in_capture():
            raise UsageError(
                "seed and offset cannot be set while a graph is captured: each replay takes those of its time; "
                "use graphsafe_set_state(), or set them before a replay"
            )
        state = self._state
        with state.lock:
            state.seed, state.offset = seed, offset

    def _in_capture(self) -> bool:
        return _driver.chosen() is not None and is_capturing(current_stream(self._device))

    def draw(self, count: int, stream: Stream) -> Drawn:
        """Take `count` numbers for each thread of a kernel that is launched next.

        Parameters
        ----------
        count
            Rounded up to a multiple of 4, the numbers of one block of Philox.

        Raises
        ------
        UsageError
            The stream is another device's, or is being captured into a graph that the generator is not registered to.
        """
        if stream.device_index != self._device:
            raise UsageError(f"this generator is for device {self._device}, the array is on {stream.device_index}")
        count = -(-count // 4) * 4
        state = self._state
        capturing = is_capturing(stream)
        with state.lock:
            if not capturing:
                offset, state.offset = state.offset, state.offset + count
                return Drawn(state.seed, offset, np.uint64(0))
            place = state.places.get(id(capturing_graph(stream)))
            if place is None:
                raise UsageError(
                    "this generator is not registered to the graph that is being captured: call its "
                    "register_generator_state(generator) before the capture, of a cudatool.CUDAGraph"
                )
            offset, place.drawn = place.drawn, place.drawn + count
            return Drawn(0, offset, place.array)

    # What a graph calls (cudatool.graphs.CapturableGenerator).

    def begin_capture(self, graph: object) -> None:
        """Give seed and offset of `graph` a place in device memory; the capture begins next."""
        state = self._captured[id(graph)] = self._state
        state.places[id(graph)] = _Place(empty(2, _STATE, device=self._device))

    def end_capture(self, graph: object) -> int:
        """Return by how much the kernels captured into `graph` move the offset, if that was not reported yet."""
        place = self._captured[id(graph)].places[id(graph)]
        drawn, place.drawn = place.drawn, 0
        return drawn

    def begin_replay(self, graph: object, drawn: int) -> None:
        """Let the kernels of `graph` begin at the current seed and offset, and move on by `drawn`."""
        state = self._captured[id(graph)]
        with state.lock:
            offset, state.offset = state.offset, state.offset + drawn
            state.places[id(graph)].write(state.seed, offset)

    def forget(self, graph: object) -> None:
        """Give the place back; `graph` is not replayed any more."""
        state = self._captured.pop(id(graph), None)
        if state is not None:
            state.places.pop(id(graph), None)


def _as_integer(number: SupportsIndex, what: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise UsageError(f"{what} is an integer, not {type(number).__name__}") from None


def _as_seed(seed: SupportsIndex) -> int:
    """Return a seed as 64 bits; a negative one counts from 2^64."""
    number = _as_integer(seed, "a seed")
    if not -_WORD // 2 <= number < _WORD:
        raise UsageError(f"a seed is in [-2^63, 2^64), not {number}")
    return number % _WORD


def _as_offset(given: SupportsIndex) -> int:
    offset = _as_integer(given, "an offset")
    if not 0 <= offset < _WORD // 2 or offset % 4:
        raise UsageError(f"an offset is a multiple of 4 in [0, 2^63), not {offset}")
    return offset


# The default generators. They are host memory, so that a seed can be set before the device is chosen.

_defaults: dict[int, Generator] = {}
_all_seeded: int | None = None  # what seed_all_with() gave those that are still to come


def default_generator(device: DeviceLike = None) -> Generator:
    """Return the generator that a device uses where none is given; each process begins with another seed."""
    if device is None and _driver.chosen() is None:
        index = 0  # what is current before anything was chosen
    else:
        index = current_device() if device is None else device_index(device)
    found = _defaults.get(index)
    if found is None:
        seed = secrets.randbits(52) if _all_seeded is None else _all_seeded
        found = _defaults.setdefault(index, Generator._of(index, _State(seed)))
    return found


def seed_all_with(seed: SupportsIndex) -> None:
    """Seed the default generators of all devices."""
    global _all_seeded
    number = _as_seed(seed)
    for generator in list(_defaults.values()):  # another thread may add one
        generator.manual_seed(number)
    _all_seeded = number
