"""Copies and fills of several rows, between devices, and in batches."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from warm_process import run_python

from cudatool.sim import Result, abi


@pytest.fixture
def memory(driver, ok):
    """Allocate device memory; everything is freed at the end."""
    addresses = []

    def allocate(size):
        addresses.append(ok(driver.cuMemAlloc(size)))
        return addresses[-1]

    yield allocate
    for address in addresses:
        ok(driver.cuMemFree(address))


def upload(driver, ok, address, data):
    ok(driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))


def download(driver, ok, address, shape, dtype=np.uint8):
    data = np.empty(shape, dtype)
    ok(driver.cuMemcpyDtoH(data.ctypes.data, address, data.nbytes))
    return data


def copy_2d(driver, **fields):
    what = driver.CUDA_MEMCPY2D()
    for name, value in fields.items():
        setattr(what, name, value)
    return what


def copy_3d(driver, kind="CUDA_MEMCPY3D", **fields):
    what = getattr(driver, kind)()
    for name, value in fields.items():
        setattr(what, name, value)
    return what


@pytest.fixture
def kinds(driver):
    return driver.CUmemorytype


@pytest.mark.parametrize("is_async", [False, True])
def test_rectangle_is_cut_out_of_pitched_memory(driver, ok, memory, kinds, is_async):
    source = np.arange(8 * 16, dtype=np.uint8).reshape(8, 16)
    upload(driver, ok, address := memory(source.nbytes), source)
    target = np.zeros((3, 8), np.uint8)
    what = copy_2d(
        driver,
        srcMemoryType=kinds.CU_MEMORYTYPE_DEVICE,
        srcDevice=address,
        srcPitch=16,
        srcXInBytes=4,
        srcY=2,
        dstMemoryType=kinds.CU_MEMORYTYPE_HOST,
        dstHost=target.ctypes.data,
        dstPitch=8,
        WidthInBytes=5,
        Height=3,
    )
    if is_async:
        stream = ok(driver.cuStreamCreate(1))
        ok(driver.cuMemcpy2DAsync(what, stream))
        ok(driver.cuStreamDestroy(stream))
    else:
        ok(driver.cuMemcpy2D(what))
    assert (source[2:5, 4:9] == target[:, :5]).all()
    assert (target[:, 5:] == 0).all()


def test_box_moves_between_layouts_of_a_device(driver, ok, memory, kinds):
    source = np.arange(4 * 6 * 10, dtype=np.uint8).reshape(4, 6, 10)
    upload(driver, ok, address := memory(source.nbytes), source)
    ok(driver.cuMemsetD8(target := memory(3 * 3 * 8), 0, 72))
    what = copy_3d(
        driver,
        srcMemoryType=kinds.CU_MEMORYTYPE_DEVICE,
        srcDevice=address,
        srcPitch=10,
        srcHeight=6,
        srcXInBytes=3,
        srcY=1,
        srcZ=1,
        dstMemoryType=kinds.CU_MEMORYTYPE_UNIFIED,
        dstDevice=target,
        dstPitch=8,
        dstHeight=3,
        WidthInBytes=7,
        Height=2,
        Depth=3,
    )
    ok(driver.cuMemcpy3D(what))
    found = download(driver, ok, target, (3, 3, 8))
    expected = np.zeros_like(found)
    expected[:, :2, :7] = source[1:4, 1:3, 3:10]
    assert (expected == found).all()


def test_rows_of_a_pageable_source_are_read_when_the_copy_is_enqueued(driver, ok, memory, kinds):
    source = np.full((4, 8), 7, np.uint8)
    target = memory(32)
    what = copy_2d(
        driver,
        srcMemoryType=kinds.CU_MEMORYTYPE_HOST,
        srcHost=source.ctypes.data,
        srcPitch=8,
        dstMemoryType=kinds.CU_MEMORYTYPE_DEVICE,
        dstDevice=target,
        dstPitch=4,
        WidthInBytes=4,
        Height=4,
    )
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuMemcpy2DAsync(what, stream))
    source[:] = 9
    ok(driver.cuStreamSynchronize(stream))
    assert (download(driver, ok, target, 16) == 7).all()
    ok(driver.cuStreamDestroy(stream))


def test_boxes_of_an_array_are_written_and_read(driver, ok, kinds):
    description = driver.CUDA_ARRAY3D_DESCRIPTOR()
    description.Width, description.Height, description.Depth = 4, 3, 2
    description.Format, description.NumChannels = driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT16, 2
    array = ok(driver.cuArray3DCreate(description))
    source = np.arange(4 * 3 * 2 * 2, dtype=np.uint16)
    host = {"srcMemoryType": kinds.CU_MEMORYTYPE_HOST, "srcHost": source.ctypes.data, "srcPitch": 16, "srcHeight": 3}
    into = {"dstMemoryType": kinds.CU_MEMORYTYPE_ARRAY, "dstArray": array}
    ok(driver.cuMemcpy3D(copy_3d(driver, WidthInBytes=16, Height=3, Depth=2, **host, **into)))
    target = np.zeros((1, 2, 4), np.uint16)
    what = copy_3d(
        driver,
        srcMemoryType=kinds.CU_MEMORYTYPE_ARRAY,
        srcArray=array,
        srcXInBytes=8,
        srcY=1,
        srcZ=1,
        dstMemoryType=kinds.CU_MEMORYTYPE_HOST,
        dstHost=target.ctypes.data,
        dstPitch=8,
        dstHeight=2,
        WidthInBytes=8,
        Height=2,
        Depth=1,
    )
    ok(driver.cuMemcpy3D(what))
    assert (source.reshape(2, 3, 8)[1, 1:3, 4:8] == target[0]).all()
    what.srcY = 2
    assert driver.cuMemcpy3D(what)[0].name == "CUDA_ERROR_INVALID_VALUE"
    ok(driver.cuArrayDestroy(array))
    assert driver.cuMemcpy3D(what)[0].name == "CUDA_ERROR_INVALID_HANDLE"


def test_levels_of_a_mipmapped_array_halve_and_hold_what_is_copied(driver, ok, kinds):
    description = driver.CUDA_ARRAY3D_DESCRIPTOR()
    description.Width, description.Height = 8, 4
    description.Format, description.NumChannels = driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8, 1
    mipmap = ok(driver.cuMipmappedArrayCreate(description, 9))
    levels = [ok(driver.cuMipmappedArrayGetLevel(mipmap, level)) for level in range(4)]
    sizes = [(d.Width, d.Height) for d in (ok(driver.cuArrayGetDescriptor(level)) for level in levels)]
    assert [(8, 4), (4, 2), (2, 1), (1, 1)] == sizes
    assert driver.cuMipmappedArrayGetLevel(mipmap, 4)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert driver.cuArrayDestroy(levels[1])[0].name == "CUDA_ERROR_INVALID_HANDLE"
    data = np.arange(32, dtype=np.uint8)
    for level, (width, height) in zip(levels, sizes, strict=True):
        ok(driver.cuMemcpyHtoA(level, 0, data.ctypes.data + width, width * height))
    found = np.zeros(8, np.uint8)
    ok(driver.cuMemcpyAtoH(found.ctypes.data, levels[1], 0, 8))
    assert (data[4:12] == found).all()
    ok(driver.cuMipmappedArrayDestroy(mipmap))
    assert driver.cuArrayGetDescriptor(levels[0])[0].name == "CUDA_ERROR_INVALID_HANDLE"


@pytest.mark.parametrize(
    "wrong",
    [{"srcPitch": 7}, {"dstPitch": 7}, {"srcMemoryType": 9}, {"srcPitch": 1 << 31}, {"srcDevice": 0x1000}],
    ids=lambda fields: "".join(fields),
)
def test_rectangle_that_cannot_be_copied_is_invalid(driver, ok, memory, kinds, wrong):
    fields = {
        "srcMemoryType": kinds.CU_MEMORYTYPE_DEVICE,
        "srcDevice": memory(64),
        "srcPitch": 8,
        "dstMemoryType": kinds.CU_MEMORYTYPE_DEVICE,
        "dstDevice": memory(64),
        "dstPitch": 8,
        "WidthInBytes": 8,
        "Height": 8,
    }
    ok(driver.cuMemcpy2D(copy_2d(driver, **fields)))
    what = copy_2d(driver, **fields)
    for name, value in wrong.items():
        if name == "srcMemoryType":  # the bindings take members of the enumeration only
            ctypes.c_int.from_address(what.getPtr() + 16).value = value
        else:
            setattr(what, name, value)
    assert driver.cuMemcpy2D(what)[0].name == "CUDA_ERROR_INVALID_VALUE"


@pytest.mark.parametrize(("bits", "value"), [(8, 0x5A), (16, 0x1234), (32, 0x01020304)])
def test_fill_of_rows_leaves_the_gaps(driver, ok, memory, bits, value):
    dtype = np.dtype(f"u{bits // 8}")
    address = memory(4 * 8 * dtype.itemsize)
    ok(driver.cuMemsetD8(address, 0xFF, 4 * 8 * dtype.itemsize))
    ok(getattr(driver, f"cuMemsetD2D{bits}")(address, 8 * dtype.itemsize, value, 5, 4))
    found = download(driver, ok, address, (4, 8), dtype)
    assert (found[:, :5] == value).all()
    assert (found[:, 5:] == np.iinfo(dtype).max).all()
    narrow = getattr(driver, f"cuMemsetD2D{bits}")(address, 4 * dtype.itemsize, value, 5, 4)
    assert narrow[0].name == "CUDA_ERROR_INVALID_VALUE"


def batch_attributes(driver, order):
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = getattr(driver.CUmemcpySrcAccessOrder, f"CU_MEMCPY_SRC_ACCESS_ORDER_{order}")
    return attributes


def test_batch_copies_every_range(driver, ok, memory):
    sources = [memory(16) for _ in range(3)]
    targets = [memory(16) for _ in range(3)]
    for number, address in enumerate(sources):
        ok(driver.cuMemsetD8(address, number + 1, 16))
    stream = ok(driver.cuStreamCreate(0))
    attributes = [batch_attributes(driver, "STREAM")]
    ok(driver.cuMemcpyBatchAsync(targets, sources, [4, 8, 16], 3, attributes, [0], 1, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert [bytes([1] * 4), bytes([2] * 8), bytes([3] * 16)] == [
        download(driver, ok, target, size).tobytes() for target, size in zip(targets, (4, 8, 16), strict=True)
    ]
    ok(driver.cuStreamDestroy(stream))


@pytest.mark.parametrize(("order", "seen"), [("STREAM", 2), ("DURING_API_CALL", 1)])
def test_source_of_a_batch_is_read_when_its_attributes_say(driver, ok, memory, order, seen):
    pinned = ok(driver.cuMemAllocHost(16))
    ctypes.memset(int(pinned), 1, 16)
    target, source = memory(16), driver.CUdeviceptr(int(pinned))
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuMemcpyBatchAsync([target], [source], [16], 1, [batch_attributes(driver, order)], [0], 1, stream))
    ctypes.memset(int(pinned), 2, 16)
    ok(driver.cuStreamSynchronize(stream))
    assert bytes([seen] * 16) == download(driver, ok, target, 16).tobytes()
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuMemFreeHost(pinned))


def test_batch_that_makes_no_sense_is_invalid(driver, ok, memory):
    target, source = memory(16), memory(16)
    stream = ok(driver.cuStreamCreate(0))
    attributes = batch_attributes(driver, "STREAM")

    def batch(size=16, indices=(0,), where=stream):
        many = [attributes] * len(indices)
        return driver.cuMemcpyBatchAsync([target], [source], [size], 1, many, list(indices), len(indices), where)[
            0
        ].name

    assert ["CUDA_SUCCESS", *["CUDA_ERROR_INVALID_VALUE"] * 4] == [
        batch(),
        batch(size=0),
        batch(indices=(1,)),
        batch(indices=(0, 0)),
        batch(where=0),
    ]
    ok(driver.cuStreamDestroy(stream))


# ---- In graphs ----


@pytest.fixture
def captured(driver, ok):
    """Return a function that captures calls in a stream, runs the graph, and returns how many nodes it has."""

    def run(enqueue):
        stream = ok(driver.cuStreamCreate(1))
        ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(2)))
        enqueue(stream)
        graph = ok(driver.cuStreamEndCapture(stream))
        number = ok(driver.cuGraphGetNodes(graph, 0))[1]
        edges = ok(driver.cuGraphGetEdges(graph, 0))[3]
        executable = ok(driver.cuGraphInstantiate(graph, 0))
        ok(driver.cuGraphLaunch(executable, stream))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuGraphExecDestroy(executable))
        ok(driver.cuGraphDestroy(graph))
        ok(driver.cuStreamDestroy(stream))
        return number, edges

    return run


def test_copies_of_a_captured_batch_are_beside_each_other(driver, ok, memory, captured):
    source, targets = memory(16), [memory(16) for _ in range(3)]
    attributes = [batch_attributes(driver, "STREAM")]

    def enqueue(stream):
        ok(driver.cuMemsetD8Async(source, 7, 16, stream))
        ok(driver.cuMemcpyBatchAsync(targets, [source] * 3, [16] * 3, 3, attributes, [0], 1, stream))
        ok(driver.cuMemsetD8Async(source, 8, 16, stream))

    assert captured(enqueue) == (5, 6)  # each copy after the first fill, the second fill after each copy
    for target in targets:
        assert (download(driver, ok, target, 16) == 7).all()


def test_rectangles_and_peer_copies_are_captured(driver, ok, memory, captured, kinds):
    source, target, other = memory(64), memory(64), memory(64)
    upload(driver, ok, source, np.arange(64, dtype=np.uint8))
    ok(driver.cuMemsetD8(target, 0, 64))
    context = ok(driver.cuCtxGetCurrent())
    device = kinds.CU_MEMORYTYPE_DEVICE
    plane = {"srcMemoryType": device, "srcPitch": 8, "srcXInBytes": 2, "dstMemoryType": device, "dstPitch": 8}
    plane |= {"srcDevice": source, "dstDevice": target, "WidthInBytes": 3, "Height": 2}
    box = plane | {"srcDevice": target, "dstDevice": other, "srcXInBytes": 0, "Depth": 1}
    box |= {"srcContext": context, "dstContext": context, "srcHeight": 2, "dstHeight": 2}

    def enqueue(stream):
        ok(driver.cuMemcpy2DAsync(copy_2d(driver, **plane), stream))
        ok(driver.cuMemcpyPeerAsync(other, context, source, context, 64, stream))
        ok(driver.cuMemcpy3DPeerAsync(copy_3d(driver, "CUDA_MEMCPY3D_PEER", **box), stream))
        stale = driver.cuMemcpyPeerAsync(other, driver.CUcontext(4711), source, context, 64, stream)[0]
        assert stale.name == "CUDA_ERROR_INVALID_CONTEXT"

    assert captured(enqueue) == (3, 2)
    expected = np.arange(64, dtype=np.uint8)
    expected[0:3], expected[8:11] = [2, 3, 4], [10, 11, 12]
    assert (download(driver, ok, other, 64) == expected).all()


def test_null_description_of_a_copy_is_invalid_in_a_capture_too(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(2)))
    assert "INVALID_VALUE" == entry("cuMemcpy2DAsync", 0, int(stream))
    assert "INVALID_VALUE" == entry("cuMemcpy3DAsync", 0, int(stream))
    ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(stream))))
    assert "INVALID_VALUE" == entry("cuMemcpy3D", 0)
    ok(driver.cuStreamDestroy(stream))


def entry(name, *arguments):
    """Call an entry point with what the bindings do not pass on; return the name of its result."""
    return Result(abi.invoke(abi.ENTRIES[name], arguments, 1)).name


# ---- What checkers see ----


@pytest.fixture
def uninitialized(machine):
    """Return a function that tells how many bytes of a range were never written."""
    machine.check(["initcheck", "memcheck"])
    shadow = machine.checkers.shadow

    def count(address, size):
        first = int(address) - shadow.base
        return int((shadow._init.view[first : first + size] == 0).sum())

    yield count
    machine.check([])


def test_every_kind_of_copy_says_what_it_initializes(driver, ok, uninitialized, memory, kinds):
    target, blank, full = memory(64), memory(64), memory(64)
    ok(driver.cuMemsetD8(full, 1, 64))
    device = kinds.CU_MEMORYTYPE_DEVICE
    plane = {"srcMemoryType": device, "srcPitch": 8, "dstMemoryType": device, "dstPitch": 8, "Height": 4}
    plane |= {"srcDevice": full, "dstDevice": target, "WidthInBytes": 3}
    ok(driver.cuMemcpy2D(copy_2d(driver, **plane)))
    ok(driver.cuCtxSynchronize())
    assert 64 - 4 * 3 == uninitialized(target, 64)
    ok(driver.cuMemsetD2D16(target, 8, 5, 2, 4))
    ok(driver.cuCtxSynchronize())
    assert 64 - 4 * 4 == uninitialized(target, 64)
    stream = ok(driver.cuStreamCreate(1))
    attributes = [batch_attributes(driver, "STREAM")]
    ok(driver.cuMemcpyBatchAsync([target], [full], [64], 1, attributes, [0], 1, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert 0 == uninitialized(target, 64)
    context = ok(driver.cuCtxGetCurrent())
    ok(driver.cuMemcpyPeer(target, context, blank, context, 32))
    ok(driver.cuCtxSynchronize())
    assert 32 == uninitialized(target, 64)  # uninitialized values are copied, too
    ok(driver.cuStreamDestroy(stream))


def test_copy_beyond_an_allocation_is_found_with_its_address(driver, machine, uninitialized, memory, kinds):
    source, target = memory(64), memory(60)
    device = kinds.CU_MEMORYTYPE_DEVICE
    plane = {"srcMemoryType": device, "srcPitch": 8, "dstMemoryType": device, "dstPitch": 8, "Height": 8}
    plane |= {"srcDevice": source, "dstDevice": target, "WidthInBytes": 8}
    assert driver.cuMemcpy2D(copy_2d(driver, **plane))[0].name == "CUDA_ERROR_INVALID_VALUE"
    found = machine.checkers.explain_call("cuMemcpy2D", 0)
    assert ("invalid-copy", int(target)) == (found.kind, found.address)


# ---- Two devices ----

_TWO_DEVICES = """
import numpy as np
from cudatool import _driver
_driver.choose("sim:count=2")
_driver.initialize()
from cuda.bindings import driver

