"""Graphs through cuda.core: definitions, builders, conditions."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest


@pytest.fixture
def core(machine):
    """The device and the kernels of graph_programs; nothing may be left."""
    from cuda.core import Device, ObjectCode
    from graph_programs import PTX

    gc.collect()
    before = len(machine.allocations)
    device = Device(0)
    device.set_current()
    yield device, ObjectCode.from_ptx(PTX)
    device.sync()
    for _ in range(500):  # cuda.core drops what graphs held a little later, on the main thread
        gc.collect()
        if len(machine.allocations) <= before:
            break
        time.sleep(0.01)
    assert before == len(machine.allocations)


@pytest.fixture
def number(core):
    """A pinned number that is 0, as an array."""
    from cuda.core import LegacyPinnedMemoryResource

    buffer = LegacyPinnedMemoryResource().allocate(4)
    array = np.from_dlpack(buffer).view(np.int32)
    array[0] = 0
    yield array
    del array
    buffer.close()


def affine(target, code, number, m, b):
    """Launch number = number * m + b."""
    from cuda.core import LaunchConfig, launch

    kernel = code.get_kernel("affine")
    launch(target, LaunchConfig(grid=1, block=1), kernel, number.ctypes.data, np.uint32(m), np.uint32(b))


def test_builder_captures_and_its_graph_runs(core, number):
    device, code = core
    stream = device.create_stream()
    builder = stream.create_graph_builder().begin_building()
    affine(builder, code, number, 1, 2)
    affine(builder, code, number, 3, 1)
    graph = builder.end_building().complete()
    assert 0 == number[0]
    for _ in range(2):
        graph.launch(stream)
    stream.sync()
    assert [((0 + 2) * 3 + 1 + 2) * 3 + 1] == number.tolist()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_builder_that_is_split_and_joined_keeps_the_order(core, number, schedule, mode):
    from cuda.core.graph import GraphBuilder

    device, code = core
    stream = device.create_stream()
    builder = device.create_graph_builder().begin_building(mode)
    affine(builder, code, number, 1, 1)
    left, right = builder.split(2)
    affine(left, code, number, 5, 0)
    seen = []
    right.callback(lambda: seen.append("right"))
    joined = GraphBuilder.join(left, right)
    joined.callback(lambda: seen.append("joined"))
    affine(joined, code, number, 1, 3)
    graph = joined.end_building().complete()
    graph.launch(stream)
    stream.sync()
    assert ([1 * 5 + 3], ["right", "joined"]) == (number.tolist(), seen)


def test_builder_embeds_another_and_updates(core, number):
    device, code = core
    stream = device.create_stream()

    def build(addend):
        child = device.create_graph_builder().begin_building()
        affine(child, code, number, 1, addend)
        child.end_building()
        parent = device.create_graph_builder().begin_building()
        parent.embed(child)
        return parent.end_building()

    graph = build(2).complete()
    graph.update(build(40))
    graph.launch(stream)
    stream.sync()
    assert [40] == number.tolist()


@pytest.mark.parametrize(("value", "expected"), [(0, 7), (1, 5)])
def test_builder_with_two_branches_runs_one(core, number, value, expected):
    from cuda.core import LaunchConfig, launch

    device, code = core
    stream = device.create_stream()
    builder = device.create_graph_builder().begin_building()
    condition = builder.create_condition()
    launch(builder, LaunchConfig(grid=1, block=1), code.get_kernel("set_value"), condition, np.uint32(value))
    for branch, result in zip(builder.if_else(condition), (5, 7), strict=True):
        affine(branch.begin_building(), code, number, 0, result)
        branch.end_building()
    graph = builder.end_building().complete()
    graph.launch(stream)
    stream.sync()
    assert [expected] == number.tolist()


def test_memory_of_a_builder_is_there_while_its_graph_runs(core, number):
    from cuda.core import GraphMemoryResource

    device, code = core
    stream = device.create_stream()
    builder = device.create_graph_builder().begin_building()
    buffer = GraphMemoryResource(device).allocate(4, stream=builder)
    buffer.fill(np.int32(6), stream=builder)
    from cuda.core import LaunchConfig, launch

    kernel = code.get_kernel("affine")
    launch(builder, LaunchConfig(grid=1, block=1), kernel, int(buffer.handle), np.uint32(2), np.uint32(1))
    out = device.memory_resource.allocate(4, stream=stream)
    out.copy_from(buffer, stream=builder)
    buffer.close(stream=builder)
    graph = builder.end_building().complete()
    graph.launch(stream)
    from cuda.bindings import driver

    stream.sync()
    driver.cuMemcpyDtoH(number.ctypes.data, int(out.handle), 4)
    assert [13] == number.tolist()
    out.close()


def test_graph_definition_of_cuda_core_runs(core, schedule):
    from cuda.core import LaunchConfig
    from cuda.core.graph import GraphDefinition

    device, code = core
    stream = device.create_stream()
    config = LaunchConfig(grid=1, block=1)
    definition = GraphDefinition()
    memory = definition.allocate(8)
    start = memory.memset(memory.dptr, 0, 8)
    left = start.launch(config, code.get_kernel("affine"), memory.dptr, np.uint32(1), np.uint32(2))
    right = start.launch(config, code.get_kernel("affine"), memory.dptr + 4, np.uint32(1), np.uint32(3))
    out = device.memory_resource.allocate(8, stream=stream)
    joined = left.join(right)
    joined.memcpy(int(out.handle), memory.dptr, 8).deallocate(memory.dptr)
    graph = definition.instantiate()
    graph.launch(stream)
    stream.sync()
    found = np.zeros(2, np.int32)
    from cuda.bindings import driver

    driver.cuMemcpyDtoH(found.ctypes.data, int(out.handle), 8)
    assert [2, 3] == found.tolist()
    out.close()
    graph.close()


def test_failed_call_of_cuda_core_raises_its_own_error(core):
    """Destructors that call the driver on the way out must not lose the exception."""
    from cuda.core import LaunchConfig
    from cuda.core._utils.cuda_utils import CUDAError
    from cuda.core.graph import GraphDefinition

    _device, code = core
    with pytest.raises(CUDAError, match="CUDA_ERROR_INVALID_VALUE"):
        GraphDefinition().launch(LaunchConfig(grid=1, block=2048), code.get_kernel("affine"), 0, 0, 0)
