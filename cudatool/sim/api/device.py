"""Driver entry points: error handling, initialization, version, devices, primary contexts, contexts.

Grouped as in the CUDA driver API reference; each handler stands under its C prototype.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64
from typing import Final

from cudatool.sim import abi, profile
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, read_string, write
from cudatool.sim.device_runtime import DEFAULT_LIMITS, check_limit, set_limit
from cudatool.sim.green import GreenContext
from cudatool.sim.machine import Context, context_behind, current_context, current_green
from cudatool.sim.results import DriverError, Result

_CONTEXT_FLAGS: Final = 0xFF  # CU_CTX_FLAGS_MASK
_WAYS_TO_WAIT: Final = 0x07  # CU_CTX_SCHED_MASK
_strings: dict[int, bytes] = {}  # what C callers hold pointers to


def _result_string(error: int, address: int, *, name: bool) -> None:
    if error not in Result._value2member_map_:
        if address:
            write(address, c_size_t, 0)
        raise DriverError(Result.INVALID_VALUE)
    result = Result(error)
    key = error * 2 + name
    text = _strings.setdefault(key, (result.c_name if name else result.text).encode())
    write(address, c_size_t, ctypes.cast(c_char_p(text), ctypes.c_void_p).value or 0)


# ---- Error handling ----


@entry("cuGetErrorString(CUresult error, const char **pStr)")
def cuGetErrorString(error: int, pStr: int) -> None:
    _result_string(error, pStr, name=False)


@entry("cuGetErrorName(CUresult error, const char **pStr)")
def cuGetErrorName(error: int, pStr: int) -> None:
    _result_string(error, pStr, name=True)


# ---- Initialization, version ----


@entry("cuInit(unsigned int Flags)")
def cuInit(Flags: int) -> None:
    if Flags:
        raise DriverError(Result.INVALID_VALUE)
    if not state.machine.initialized:
        state.machine.initialized, abi.guard = True, None


@entry("cuDriverGetVersion(int *driverVersion)")
def cuDriverGetVersion(driverVersion: int) -> None:
    write(driverVersion, c_int, profile.DRIVER_VERSION)


# ---- Devices ----


@entry("cuDeviceGet(CUdevice *device, int ordinal)")
def cuDeviceGet(device: int, ordinal: int) -> None:
    write(device, c_int, state.machine.device(ordinal).ordinal)


@entry("cuDeviceGetCount(int *count)")
def cuDeviceGetCount(count: int) -> None:
    write(count, c_int, len(state.machine.devices))


@entry("cuDeviceGetName(char *name, int len, CUdevice dev)")
def cuDeviceGetName(name: int, len: int, dev: int) -> None:
    state.machine.device(dev)
    if not name or len <= 0:
        raise DriverError(Result.INVALID_VALUE)
    text = profile.NAME.encode()[: len - 1] + b"\0"
    ctypes.memmove(name, text, text.__len__())


@entry("cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)")
def cuDeviceGetUuid(uuid: int, dev: int) -> None:
    state.machine.device(dev)
    if not uuid:
        raise DriverError(Result.INVALID_VALUE)
    ctypes.memmove(uuid, b"cudatool-sim\0\0\0" + bytes([dev & 0xFF]), 16)


@entry("cuDeviceTotalMem(size_t *bytes, CUdevice dev)")
def cuDeviceTotalMem(bytes: int, dev: int) -> None:
    write(bytes, c_size_t, state.machine.device(dev).memory.size)


@entry("cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)")
def cuDeviceGetAttribute(pi: int, attrib: int, dev: int) -> None:
    device = state.machine.device(dev)
    if not 1 <= attrib <= 161:
        raise DriverError(Result.INVALID_VALUE)
    value = profile.ATTRIBUTES.get(attrib, 0)
    write(pi, c_int, value + device.ordinal if attrib == 33 else value)


@entry("cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)")
def cuDeviceComputeCapability(major: int, minor: int, dev: int) -> None:
    state.machine.device(dev)
    write(major, c_int, profile.COMPUTE_CAPABILITY[0])
    write(minor, c_int, profile.COMPUTE_CAPABILITY[1])


@entry("cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev)")
def cuDeviceGetPCIBusId(pciBusId: int, len: int, dev: int) -> None:
    state.machine.device(dev)
    text = b"0000:%02X:00.0\0" % (dev + 1)
    if not pciBusId or len < text.__len__():
        raise DriverError(Result.INVALID_VALUE)
    ctypes.memmove(pciBusId, text, text.__len__())


@entry("cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev)")
def cuDeviceCanAccessPeer(canAccessPeer: int, dev: int, peerDev: int) -> None:
    one, other = state.machine.device(dev), state.machine.device(peerDev)
    write(canAccessPeer, c_int, int(one is not other))


@entry("cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId)")
def cuDeviceGetByPCIBusId(dev: int, pciBusId: int) -> None:
    # [domain]:[bus]:[device].[function], of which the domain or the function can be left out
    match = re.fullmatch(rb"(?:([0-9a-f]+):)?([0-9a-f]+):([0-9a-f]+)(?:\.([0-9a-f]+))?", read_string(pciBusId), re.I)
    if match is None or (match[1] is None and match[4] is None):
        raise DriverError(Result.INVALID_VALUE)
    domain, bus, device, function = (int(part or b"0", 16) for part in match.groups())
    if domain or device or function or not bus:
        raise DriverError(Result.INVALID_DEVICE)
    write(dev, c_int, state.machine.device(bus - 1).ordinal)


@entry("cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice)")
def cuDeviceGetP2PAttribute(value: int, attrib: int, srcDevice: int, dstDevice: int) -> None:
    if state.machine.device(srcDevice) is state.machine.device(dstDevice):
        raise DriverError(Result.INVALID_DEVICE, "a device has no link to itself")
    # rank, access, all atomics, arrays, only some atomics
    values = {1: 0, 2: 1, 3: 1, 4: 1, 5: 0}
    if attrib not in values:
        raise DriverError(Result.INVALID_VALUE)
    write(value, c_int, values[attrib])


@entry("cuDeviceGetExecAffinitySupport(int *pi, CUexecAffinityType type, CUdevice dev)")
def cuDeviceGetExecAffinitySupport(pi: int, type: int, dev: int) -> None:
    state.machine.device(dev)
    if type:  # CU_EXEC_AFFINITY_TYPE_SM_COUNT, the only one
        raise DriverError(Result.INVALID_VALUE)
    write(pi, c_int, 0)


# ---- Primary contexts ----


@entry("cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)")
def cuDevicePrimaryCtxRetain(pctx: int, dev: int) -> None:
    device = state.machine.device(dev)
    if not pctx:
        raise DriverError(Result.INVALID_VALUE)
    write(pctx, c_size_t, state.machine.retain_primary(device).handle)


@entry("cuDevicePrimaryCtxRelease(CUdevice dev)")
def cuDevicePrimaryCtxRelease(dev: int) -> None:
    state.machine.release_primary(state.machine.device(dev))


@entry("cuDevicePrimaryCtxReset(CUdevice dev)")
def cuDevicePrimaryCtxReset(dev: int) -> None:
    # "Resetting the primary context does not release it": it is still to be released as often as it was retained.
    state.machine.end_primary(state.machine.device(dev))


@entry("cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags)")
def cuDevicePrimaryCtxSetFlags(dev: int, flags: int) -> None:
    device = state.machine.device(dev)
    device.primary_flags = _checked(flags)
    if device.primary is not None:
        device.primary.flags = flags


@entry("cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)")
def cuDevicePrimaryCtxGetState(dev: int, flags: int, active: int) -> None:
    device = state.machine.device(dev)
    write(flags, c_uint, device.primary_flags)
    write(active, c_int, int(device.primary is not None))


# ---- Contexts ----


def _checked(flags: int) -> int:
    """Return the flags of a context, if each is one that there is, and at most one says how the host waits."""
    if flags & ~_CONTEXT_FLAGS or flags & _WAYS_TO_WAIT not in (0, 1, 2, 4):
        raise DriverError(Result.INVALID_VALUE, f"{flags:#x} are not the flags of a context")
    return flags


def _context(handle: int) -> Context | GreenContext:
    """Return the context of `handle`, the current one for NULL."""
    if handle:
        return context_behind(handle)
    return current_green() or current_context()


@entry("cuCtxCreate(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)")
def cuCtxCreate(pctx: int, ctxCreateParams: int, flags: int, dev: int) -> None:
    if ctxCreateParams:
        raise DriverError(Result.NOT_SUPPORTED, "the software device has no execution affinity and no CIG contexts")
    device, flags = state.machine.device(dev), _checked(flags)
    if not pctx:
        raise DriverError(Result.INVALID_VALUE)
    context = state.machine.new_context(device, flags)
    write(pctx, c_size_t, context.handle)
    state.machine.thread.contexts.append(context)


@entry("cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)")
def cuCtxCreate_v2(pctx: int, flags: int, dev: int) -> None:
    cuCtxCreate(pctx, 0, flags, dev)


@entry("cuCtxDestroy(CUcontext ctx)")
def cuCtxDestroy(ctx: int) -> None:
    context = state.machine.objects.get(ctx)
    if not isinstance(context, Context) or context is context.device.primary:
        raise DriverError(Result.INVALID_CONTEXT)
    state.machine.destroy_context(context)
    stack = state.machine.thread.contexts
    if stack and stack[-1] is context:
        stack.pop()


@entry("cuCtxPushCurrent(CUcontext ctx)")
def cuCtxPushCurrent(ctx: int) -> None:
    state.machine.thread.contexts.append(context_behind(ctx))


@entry("cuCtxPopCurrent(CUcontext *pctx)")
def cuCtxPopCurrent(pctx: int) -> None:
    stack = state.machine.thread.contexts
    if not stack:
        raise DriverError(Result.INVALID_CONTEXT)
    context = stack.pop()
    if pctx:
        write(pctx, c_size_t, context.handle)


@entry("cuCtxSetCurrent(CUcontext ctx)")
def cuCtxSetCurrent(ctx: int) -> None:
    stack = state.machine.thread.contexts
    if not ctx:
        del stack[-1:]
        return
    stack[-1:] = [context_behind(ctx)]


@entry("cuCtxGetCurrent(CUcontext *pctx)")
def cuCtxGetCurrent(pctx: int) -> None:
    stack = state.machine.thread.contexts
    write(pctx, c_size_t, stack[-1].handle if stack else 0)


@entry("cuCtxGetDevice(CUdevice *device)")
def cuCtxGetDevice(device: int) -> None:
    write(device, c_int, current_context().device.ordinal)


@entry("cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)")
def cuCtxGetDevice_v2(device: int, ctx: int) -> None:
    write(device, c_int, _context(ctx).device.ordinal)


@entry("cuCtxGetFlags(unsigned int *flags)")
def cuCtxGetFlags(flags: int) -> None:
    write(flags, c_uint, current_context().flags)


@entry("cuCtxSetFlags(unsigned int flags)")
def cuCtxSetFlags(flags: int) -> None:
    context = current_context()
    context.flags = _checked(flags)
    if context is context.device.primary:
        context.device.primary_flags = flags


@entry("cuCtxResetPersistingL2Cache()")
def cuCtxResetPersistingL2Cache() -> None:
    current_context()


@entry("cuCtxGetId(CUcontext ctx, unsigned long long *ctxId)")
def cuCtxGetId(ctx: int, ctxId: int) -> None:
    write(ctxId, c_uint64, _context(ctx).serial)


@entry("cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)")
def cuCtxGetApiVersion(ctx: int, version: int) -> None:
    _context(ctx)
    write(version, c_uint, 3020)


@entry("cuCtxSynchronize()")
def cuCtxSynchronize() -> None:
    cuCtxSynchronize_v2(0)


@entry("cuCtxSynchronize_v2(CUcontext ctx)")
def cuCtxSynchronize_v2(ctx: int) -> None:
    # The work of a primary context includes that of its green contexts, which are waited for here all together.
    context = _context(ctx).primary
    state.machine.scheduler.wait_context(context)
    state.machine.scheduler.check(context)


@entry("cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)")
def cuCtxGetStreamPriorityRange(leastPriority: int, greatestPriority: int) -> None:
    current_context()
    if leastPriority:
        write(leastPriority, c_int, 0)
    if greatestPriority:
        write(greatestPriority, c_int, -5)


@entry("cuCtxGetCacheConfig(CUfunc_cache *pconfig)")
def cuCtxGetCacheConfig(pconfig: int) -> None:
    current_context()
    write(pconfig, c_int, 0)


@entry("cuCtxSetCacheConfig(CUfunc_cache config)")
def cuCtxSetCacheConfig(config: int) -> None:
    current_context()


@entry("cuCtxGetLimit(size_t *pvalue, CUlimit limit)")
def cuCtxGetLimit(pvalue: int, limit: int) -> None:
    context = current_context()
    check_limit(limit)
    write(pvalue, c_size_t, context.limits.get(limit, DEFAULT_LIMITS[limit]))


@entry("cuCtxSetLimit(CUlimit limit, size_t value)")
def cuCtxSetLimit(limit: int, value: int) -> None:
    set_limit(current_context(), limit, value)


@entry("cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)")
def cuCtxEnablePeerAccess(peerContext: int, Flags: int) -> None:
    context = current_context()
    peer = context_behind(peerContext)
    if peer.device is context.device:
        raise DriverError(Result.INVALID_CONTEXT)
    if Flags:
        raise DriverError(Result.INVALID_VALUE)
    if peerContext in context.peers:
        raise DriverError(Result.PEER_ACCESS_ALREADY_ENABLED)
    context.peers.add(peerContext)


@entry("cuCtxDisablePeerAccess(CUcontext peerContext)")
def cuCtxDisablePeerAccess(peerContext: int) -> None:
    context = current_context()
    context_behind(peerContext)
    if peerContext not in context.peers:
        raise DriverError(Result.PEER_ACCESS_NOT_ENABLED)
    context.peers.remove(peerContext)
