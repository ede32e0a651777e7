"""What calls of CUPTI's log that allocate, free, map or share memory become in a trace, and what is there by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.collect.copied_boxes import BoxSide, Rows
from cudatool.collect.cupti_calls import plain_name, public_name
from cudatool.collect.cupti_graphs import GpuGraphs
from cudatool.collect.cupti_report import Reporter
from cudatool.collect.cupti_rows import Row, What
from cudatool.collect.live_memory import LiveMemory
from cudatool.collect.torch_rows import Action
from cudatool.cuda_arrays import described_bytes
from cudatool.memory.blocks import MIN_BLOCK_SIZE
from cudatool.trace.events import OF_BACKWARD, OF_MODULE, AccessFlag, Event, Kind, WarningFlag, pack_pool
from cudatool.trace.libraries import Library

__all__ = ["NOTED", "MemoryCalls"]

_BLOCKS = Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_COMPLETED
_OF_HOST = Kind.HOST_ALLOC, Kind.HOST_FREE
NOTED = frozenset([*_BLOCKS, *_OF_HOST])
"""What :meth:`MemoryCalls.note` notes."""
_ADDRESS_OF_ARRAYS = 1 << 58  # more than any memory's


class MemoryCalls:
    """Reads such calls: :mod:`cudatool.collect.cupti_calls` names the method for each.

    Parameters
    ----------
    reporter
        Where they are reported.
    graphs
        Which streams are captured.
    pytorch_is_watched, blocks_are_watched
        As in :class:`~cudatool.collect.cupti.CuptiCollector`.

    Attributes
    ----------
    device, host
        The memory that is there.
    of_graphs
        Addresses of PyTorch's blocks that belong to graphs.
    """

    def __init__(
        self,
        reporter: Reporter,
        graphs: GpuGraphs,
        *,
        pytorch_is_watched: Callable[[], bool],
        blocks_are_watched: Callable[[], bool],
    ) -> None:
        self._reporter, self._graphs = reporter, graphs
        self._pytorch_is_watched = pytorch_is_watched
        self._blocks_are_watched = blocks_are_watched
        self.device, self.host = LiveMemory(), LiveMemory()
        self.of_graphs: set[int] = set()
        self._devices: dict[int, int] = {}  # by address, of the driver's allocations: any context may free them
        self._arrays: dict[int, tuple[int, int]] = {}  # handle -> address and size
        self._next_array = _ADDRESS_OF_ARRAYS
        self._mapped: dict[int, int] = {}  # memory of cuMemCreate -> the first place where it is mapped

    def note_living(self, event: Event) -> None:
        """Note memory of the driver's that was there when the recording began."""
        self.device.add(event.address, event.size)
        self._devices[event.address] = event.device

    def note(self, event: Event) -> None:
        """Note memory that another source reports: launches may have pointers to it."""
        for memory, made, gone in self._memories():
            if event.kind is made:
                memory.add(event.address, event.size)
            elif event.kind is gone:
                memory.remove(event.address)

    def note_all(self, rows: npt.NDArray[np.void]) -> None:
        """Note the memory that several events of another source report: what is there after the last one."""
        for memory, made, gone in self._memories():
            changes = rows[np.isin(rows["kind"], (made, gone))][::-1]
            last = changes[np.unique(changes["address"], return_index=True)[1]]
            is_there = last["kind"] == made
            for address in last["address"][~is_there].tolist():
                memory.remove(address)
            for address, size in last[["address", "size"]][is_there].tolist():
                memory.add(address, size)

    def _memories(self) -> tuple[tuple[LiveMemory, Kind, Kind], ...]:
        """Return the memory that launches may have pointers to, each with the kinds of events that add and remove."""
        if self._reporter.launches is None:
            return ()
        return (self._reporter.launches.blocks, *_BLOCKS), (self.host, *_OF_HOST)

    def touched(self, side: BoxSide) -> tuple[tuple[Rows, ...], AccessFlag]:
        """Return what a copy touches. Where in an array it is is not known; of one made before, nothing is."""
        if not side.is_array:
            return side.rows, AccessFlag(0)
        found = self._arrays.get(side.place)
        return (Rows(*found),) if found else (), AccessFlag.INEXACT

    def is_on_device(self, side: BoxSide) -> bool:
        return not side.is_host and not (side.is_unified and not self.device.find(side.place))

    def block(self, row: Row, name: str) -> None:
        """PyTorch's allocator."""
        action, address, size, handle, captured, *pool, of_backward = row.words
        if action == Action.SNAPSHOT or not self._is_no_graphs(action, address, captured):
            return
        rounded = -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        stream, of_pool = self._reporter.stream(handle), pack_pool((pool[0], pool[1]))
        if action == Action.OOM:
            self._reporter.report(Kind.OOM, stream=stream, size=rounded, aux0=address, aux1=of_pool)
        elif action > Action.FREE_COMPLETED:
            self._reporter.report(Kind[Action(action).name], stream=stream, address=address, size=size, aux1=of_pool)
        else:
            kind = Kind[f"BLOCK_{Action(action).name}"]
            path = self._reporter.tables.paths[self._reporter.called.module] if action == Action.ALLOC else ""
            flags = (OF_MODULE if path else 0) | (OF_BACKWARD if of_backward and action == Action.ALLOC else 0)
            what: dict[str, Any] = {"stream": stream, "name": path, "flags": flags, "aux0": size, "aux1": of_pool}
            self._reporter.report(kind, address=address, size=rounded, **what)

    def pooled(self, row: Row, name: str) -> None:
        """CuPy's pool."""
        kind = Kind.POOL_ALLOC if row.what == What.POOL_ALLOC else Kind.POOL_FREE
        address, size, asked = row.words[:3]
        if self._reporter.launches is not None and kind is Kind.POOL_ALLOC:
            self._reporter.launches.blocks.add(address, size)
        elif self._reporter.launches is not None:
            self._reporter.launches.blocks.remove(address)
        self._reporter.report(kind, address=address, size=size, aux0=asked, name=Library.CUPY)

    def _is_no_graphs(self, action: int, address: int, captured: int) -> bool:
        """Return whether to report what the allocator did: blocks of a graph are not reported."""
        if action == Action.ALLOC:
            if captured:
                self.of_graphs.add(address)
            else:
                self.of_graphs.discard(address)
            return not captured
        return action > Action.FREE_COMPLETED or address not in self.of_graphs

    def alloc(self, row: Row, name: str) -> None:
        self._allocated(row.words[0], row.words[1], name)

    def alloc_pitch(self, row: Row, name: str) -> None:
        address, pitch, _, height, *_ = row.words
        self._allocated(address, pitch * height, name)

    def alloc_async(self, row: Row, name: str) -> None:
        address, size, stream, *_ = row.words
        self._allocated(address, size, name, stream)

    def alloc_from_pool(self, row: Row, name: str) -> None:
        address, size, _, stream, *_ = row.words
        self._allocated(address, size, name, stream)

    def array_create(self, row: Row, name: str) -> None:
        """A CUDA array: it has no address that programs see, and gets one that no memory has."""
        handle, at, levels, *_ = row.words
        size = described_bytes(self._reporter.structure(at, name), levels)
        if self._is_pytorchs():
            return
        self._arrays[handle] = self._next_array, size
        self._devices[self._next_array] = row.device
        self._reporter.report(Kind.MEM_ALLOC, address=self._next_array, size=size, name=plain_name(name))
        self._next_array += size + 1

    def array_destroy(self, row: Row, name: str) -> None:
        address, size = self._arrays.pop(row.words[0], (0, 0))
        if address:
            self._report_free(address, size, name)

    def _allocated(self, address: int, size: int, name: str, stream: int | None = None) -> None:
        id_ = 0 if stream is None else self._reporter.stream(stream, name)
        if stream is not None and self._graphs.is_captured(id_):
            self._reporter.say_unseen(f"{public_name(name)} in a graph")  # the memory is the launches'
            return
        if self._is_pytorchs():
            return
        self.device.add(address, size)
        self._devices[address] = self._reporter.row.device
        self._reporter.report(Kind.MEM_ALLOC, stream=id_, address=address, size=size, name=plain_name(name))

    def use(self, row: Row, name: str) -> None:
        process, used, total, causes, *_ = row.words
        self._reporter.report(Kind.DEVICE_USE, size=process, address=used, aux0=total, flags=causes)

    def free(self, row: Row, name: str) -> None:
        self._freed(row.words[0], name)

    def free_async(self, row: Row, name: str) -> None:
        self._freed(row.words[0], name, row.words[1])

    def _freed(self, address: int, name: str, stream: int | None = None) -> None:
        size = self.device.remove(address)
        if size is None:  # not seen, or PyTorch's
            return
        self._report_free(address, size, name, 0 if stream is None else self._reporter.stream(stream, name))

    def _report_free(self, address: int, size: int, name: str, stream: int = 0) -> None:
        row = self._reporter.row
        self._reporter.row = row._replace(device=self._devices.pop(address, row.device))
        self._reporter.report(Kind.MEM_FREE, stream=stream, address=address, size=size, name=plain_name(name))

    def map(self, row: Row, name: str) -> None:
        address, size, _, handle, *_ = row.words
        if self._is_pytorchs():
            return
        elsewhere = self._mapped.get(handle)
        if elsewhere is None:  # the memory of cuMemCreate can be used from here on
            self._mapped[handle] = address
            self._allocated(address, size, name)
        else:
            self._reporter.report(Kind.MEM_MAP, address=address, size=size, aux0=elsewhere, name=plain_name(name))

    def unmap(self, row: Row, name: str) -> None:
        address, size, *_ = row.words
        handle = next((handle for handle, at in self._mapped.items() if at == address), None)
        if handle is not None:
            del self._mapped[handle]
            self._freed(address, name)
        elif not self._pytorch_is_watched():
            self._reporter.report(Kind.MEM_UNMAP, address=address, size=size, name=plain_name(name))

    def host_alloc(self, row: Row, name: str) -> None:
        self.host.add(row.words[0], row.words[1])
        self._reporter.report(Kind.HOST_ALLOC, address=row.words[0], size=row.words[1], name=plain_name(name))

    def host_free(self, row: Row, name: str) -> None:
        size = self.host.remove(row.words[0]) or 0
        self._reporter.report(Kind.HOST_FREE, address=row.words[0], size=size, name=plain_name(name))

    def give(self, row: Row, name: str) -> None:
        self._shared(row.words[1], name)

    def take(self, row: Row, name: str) -> None:
        self._shared(row.words[0], name)

    def _shared(self, place: int, name: str) -> None:
        """Report that other processes can use memory: at an address, or what the driver has a handle of."""
        address = 0 if "ShareableHandle" in name else place
        address, size = self.device.find(address) or (address, 0)  # a handle stands for all of it
        text = plain_name(name).removesuffix("_v2")
        self._reporter.report(Kind.WARNING, name=text, address=address, size=size, flags=WarningFlag.SHARED)

    def _is_pytorchs(self) -> bool:
        """Whether PyTorch's caching allocator makes the call: PyTorch's own source reports its segments."""
        return "libc10_cuda" in self._reporter.called.library and (
            self._pytorch_is_watched() or self._blocks_are_watched()
        )
