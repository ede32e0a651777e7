"""Driver entry points: memory and events of other processes, the part of "Memory Management" named cuIpc."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_size_t, c_uint64

from cudatool.sim import machine as state
from cudatool.sim.abi import IpcHandleStruct, entry, write
from cudatool.sim.ipc import EventHandle, Handle, SharedEvent
from cudatool.sim.machine import current_context
from cudatool.sim.queue import DISABLE_TIMING, INTERPROCESS, EventState
from cudatool.sim.results import DriverError, Result

_LAZY_ENABLE_PEER_ACCESS = 1


@entry("cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)")
def cuIpcGetMemHandle(pHandle: int, dptr: int) -> None:
    current_context()
    machine = state.machine
    allocation = machine.allocations.at(dptr)
    # "Takes a pointer to the base of an existing device memory allocation created with cuMemAlloc".
    if not pHandle or allocation is None or allocation.kind != "device":
        raise DriverError(Result.INVALID_VALUE, f"{dptr:#x} is not the start of memory from cuMemAlloc")
    # Nothing may run while the memory moves into a file, and while this waits other threads may enqueue more.
    while machine.scheduler.is_busy:
        machine.scheduler.drain()
    file, offset = machine.devices[allocation.device].memory.share(allocation.address, allocation.size)
    machine.share(allocation)
    handle = Handle(os.getpid(), file.opened, allocation.device, file.inode, offset, allocation.size, allocation.serial)
    ctypes.memset(pHandle, 0, ctypes.sizeof(IpcHandleStruct))
    ctypes.memmove(pHandle, ctypes.addressof(handle), ctypes.sizeof(handle))


@entry("cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)")
def cuIpcOpenMemHandle(pdptr: int, handle: IpcHandleStruct, Flags: int) -> None:
    context = current_context()
    if not pdptr or Flags != _LAZY_ENABLE_PEER_ACCESS:
        raise DriverError(Result.INVALID_VALUE, "Flags must be CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS")
    found = state.machine.imports.open(Handle.from_buffer_copy(handle), context)
    write(pdptr, c_uint64, found.address)
    state.machine.share(found)


@entry("cuIpcCloseMemHandle(CUdeviceptr dptr)")
def cuIpcCloseMemHandle(dptr: int) -> None:
    current_context()
    state.machine.imports.close(dptr)


@entry("cuIpcGetEventHandle(CUipcEventHandle *pHandle, CUevent event)")
def cuIpcGetEventHandle(pHandle: int, event: int) -> None:
    found = state.machine.get(event, EventState)
    if not pHandle:
        raise DriverError(Result.INVALID_VALUE)
    if found.shared is None:
        raise DriverError(Result.INVALID_HANDLE, "the event was not created with CU_EVENT_INTERPROCESS")
    handle = found.shared.handle()
    ctypes.memset(pHandle, 0, ctypes.sizeof(IpcHandleStruct))
    ctypes.memmove(pHandle, ctypes.addressof(handle), ctypes.sizeof(handle))


@entry("cuIpcOpenEventHandle(CUevent *phEvent, CUipcEventHandle handle)")
def cuIpcOpenEventHandle(phEvent: int, handle: IpcHandleStruct) -> None:
    context = current_context()
    wanted = EventHandle.from_buffer_copy(handle)
    if not phEvent:
        raise DriverError(Result.INVALID_VALUE)
    if wanted.process == os.getpid():
        raise DriverError(Result.INVALID_CONTEXT, "an event cannot be opened in the process that created it")
    event = EventState(context, state.machine.new_handle(), INTERPROCESS | DISABLE_TIMING)
    event.shared = SharedEvent.open(wanted)
    state.machine.objects[event.handle] = event
    write(phEvent, c_size_t, event.handle)