def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]

ok(driver.cuInit(0))
contexts = [ok(driver.cuDevicePrimaryCtxRetain(n)) for n in range(2)]
memory = []
for number, context in enumerate(contexts):
    ok(driver.cuCtxSetCurrent(context))
    memory.append(ok(driver.cuMemAlloc(64)))
    ok(driver.cuMemsetD8(memory[-1], number + 1, 64))
    ok(driver.cuCtxSynchronize())

def bytes_of(number):
    found = np.zeros(64, np.uint8)
    ok(driver.cuMemcpyDtoH(found.ctypes.data, memory[number], 64))
    return found.tolist()

ok(driver.cuMemcpyPeer(memory[1], contexts[1], memory[0], contexts[0], 8))
assert bytes_of(1) == [1] * 8 + [2] * 56

stream = ok(driver.cuStreamCreate(1))
ok(driver.cuMemcpyPeerAsync(int(memory[0]) + 32, contexts[0], int(memory[1]) + 32, contexts[1], 8, stream))
what = driver.CUDA_MEMCPY3D_PEER()
what.srcMemoryType = what.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
what.srcDevice, what.srcContext, what.srcPitch, what.srcHeight = memory[1], contexts[1], 8, 8
what.dstDevice, what.dstContext, what.dstPitch, what.dstHeight = memory[0], contexts[0], 8, 8
what.srcY, what.dstY, what.WidthInBytes, what.Height, what.Depth = 7, 7, 4, 1, 1
ok(driver.cuMemcpy3DPeerAsync(what, stream))
ok(driver.cuStreamSynchronize(stream))
assert bytes_of(0) == [1] * 32 + [2] * 8 + [1] * 16 + [2] * 4 + [1] * 4

