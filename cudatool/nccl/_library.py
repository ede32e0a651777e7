"""NCCL, through nccl4py's bindings."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from cudatool.errors import CudaError, DeviceUnavailableError
from cudatool.nccl._calls import DTYPES, Name, RankPart
from cudatool.runtime.calls import operation
from cudatool.runtime.device import device as on_device

__all__ = ["library"]


@functools.cache
def _bindings() -> Any:
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        from nccl.bindings import nccl

        nccl.get_version()  # loads the library
    except (ImportError, DynamicLibNotFoundError) as error:
        raise DeviceUnavailableError(f"collectives on GPUs need NCCL: pip install 'cudatool[gpu]' ({error})") from error
    return nccl


@contextmanager
def _translated() -> Iterator[Any]:
    """Return the bindings, whose errors become ours."""
    nccl = _bindings()
    try:
        yield nccl
    except nccl.NCCLError as error:
        raise CudaError(f"NCCL: {error}; NCCL_DEBUG=INFO tells more", "CUDA_ERROR_UNKNOWN") from error


_Handle = tuple[Any, int]
"""An ncclComm_t, and its device."""


class _Nccl:
    """:class:`cudatool.nccl._communicator.Library`."""

    def version(self) -> tuple[int, ...]:
        """Return the version of the loaded library, whose number has two decimal digits each."""
        with _translated() as nccl:
            number = int(nccl.get_version())
        return number // 10000, number // 100 % 100, number % 100

    def unique_id(self) -> bytes:
        """Return an ncclUniqueId."""
        with _translated():
            from nccl.core import get_unique_id

            return bytes(get_unique_id())

    def init_rank(self, ranks: int, uid: bytes, rank: int, device: int) -> _Handle:
        """Return the handle of one rank."""
        with _translated() as nccl, on_device(device), operation():
            return nccl.comm_init_rank_scalable(ranks, rank, 1, bytearray(uid), 0), device

    def init_all(self, devices: Sequence[int]) -> list[_Handle]:
        """Return the handles of all ranks."""
        with _translated() as nccl, operation():
            found = nccl.comm_init_all(len(devices), list(devices))
        return list(zip(found, devices, strict=True))

    def enqueue(self, calls: Sequence[tuple[_Handle, RankPart]]) -> list[int]:
        """Enqueue a group of calls."""
        correlations = []
        with _translated() as nccl:
            nccl.group_start()
            try:
                for (handle, device), call in calls:
                    with on_device(device), operation() as correlation:
                        getattr(nccl, call.name)(*_arguments(call), handle, call.stream.cuda_stream)
                    correlations.append(correlation)
            finally:
                with operation():
                    nccl.group_end()
        return correlations

    def destroy(self, handle: _Handle) -> None:
        """Destroy a rank's communicator."""
        communicator, device = handle
        with _translated() as nccl, on_device(device), operation():
            nccl.comm_destroy(communicator)


library: Final = _Nccl()


def _arguments(call: RankPart) -> tuple[int, ...]:
    """Return what NCCL's function of this name takes, up to communicator and stream."""
    result, sent = call.result, call.result if call.sent is None else call.sent
    dtype = DTYPES[result.dtype]
    buffers = sent.ctypes.data, result.ctypes.data
    match call.name:
        case Name.SEND | Name.RECV:
            return result.ctypes.data, result.size, dtype, call.peer
        case Name.BROADCAST:
            return *buffers, result.size, dtype, call.peer
        case Name.ALL_GATHER:
            return *buffers, sent.size, dtype
        case Name.REDUCE:
            return *buffers, result.size, dtype, call.op, call.peer
        case Name.ALL_REDUCE | Name.REDUCE_SCATTER:
            return *buffers, result.size, dtype, call.op
