"""NCCL, through nccl4py's bindings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from cudatool._cuda import operation
from cudatool._device import device as on_device
from cudatool.errors import CudaError, DeviceUnavailableError
from cudatool.memory.driver_provider import free_mutex
from cudatool.nccl._calls import DTYPES, Call, Name

__all__ = ["library"]


def _nccl() -> Any:
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise DeviceUnavailableError(
            f"collectives on GPUs need NCCL: pip install 'cudatool[gpu]' nvidia-nccl-cu13 ({error})"
        ) from error
    return nccl


@contextmanager
def _translated() -> Iterator[Any]:
    """Return the bindings, whose errors become ours."""
    nccl = _nccl()
    try:
        with operation():
            yield nccl
    except nccl.NCCLError as error:
        raise CudaError(f"NCCL: {error}; NCCL_DEBUG=INFO tells more", "CUDA_ERROR_UNKNOWN") from error


class _Nccl:
    """:class:`cudatool.nccl._communicator.Library`; a handle is an ncclComm_t and its device."""

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

    def init_rank(self, ranks: int, uid: bytes, rank: int, device: int) -> tuple[int, int]:
        """Return the handle of one rank."""
        with _translated() as nccl, on_device(device):
            return int(nccl.comm_init_rank_scalable(ranks, rank, 1, bytearray(uid), 0)), device

    def init_all(self, devices: Sequence[int]) -> list[tuple[int, int]]:
        """Return the handles of all ranks."""
        with _translated() as nccl:
            found = nccl.comm_init_all(len(devices), list(devices))
        return [(int(handle), device) for handle, device in zip(found, devices, strict=True)]

    def enqueue(self, calls: Sequence[tuple[tuple[int, int], Call]]) -> list[int]:
        """Enqueue a group of calls."""
        correlations = []
        with free_mutex():  # a free between the launches of two ranks would wait for the first, and that for the second
            with _translated() as nccl:
                nccl.group_start()
            try:
                for (handle, device), call in calls:
                    with on_device(device), operation() as correlation, _translated() as nccl:
                        getattr(nccl, call.name)(*_arguments(call), handle, call.stream.cuda_stream)
                    correlations.append(correlation)
            finally:
                with _translated() as nccl:
                    nccl.group_end()
        return correlations

    def destroy(self, handle: tuple[int, int]) -> None:
        """Destroy a rank's communicator."""
        number, device = handle
        with on_device(device), _translated() as nccl:
            nccl.comm_destroy(number)


library: Final = _Nccl()


def _arguments(call: Call) -> tuple[int, ...]:
    """Return what NCCL's function of this name takes, up to communicator and stream."""
    result, sent = call.result, call.result if call.sent is None else call.sent
    dtype = DTYPES[result.dtype.name]
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