assert ok(driver.cuDeviceCanAccessPeer(0, 1)) == 1
assert ok(driver.cuDeviceCanAccessPeer(1, 1)) == 0
disabled = driver.cuCtxDisablePeerAccess(contexts[0])[0]
assert disabled.name == "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"
ok(driver.cuCtxEnablePeerAccess(contexts[0], 0))
assert driver.cuCtxEnablePeerAccess(contexts[0], 0)[0].name == "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"
assert driver.cuCtxEnablePeerAccess(contexts[1], 0)[0].name == "CUDA_ERROR_INVALID_CONTEXT"
ok(driver.cuCtxDisablePeerAccess(contexts[0]))

# Memory of a pool is in the reach of those devices only that were given access.
pool = ok(driver.cuDeviceGetDefaultMemPool(0))
pooled = ok(driver.cuMemAllocFromPoolAsync(64, pool, stream))
managed = ok(driver.cuMemAllocManaged(64, 1))
refused = driver.cuMemcpyAsync(managed, pooled, 64, stream)[0]
assert refused.name == "CUDA_ERROR_INVALID_VALUE", refused
ok(driver.cuMemcpyPeerAsync(memory[1], contexts[1], pooled, contexts[0], 8, stream))
access = driver.CUmemAccessDesc()
access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
access.location.id, access.flags = 1, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
ok(driver.cuMemPoolSetAccess(pool, [access], 1))
ok(driver.cuMemcpyAsync(managed, pooled, 64, stream))
ok(driver.cuStreamSynchronize(stream))
print("done")
"""


def test_copies_between_two_devices():
    found = run_python(_TWO_DEVICES)
    assert "done\n" == found.stdout, found.stderr


# ---- Boxes by elements ----


def box_operation(driver, source, target, extent):
    what = driver.CUDA_MEMCPY3D_BATCH_OP()
    for operand, given in ((what.src, source), (what.dst, target)):
        kinds = driver.CUmemcpy3DOperandType
        if isinstance(given, tuple):
            operand.type = kinds.CU_MEMCPY_OPERAND_TYPE_ARRAY
            operand.op.array.array = given[0]
            operand.op.array.offset.x, operand.op.array.offset.y, operand.op.array.offset.z = given[1:]
        else:
            operand.type = kinds.CU_MEMCPY_OPERAND_TYPE_POINTER
            operand.op.ptr.ptr = given
    what.extent.width, what.extent.height, what.extent.depth = extent
    what.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return what


@pytest.fixture
def array(driver, ok):
    """An array of 4 x 3 x 2 pairs of 16-bit numbers."""
    description = driver.CUDA_ARRAY3D_DESCRIPTOR()
    description.Width, description.Height, description.Depth = 4, 3, 2
    description.Format, description.NumChannels = driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT16, 2
    made = ok(driver.cuArray3DCreate(description))
    yield made
    ok(driver.cuArrayDestroy(made))


@pytest.mark.parametrize("is_captured", [False, True])
def test_batch_of_boxes_counts_in_elements_of_arrays(driver, ok, memory, array, captured, is_captured):
    data = np.arange(4 * 3 * 2 * 2, dtype=np.uint16)
    source, target, copy = memory(data.nbytes), memory(2 * 2 * 4), memory(8)
    upload(driver, ok, source, data)
    whole = box_operation(driver, source, (array, 0, 0, 0), (4, 3, 2))
    corner = box_operation(driver, (array, 2, 1, 1), target, (2, 2, 1))
    bytes_ = box_operation(driver, source, copy, (8, 1, 1))

    def enqueue(stream):
        ok(driver.cuMemcpy3DBatchAsync(1, [whole], 0, stream))
        ok(driver.cuMemcpy3DBatchAsync(2, [corner, bytes_], 0, stream))

    if is_captured:
        assert captured(enqueue) == (3, 2)
    else:
        stream = ok(driver.cuStreamCreate(1))
        enqueue(stream)
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuStreamDestroy(stream))
    assert (data.reshape(2, 3, 8)[1, 1:3, 4:8] == download(driver, ok, target, (2, 4), np.uint16)).all()
    assert (data[:4] == download(driver, ok, copy, 4, np.uint16)).all()


def test_box_of_elements_that_makes_no_sense_is_invalid(driver, ok, memory, array):
    source, target = memory(64), memory(64)
    stream = ok(driver.cuStreamCreate(1))

    def copy(what, flags=0, where=stream):
        return driver.cuMemcpy3DBatchAsync(1, [what], flags, where)[0].name.removeprefix("CUDA_ERROR_")

    fine = box_operation(driver, source, target, (4, 4, 4))
    assert "CUDA_SUCCESS" == copy(fine)
    ok(driver.cuMemcpy3DWithAttributesAsync(fine, 0, stream))
    assert ["INVALID_VALUE"] * 5 == [
        copy(fine, flags=1),
        copy(fine, where=0),
        copy(box_operation(driver, source, target, (4, 0, 4))),
        copy(box_operation(driver, source, target, (5, 4, 4))),
        copy(box_operation(driver, source, (array, 3, 0, 0), (2, 1, 1))),
    ]
    fine.src.op.ptr.rowLength = 3
    assert "INVALID_VALUE" == copy(fine)
    ok(driver.cuStreamDestroy(stream))
