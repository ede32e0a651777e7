"""Batch memory operation nodes of graphs: values written to memory, and waited for."""

from __future__ import annotations

import ctypes

import pytest

WAIT_EQ, INVALID = 1, "CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def words(driver, ok):
    """Four words of device memory, zeros."""
    address = ok(driver.cuMemAlloc(16))
    ok(driver.cuMemsetD32(address, 0, 4))
    yield int(address)
    driver.cuMemFree(address)  # a test may have freed it


@pytest.fixture
def stream(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    yield stream
    ok(driver.cuStreamDestroy(stream))


def write(driver, address, value, flags=0):
    one = driver.CUstreamBatchMemOpParams()
    one.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    one.writeValue.operation = one.operation
    one.writeValue.address, one.writeValue.value, one.writeValue.flags = driver.CUdeviceptr(address), value, flags
    return one


def wait(driver, address, value, flags=WAIT_EQ):
    one = driver.CUstreamBatchMemOpParams()
    one.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    one.waitValue.operation = one.operation
    one.waitValue.address, one.waitValue.value, one.waitValue.flags = driver.CUdeviceptr(address), value, flags
    return one


def batch(driver, ok, *operations):
    params = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx, params.count, params.paramArray = ok(driver.cuCtxGetCurrent()), len(operations), list(operations)
    return params


def read(driver, ok, address):
    found = (ctypes.c_uint32 * 4)()
    ok(driver.cuMemcpyDtoH(ctypes.addressof(found), address, 16))
    return list(found)


def test_a_node_writes_values_one_after_the_other(driver, ok, words, stream):
    graph = ok(driver.cuGraphCreate(0))
    params = batch(driver, ok, write(driver, words, 5), write(driver, words + 4, 6), write(driver, words, 7))
    node = ok(driver.cuGraphAddBatchMemOpNode(graph, [], 0, params))
    assert int(ok(driver.cuGraphNodeGetType(node))) == 12
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert read(driver, ok, words) == [7, 6, 0, 0]
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


def test_a_node_that_waits_lets_another_stream_run_first(driver, ok, words, stream):
    graph = ok(driver.cuGraphCreate(0))
    first = ok(driver.cuGraphAddBatchMemOpNode(graph, [], 0, batch(driver, ok, wait(driver, words, 9))))
    ok(driver.cuGraphAddBatchMemOpNode(graph, [first], 1, batch(driver, ok, write(driver, words + 4, 1))))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    other = ok(driver.cuStreamCreate(1))
    assert driver.cuStreamQuery(stream)[0].name == "CUDA_ERROR_NOT_READY"
    ok(driver.cuStreamWriteValue32(other, words, 9, 0))
    ok(driver.cuStreamSynchronize(stream))
    assert read(driver, ok, words)[1] == 1
    ok(driver.cuStreamDestroy(other))
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


def test_parameters_are_read_and_set(driver, ok, words, stream):
    graph = ok(driver.cuGraphCreate(0))
    node = ok(driver.cuGraphAddBatchMemOpNode(graph, [], 0, batch(driver, ok, write(driver, words, 5))))
    found = ok(driver.cuGraphBatchMemOpNodeGetParams(node))
    assert found.count == 1
    assert int(found.ctx) == int(ok(driver.cuCtxGetCurrent()))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    changed = batch(driver, ok, write(driver, words, 50), write(driver, words + 8, 51))
    ok(driver.cuGraphExecBatchMemOpNodeSetParams(executable, node, changed))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert read(driver, ok, words) == [50, 0, 51, 0]
    assert ok(driver.cuGraphBatchMemOpNodeGetParams(node)).count == 1  # the graph's own stays
    ok(driver.cuGraphBatchMemOpNodeSetParams(node, changed))
    assert ok(driver.cuGraphBatchMemOpNodeGetParams(node)).count == 2
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


def test_calls_in_a_stream_that_captures_become_nodes(driver, ok, words, stream):
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    ok(driver.cuStreamWriteValue32(stream, words, 3, 0))
    ok(driver.cuStreamWaitValue32(stream, words, 3, WAIT_EQ))
    ok(driver.cuStreamWriteValue64(stream, words + 8, 1 << 32, 0))
    ok(driver.cuStreamBatchMemOp(stream, 1, [write(driver, words + 4, 4)], 0))
    graph = ok(driver.cuStreamEndCapture(stream))
    nodes, count = ok(driver.cuGraphGetNodes(graph, 8))
    assert [int(ok(driver.cuGraphNodeGetType(node))) for node in nodes[:count]] == [12] * 4
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert read(driver, ok, words) == [3, 4, 0, 1]
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


def test_what_no_stream_may_do_no_node_may(driver, ok, words):
    graph = ok(driver.cuGraphCreate(0))
    for wrong in (write(driver, words + 1, 1), write(driver, words, 1, flags=2), wait(driver, words, 1, flags=4)):
        assert driver.cuGraphAddBatchMemOpNode(graph, [], 0, batch(driver, ok, wrong))[0].name == INVALID
    flagged = batch(driver, ok, write(driver, words, 1))
    flagged.flags = 1
    assert driver.cuGraphAddBatchMemOpNode(graph, [], 0, flagged)[0].name == INVALID
    assert ok(driver.cuGraphGetNodes(graph, 8))[1] == 0
    ok(driver.cuGraphDestroy(graph))


def test_a_value_in_memory_that_was_freed_ends_the_context(driver, ok, words, stream):
    context = ok(driver.cuCtxCreate(None, 0, 0))
    address = ok(driver.cuMemAlloc(16))
    graph = ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphAddBatchMemOpNode(graph, [], 0, batch(driver, ok, write(driver, int(address), 5))))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuMemFree(address))
    own = ok(driver.cuStreamCreate(1))
    ok(driver.cuGraphLaunch(executable, own))
    assert driver.cuStreamSynchronize(own)[0].name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)
    ok(driver.cuCtxDestroy(context))
