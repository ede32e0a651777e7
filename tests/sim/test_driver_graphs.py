"""Graphs that are built node by node: structure, parameters, launches, updates, and the errors of misuse."""

from __future__ import annotations

import ctypes
import re

import pytest

from cudatool.sim.graph.model import Update

IF, WHILE, SWITCH = 0, 1, 2
AUTO_FREE, DEVICE_LAUNCH, USE_NODE_PRIORITY = 1, 4, 8


def handles(nodes):
    return [int(node) for node in nodes]


def name(answer):
    return answer[0].name.removeprefix("CUDA_")


def update_failure(executable, graph):
    """Return why and where an update fails: what cuda.bindings does not give back when a call fails."""
    from cudatool.sim.api.graph_exec import cuGraphExecUpdate
    from cudatool.sim.results import DriverError

    info = (ctypes.c_uint64 * 3)()  # the result, in 4 bytes, and two nodes
    with pytest.raises(DriverError) as error:
        cuGraphExecUpdate(int(executable), int(graph), ctypes.addressof(info))
    assert "GRAPH_EXEC_UPDATE_FAILURE" == error.value.result.name
    return Update(info[0] & 0xFFFFFFFF).name, info[1], info[2]


def diamond(programs):
    """Return nodes a, b, c, d that make number 0 one, number 1 two, number 2 three times that, number 3 their sum."""
    a = programs.affine(1, 1)
    b = programs.affine(0, 2, at=1, after=[a])
    c = programs.affine(0, 3, at=2, after=[a])
    d = programs.affine(0, 5, at=3, after=[b, c])
    return a, b, c, d


# ---- Structure ----


def test_nodes_edges_and_roots_are_what_was_added(driver, ok, programs):
    a, b, c, d = diamond(programs)
    graph = programs.graph
    assert handles([a, b, c, d]) == handles(ok(driver.cuGraphGetNodes(graph, 4))[0])
    assert [int(a)] == handles(ok(driver.cuGraphGetRootNodes(graph, 1))[0])
    sources, targets, _data, _count = ok(driver.cuGraphGetEdges(graph, 4))
    edges = set(zip(handles(sources), handles(targets), strict=True))
    assert {(int(a), int(b)), (int(a), int(c)), (int(b), int(d)), (int(c), int(d))} == edges
    assert handles([b, c]) == handles(ok(driver.cuGraphNodeGetDependencies(d, 2))[0])
    assert handles([b, c]) == handles(ok(driver.cuGraphNodeGetDependentNodes(a, 2))[0])
    assert 0 == ok(driver.cuGraphNodeGetType(a))
    assert [0, 3] == [ok(driver.cuGraphNodeGetLocalId(node)) for node in (a, d)]
    assert int(graph) == int(ok(driver.cuGraphNodeGetContainingGraph(a)))


def test_asking_for_nodes_without_room_gives_their_number_and_too_much_room_is_filled_with_null(driver, ok, programs):
    node = programs.affine(1, 1)
    assert 1 == ok(driver.cuGraphGetNodes(programs.graph))[1]
    nodes, count = ok(driver.cuGraphGetNodes(programs.graph, 3))
    assert ([int(node)], 1) == (handles(nodes[:1]), count)


def test_edges_are_added_and_removed(driver, ok, programs):
    a, b = programs.affine(1, 1), programs.affine(2, 0, at=0)
    ok(driver.cuGraphAddDependencies(programs.graph, [a], [b], None, 1))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphAddDependencies(programs.graph, [a], [b], None, 1))
    assert 1 == ok(driver.cuGraphGetEdges(programs.graph))[3]
    ok(driver.cuGraphRemoveDependencies(programs.graph, [a], [b], None, 1))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphRemoveDependencies(programs.graph, [a], [b], None, 1))
    assert 0 == ok(driver.cuGraphGetEdges(programs.graph))[3]


def test_edges_of_a_node_to_itself_and_to_another_graph_are_refused(driver, ok, programs):
    a = programs.affine(1, 1)
    other = ok(driver.cuGraphCreate(0))
    stranger = programs.affine(1, 1, graph=other)
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphAddDependencies(programs.graph, [a], [a], None, 1))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphAddDependencies(programs.graph, [a], [stranger], None, 1))
    params = programs.kernel_params("affine", programs.memory, 1, 1)
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphAddKernelNode(programs.graph, [stranger], 1, params))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphAddKernelNode(programs.graph, [a, a], 2, params))
    ok(driver.cuGraphDestroy(other))


def test_data_of_edges_are_kept_and_not_lost_silently(driver, ok, programs):
    data = driver.CUgraphEdgeData()
    data.from_port, data.type = 1, 1  # a programmatic dependency of a kernel
    a, b = programs.affine(1, 1), programs.affine(2, 0)
    ok(driver.cuGraphAddDependencies(programs.graph, [a], [b], [data], 1))
    found = ok(driver.cuGraphNodeGetDependencies(b, 1))[1][0]
    assert (1, 1) == (found.from_port, found.type)
    removed = driver.cuGraphRemoveDependencies(programs.graph, [a], [b], None, 1)
    assert "ERROR_INVALID_VALUE" == name(removed)  # there is no edge with default data
    empty = ok(driver.cuGraphAddEmptyNode(programs.graph, None, 0))
    refused = driver.cuGraphAddDependencies(programs.graph, [empty], [b], [data], 1)
    assert "ERROR_INVALID_VALUE" == name(refused)  # only kernels have such a port
    programs.run()


def test_asking_for_edges_with_data_without_room_for_data_is_lossy(machine, driver, ok, programs):
    from cudatool.sim.api.graph import cuGraphNodeGetDependencies
    from cudatool.sim.results import DriverError, Result

    data = driver.CUgraphEdgeData()
    data.from_port, data.type = 1, 1
    a, b = programs.affine(1, 1), programs.affine(2, 0)
    ok(driver.cuGraphAddDependencies(programs.graph, [a], [b], [data], 1))
    room, count = (ctypes.c_size_t * 1)(), ctypes.c_size_t(1)
    with pytest.raises(DriverError) as error:
        cuGraphNodeGetDependencies(int(b), ctypes.addressof(room), 0, ctypes.addressof(count))
    assert Result.LOSSY_QUERY is error.value.result


def test_destroyed_nodes_are_gone_with_their_edges(driver, ok, programs):
    _a, b, c, d = diamond(programs)
    ok(driver.cuGraphDestroyNode(b))
    assert [int(c)] == handles(ok(driver.cuGraphNodeGetDependencies(d, 1))[0])
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphNodeGetType(b))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphDestroyNode(b))
    programs.run()
    assert [1, 0, 3, 5] == programs.numbers(4)


def test_clone_is_independent_and_its_nodes_are_found(driver, ok, programs):
    a, _b, _c, d = diamond(programs)
    clone = ok(driver.cuGraphClone(programs.graph))
    twin = ok(driver.cuGraphNodeFindInClone(d, clone))
    assert int(twin) != int(d)
    ok(driver.cuGraphDestroyNode(d))
    programs.run(executable := programs.instantiate(graph=clone))
    ok(driver.cuGraphExecDestroy(executable))
    assert [1, 2, 3, 5] == programs.numbers(4)
    ok(driver.cuGraphDestroyNode(twin))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphNodeFindInClone(a, programs.graph))
    ok(driver.cuGraphDestroy(clone))


def test_handles_that_are_no_graphs_are_refused(driver, ok, programs):
    ok(driver.cuGraphDestroy(programs.graph))
    for answer in (
        driver.cuGraphDestroy(programs.graph),
        driver.cuGraphInstantiate(programs.graph, 0),
        driver.cuGraphClone(programs.graph),
        driver.cuGraphAddEmptyNode(programs.graph, None, 0),
        driver.cuGraphGetNodes(programs.graph),
        driver.cuGraphLaunch(12345, programs.stream),
        driver.cuGraphExecDestroy(12345),
        driver.cuGraphNodeGetType(12345),
        driver.cuGraphCreate(1),
    ):
        assert "ERROR_INVALID_VALUE" == name(answer)


def test_dot_file_names_nodes_and_edges(driver, ok, programs, tmp_path):
    a = programs.affine(1, 1)
    programs.add_host("h", after=[a])
    file = tmp_path / "graph.dot"
    ok(driver.cuGraphDebugDotPrint(programs.graph, str(file).encode(), 1))
    text = file.read_text()
    assert 1 == len(re.findall(r'"graph_\d+_node_0" -> "graph_\d+_node_1"', text))
    assert "KERNEL affine" in text
    refused = driver.cuGraphDebugDotPrint(programs.graph, str(tmp_path / "no" / "file").encode(), 0)
    assert "ERROR_OPERATING_SYSTEM" == name(refused)


# ---- Launching ----


def test_nothing_runs_before_a_launch_is_observed(driver, ok, programs):
    programs.add_host("h")
    executable = programs.instantiate()
    ok(driver.cuGraphLaunch(executable, programs.stream))
    assert [] == programs.order
    ok(driver.cuStreamSynchronize(programs.stream))
    assert ["h"] == programs.order
    ok(driver.cuGraphExecDestroy(executable))


def test_edges_order_nodes_under_every_schedule(programs, schedule):
    before = programs.add_host("a")
    middle = [programs.add_host(f"b{i}", after=[before]) for i in range(3)]
    programs.add_host("c", after=middle)
    programs.run()
    assert ["a", "b0", "b1", "b2", "c"] == [programs.order[0], *sorted(programs.order[1:4]), programs.order[4]]


def test_missing_edge_gives_another_result_under_another_schedule(machine, programs, monkeypatch):
    from cudatool.sim import Schedule

    programs.affine(1, 2)  # x + 2
    programs.affine(3, 0)  # x * 3, which should come behind it
    results = {}
    for schedule in (Schedule.FIFO, Schedule.LIFO):
        monkeypatch.setattr(machine.scheduler, "schedule", schedule)
        programs.set(1)
        programs.run()
        results[schedule] = programs.numbers()
    assert {Schedule.FIFO: [9], Schedule.LIFO: [5]} == results


def test_launches_of_one_executable_graph_are_ordered_across_streams(driver, ok, programs, schedule):
    first = programs.affine(3, 0)
    programs.affine(1, 1, after=[first])
    executable = programs.instantiate()
    other = ok(driver.cuStreamCreate(1))
    for stream in (programs.stream, other, programs.stream):
        ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuCtxSynchronize())
    assert [((0 * 3 + 1) * 3 + 1) * 3 + 1] == programs.numbers()
    ok(driver.cuStreamDestroy(other))
    ok(driver.cuGraphExecDestroy(executable))


def test_graph_is_ordered_with_the_work_around_it_in_its_stream(driver, ok, programs, schedule):
    programs.affine(5, 0)
    executable = programs.instantiate()
    ok(programs.launch(programs.stream, 1, 2))
    ok(driver.cuGraphLaunch(executable, programs.stream))
    ok(programs.launch(programs.stream, 1, 1))
    ok(driver.cuStreamSynchronize(programs.stream))
    assert [2 * 5 + 1] == programs.numbers()
    ok(driver.cuGraphExecDestroy(executable))


def test_empty_graph_can_be_launched(programs):
    programs.run(times=2)


def test_later_changes_to_a_graph_do_not_touch_what_was_instantiated(driver, ok, programs):
    node = programs.affine(1, 1)
    executable = programs.instantiate()
    ok(driver.cuGraphKernelNodeSetParams(node, programs.kernel_params("affine", programs.memory, 0, 77)))
    programs.affine(0, 88, at=1)
    programs.run(executable)
    assert [1, 0] == programs.numbers(2)
    ok(driver.cuGraphDestroy(programs.graph))
    programs.run(executable)
    assert [2, 0] == programs.numbers(2)
    ok(driver.cuGraphExecDestroy(executable))


def test_executable_graph_may_be_destroyed_while_it_is_in_flight(driver, ok, programs):
    programs.affine(1, 1)
    executable = programs.instantiate()
    ok(driver.cuGraphLaunch(executable, programs.stream))
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuStreamSynchronize(programs.stream))
    assert [1] == programs.numbers()


def test_upload_executes_nothing(driver, ok, programs):
    programs.add_host("h")
    executable = programs.instantiate()
    ok(driver.cuGraphUpload(executable, programs.stream))
    ok(driver.cuStreamSynchronize(programs.stream))
    assert [] == programs.order
    ok(driver.cuGraphExecDestroy(executable))


def test_virtual_time_covers_the_longest_path(driver, ok, programs):
    events = [ok(driver.cuEventCreate(0)) for _ in range(2)]
    size = 64 << 20
    address = ok(driver.cuMemAlloc(2 * size))
    for half in range(2):  # side by side
        params = programs.set_params(int(address) + half * size, 0, size // 4)
        ok(driver.cuGraphAddMemsetNode(programs.graph, None, 0, params, programs.context))
    executable = programs.instantiate()
    ok(driver.cuEventRecord(events[0], programs.stream))
    ok(driver.cuGraphLaunch(executable, programs.stream))
    ok(driver.cuEventRecord(events[1], programs.stream))
    ok(driver.cuEventSynchronize(events[1]))
    assert 0.03 < ok(driver.cuEventElapsedTime(*events)) < 0.05  # one fill of 64 MiB at 2 TB/s
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuMemFree(address))
    for event in events:
        ok(driver.cuEventDestroy(event))


# ---- Kinds of nodes ----


def test_copies_and_fills_between_host_and_device(driver, ok, programs):
    source, target = (ctypes.c_int * 4)(1, 2, 3, 4), (ctypes.c_int * 8)()
    graph, context, memory = programs.graph, programs.context, programs.memory
    params = programs.copy_params(memory, ctypes.addressof(source), 16, from_host=True)
    up = ok(driver.cuGraphAddMemcpyNode(graph, None, 0, params, context))
    across = ok(driver.cuGraphAddMemcpyNode(graph, [up], 1, programs.copy_params(memory + 16, memory, 16), context))
    fill = ok(driver.cuGraphAddMemsetNode(graph, [across], 1, programs.set_params(memory, 9, 2), context))
    params = programs.copy_params(ctypes.addressof(target), memory, 32, to_host=True)
    ok(driver.cuGraphAddMemcpyNode(graph, [fill], 1, params, context))
    programs.run()
    assert [9, 9, 3, 4, 1, 2, 3, 4] == list(target)
    source[3] = 40  # read when it runs, each time
    programs.run()
    assert [9, 9, 3, 40, 1, 2, 3, 40] == list(target)


def test_two_dimensional_fill_and_three_dimensional_copy_touch_only_their_rows(driver, ok, programs):
    context, memory = programs.context, programs.memory
    params = programs.set_params(memory, 0xAB, 2, element=2, height=3, pitch=8)
    fill = ok(driver.cuGraphAddMemsetNode(programs.graph, None, 0, params, context))
    copy = programs.copy_params(memory + 128, memory, 4)
    copy.srcPitch, copy.srcHeight, copy.dstPitch, copy.dstHeight = 8, 1, 4, 1
    copy.Height, copy.Depth = 1, 3
    ok(driver.cuGraphAddMemcpyNode(programs.graph, [fill], 1, copy, context))
    programs.run()
    row = 0x00AB00AB
    assert [row, 0, row, 0, row, 0] == programs.numbers(6)
    assert [row, row, row, 0] == programs.numbers(4, at=32)


def test_parameters_come_back_as_they_were_set(driver, ok, programs):
    context, memory = programs.context, programs.memory
    kernel = programs.affine(7, 8)
    params = ok(driver.cuGraphKernelNodeGetParams(kernel))
    pointers = (ctypes.c_void_p * 3).from_address(int(params.kernelParams))
    assert (memory, 7, 8) == tuple(
        kind.from_address(at).value
        for kind, at in zip((ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint), pointers, strict=True)
    )
    assert int(programs.functions["affine"]) == int(params.func)
    fill = ok(driver.cuGraphAddMemsetNode(programs.graph, None, 0, programs.set_params(memory, 5, 3), context))
    found = ok(driver.cuGraphMemsetNodeGetParams(fill))
    assert (memory, 5, 4, 3, 1) == (int(found.dst), found.value, found.elementSize, found.width, found.height)
    ok(driver.cuGraphMemsetNodeSetParams(fill, programs.set_params(memory + 4, 6, 1)))
    copy_params = programs.copy_params(memory + 8, memory, 8)
    copy = ok(driver.cuGraphAddMemcpyNode(programs.graph, [fill, kernel], 2, copy_params, context))
    found = ok(driver.cuGraphMemcpyNodeGetParams(copy))
    assert (memory, memory + 8, 8) == (int(found.srcDevice), int(found.dstDevice), found.WidthInBytes)
    ok(driver.cuGraphMemcpyNodeSetParams(copy, programs.copy_params(memory + 16, memory, 8)))
    host = programs.add_host("old")
    new = driver.CUDA_HOST_NODE_PARAMS()
    new.fn, new.userData = driver.CUhostFn(programs.host_function("new")), 99
    ok(driver.cuGraphHostNodeSetParams(host, new))
    assert 99 == int(ok(driver.cuGraphHostNodeGetParams(host)).userData)
    programs.run()
    assert ["new"] == programs.order
    assert [8, 6, 0, 0, 8, 6] == programs.numbers(6)


def test_parameters_of_another_type_of_node_are_refused(driver, ok, programs):
    empty = ok(driver.cuGraphAddEmptyNode(programs.graph, None, 0))
    kernel = programs.affine(1, 1)
    for answer in (
        driver.cuGraphKernelNodeGetParams(empty),
        driver.cuGraphMemcpyNodeGetParams(kernel),
        driver.cuGraphMemsetNodeGetParams(kernel),
        driver.cuGraphHostNodeGetParams(kernel),
        driver.cuGraphEventWaitNodeGetEvent(kernel),
        driver.cuGraphChildGraphNodeGetGraph(kernel),
        driver.cuGraphMemFreeNodeGetParams(kernel),
        driver.cuGraphKernelNodeSetParams(empty, programs.kernel_params("affine", programs.memory, 1, 1)),
    ):
        assert "ERROR_INVALID_VALUE" == name(answer)


def test_generic_nodes_have_all_parameters_in_one_structure(driver, ok, programs):
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    params.memset.dst, params.memset.elementSize = programs.memory, 4
    params.memset.value, params.memset.width, params.memset.height = 11, 2, 1
    node = ok(driver.cuGraphAddNode(programs.graph, None, None, 0, params))
    programs.run()
    assert [11, 11, 0] == programs.numbers(3)
    params.memset.value = 12
    ok(driver.cuGraphNodeSetParams(node, params))
    programs.run()
    assert [12, 12, 0] == programs.numbers(3)
    assert 12 == ok(driver.cuGraphNodeGetParams(node)).memset.value
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphNodeSetParams(node, params))
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL
    assert "ERROR_NOT_SUPPORTED" == name(driver.cuGraphAddNode(programs.graph, None, None, 0, params))


@pytest.mark.parametrize("change", [{"grid": 0}, {"func": None}, {"sharedMemBytes": 1 << 20}, {"blockDimX": 2000}])
def test_kernel_nodes_that_cannot_be_launched_are_refused(driver, programs, change):
    params = programs.kernel_params("affine", programs.memory, 1, 1)
    for key, value in change.items():
        setattr(params, "gridDimX" if key == "grid" else key, value if value is not None else driver.CUfunction(0))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphAddKernelNode(programs.graph, None, 0, params))


def test_copies_and_fills_that_cannot_be_made_are_refused(driver, programs):
    context, memory = programs.context, programs.memory
    pitched = programs.copy_params(memory, memory + 64, 16)
    pitched.Height = 2
    array = programs.copy_params(memory, memory + 64, 16)
    array.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_ARRAY
    answers = {
        "nothing": programs.copy_params(memory, memory + 64, 0),
        "nowhere": programs.copy_params(memory, 0x1000, 4),
        "overlapping rows": pitched,
        "array": array,  # of a handle that is none
    }
    found = {key: name(driver.cuGraphAddMemcpyNode(programs.graph, None, 0, p, context)) for key, p in answers.items()}
    assert {**dict.fromkeys(answers, "ERROR_INVALID_VALUE"), "array": "ERROR_INVALID_HANDLE"} == found
    for params in (
        programs.set_params(memory, 0, 0),
        programs.set_params(memory, 0, 4, element=3),
        programs.set_params(memory + 1, 0, 4),
        programs.set_params(memory, 0, 4, height=2, pitch=8),
        programs.set_params(0x1000, 0, 4),
    ):
        assert "ERROR_INVALID_VALUE" == name(driver.cuGraphAddMemsetNode(programs.graph, None, 0, params, context))


def test_copy_to_memory_freed_since_then_is_an_illegal_address(driver, ok, programs):
    context = ok(driver.cuCtxCreate(None, 0, 0))  # of its own, because the error stays with it
    stream, address = ok(driver.cuStreamCreate(1)), ok(driver.cuMemAlloc(64))
    params = programs.copy_params(int(address), programs.memory, 64)
    ok(driver.cuGraphAddMemcpyNode(programs.graph, None, 0, params, context))
    executable = programs.instantiate()
    ok(driver.cuMemFree(address))
    ok(driver.cuGraphLaunch(executable, stream))
    assert "ERROR_ILLEGAL_ADDRESS" == name(driver.cuStreamSynchronize(stream))
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuCtxDestroy(context))


def test_events_order_graphs_with_streams(driver, ok, programs, schedule):
    event, before = ok(driver.cuEventCreate(2)), ok(driver.cuEventCreate(2))
    wait = ok(driver.cuGraphAddEventWaitNode(programs.graph, None, 0, before))
    kernel = programs.affine(3, 0, after=[wait])
    record = ok(driver.cuGraphAddEventRecordNode(programs.graph, [kernel], 1, event))
    assert int(event) == int(ok(driver.cuGraphEventRecordNodeGetEvent(record)))
    assert int(before) == int(ok(driver.cuGraphEventWaitNodeGetEvent(wait)))
    executable = programs.instantiate()
    other = ok(driver.cuStreamCreate(1))
    ok(programs.launch(other, 1, 2))
    ok(driver.cuEventRecord(before, other))
    ok(driver.cuGraphLaunch(executable, programs.stream))
    ok(driver.cuStreamWaitEvent(other, event, 0))
    ok(programs.launch(other, 1, 1))
    ok(driver.cuStreamSynchronize(other))
    assert [2 * 3 + 1] == programs.numbers()
    ok(driver.cuCtxSynchronize())
    for handle in (event, before):
        ok(driver.cuEventDestroy(handle))
    ok(driver.cuStreamDestroy(other))
    ok(driver.cuGraphExecDestroy(executable))


def test_child_graph_is_a_copy_that_runs_as_one_node(driver, ok, programs, schedule):
    child = ok(driver.cuGraphCreate(0))
    first = programs.affine(1, 1, graph=child)
    programs.affine(3, 0, after=[first], graph=child)
    before = programs.affine(0, 10)
    node = ok(driver.cuGraphAddChildGraphNode(programs.graph, [before], 1, child))
    programs.affine(1, 4, after=[node])
    ok(driver.cuGraphDestroy(child))
    inside = ok(driver.cuGraphChildGraphNodeGetGraph(node))
    assert 2 == ok(driver.cuGraphGetNodes(inside))[1]
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphDestroy(inside))  # it belongs to the node
    programs.run()
    assert [(10 + 1) * 3 + 4] == programs.numbers()


def test_graph_cannot_be_its_own_child(driver, programs):
    programs.affine(1, 1)
    answer = driver.cuGraphAddChildGraphNode(programs.graph, None, 0, programs.graph)
    assert "ERROR_INVALID_VALUE" == name(answer)


def test_kernel_attributes_are_set_and_copied(driver, ok, programs):
    a, b = programs.affine(1, 1), programs.affine(1, 1)
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    value = driver.CUkernelNodeAttrValue()
    value.priority = -3
    ok(driver.cuGraphKernelNodeSetAttribute(a, kind, value))
    assert [-3, 0] == [ok(driver.cuGraphKernelNodeGetAttribute(node, kind)).priority for node in (a, b)]
    ok(driver.cuGraphKernelNodeCopyAttributes(b, a))
    assert -3 == ok(driver.cuGraphKernelNodeGetAttribute(b, kind)).priority
    empty = ok(driver.cuGraphAddEmptyNode(programs.graph, None, 0))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphKernelNodeGetAttribute(empty, kind))


@pytest.mark.parametrize("kind", ["PROGRAMMATIC_EVENT", "LAUNCH_COMPLETION_EVENT"])
def test_launches_that_record_an_event_in_their_midst_are_refused(driver, ok, programs, kind):
    """Without the record, a wait for the event would order nothing, and nothing would say so."""
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    attribute = driver.CUlaunchAttribute()
    attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{kind}")
    config.attrs, config.numAttrs = [attribute], 1
    arguments = (programs.memory, 1, 4), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    assert "ERROR_NOT_SUPPORTED" == name(driver.cuLaunchKernelEx(config, programs.functions["affine"], arguments, 0))
    config.numAttrs = 0
    ok(driver.cuLaunchKernelEx(config, programs.functions["affine"], arguments, 0))


def test_cooperative_kernels_that_do_not_fit_are_refused(driver, ok, programs):
    params = programs.kernel_params("affine", programs.memory, 1, 1, grid=1 << 20)
    node = ok(driver.cuGraphAddKernelNode(programs.graph, None, 0, params))
    value = driver.CUkernelNodeAttrValue()
    value.cooperative = 1
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    answer = driver.cuGraphKernelNodeSetAttribute(node, kind, value)
    assert "ERROR_COOPERATIVE_LAUNCH_TOO_LARGE" == name(answer)
    ok(driver.cuGraphKernelNodeSetParams(node, programs.kernel_params("affine", programs.memory, 1, 1)))
    ok(driver.cuGraphKernelNodeSetAttribute(node, kind, value))
    executable = programs.instantiate()
    other = ok(driver.cuGraphCreate(0))
    plain = programs.affine(1, 1, graph=other)
    assert ("ATTRIBUTES_CHANGED", int(plain), 0) == update_failure(executable, other)
    programs.run(executable)
    assert [1] == programs.numbers()
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(other))


# ---- Instantiating ----


def test_cycle_is_found_when_a_graph_is_instantiated(driver, ok, programs):
    a, b = programs.affine(1, 1), programs.affine(1, 1)
    ok(driver.cuGraphAddDependencies(programs.graph, [a, b], [b, a], None, 2))
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphInstantiateWithParams(programs.graph, params))
    assert "CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE" == params.result_out.name
    assert int(params.hErrNode_out) in (int(a), int(b))


@pytest.mark.parametrize("flags", [16, AUTO_FREE | DEVICE_LAUNCH, 2])
def test_flags_that_mean_nothing_are_refused(driver, programs, flags):
    programs.affine(1, 1)
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphInstantiate(programs.graph, flags))


def test_flags_are_given_back(driver, ok, programs):
    programs.affine(1, 1)
    executable = programs.instantiate(AUTO_FREE | USE_NODE_PRIORITY)
    assert AUTO_FREE | USE_NODE_PRIORITY == int(ok(driver.cuGraphExecGetFlags(executable)))
    ok(driver.cuGraphExecDestroy(executable))


def test_graph_for_device_launch_has_only_work_of_the_device(driver, ok, programs):
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags = DEVICE_LAUNCH
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphInstantiateWithParams(programs.graph, params))  # empty
    kernel = programs.affine(1, 1)
    programs.run(executable := ok(driver.cuGraphInstantiateWithParams(programs.graph, params)))
    ok(driver.cuGraphExecDestroy(executable))
    host = programs.add_host("h", after=[kernel])
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphInstantiateWithParams(programs.graph, params))
    assert "CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED" == params.result_out.name
    assert int(host) == int(params.hErrNode_out)


# ---- Updating ----


def test_parameters_of_executable_nodes_change_for_later_launches(driver, ok, programs):
    node = programs.affine(1, 1)
    executable = programs.instantiate()
    ok(driver.cuGraphLaunch(executable, programs.stream))
    params = programs.kernel_params("affine", programs.memory, 10, 5)
    ok(driver.cuGraphExecKernelNodeSetParams(executable, node, params))
    programs.run(executable)
    assert [1 * 10 + 5] == programs.numbers()
    ok(driver.cuGraphExecDestroy(executable))


def test_copies_fills_hosts_and_events_of_an_executable_graph_change(driver, ok, programs):
    context, memory, graph = programs.context, programs.memory, programs.graph
    fill = ok(driver.cuGraphAddMemsetNode(graph, None, 0, programs.set_params(memory, 1, 1), context))
    copy_params = programs.copy_params(memory + 4, memory, 4)
    copy = ok(driver.cuGraphAddMemcpyNode(graph, [fill], 1, copy_params, context))
    host = programs.add_host("old")
    events = [ok(driver.cuEventCreate(2)) for _ in range(2)]
    record = ok(driver.cuGraphAddEventRecordNode(graph, None, 0, events[0]))
    executable = programs.instantiate()
    ok(driver.cuGraphExecMemsetNodeSetParams(executable, fill, programs.set_params(memory, 7, 2), context))
    ok(driver.cuGraphExecMemcpyNodeSetParams(executable, copy, programs.copy_params(memory + 8, memory, 8), context))
    new = driver.CUDA_HOST_NODE_PARAMS()
    new.fn = driver.CUhostFn(programs.host_function("new"))
    ok(driver.cuGraphExecHostNodeSetParams(executable, host, new))
    ok(driver.cuGraphExecEventRecordNodeSetEvent(executable, record, events[1]))
    programs.run(executable)
    assert [7, 7, 7, 7] == programs.numbers(4)
    assert ["new"] == programs.order
    assert "SUCCESS" == name(driver.cuEventQuery(events[1]))
    assert 1 == ok(driver.cuGraphMemsetNodeGetParams(fill)).value  # the node of the graph is as it was
    ok(driver.cuGraphExecDestroy(executable))
    for event in events:
        ok(driver.cuEventDestroy(event))


def test_changes_that_an_executable_graph_cannot_make_are_refused(driver, ok, programs):
    context, memory, graph = programs.context, programs.memory, programs.graph
    copy_params = programs.copy_params(memory + 4, memory, 4)
    copy = ok(driver.cuGraphAddMemcpyNode(graph, None, 0, copy_params, context))
    fill = ok(
        driver.cuGraphAddMemsetNode(graph, None, 0, programs.set_params(memory, 1, 1, height=2, pitch=8), context)
    )
    kernel = programs.affine(1, 1)
    executable = programs.instantiate()
    rows = programs.copy_params(memory + 64, memory, 4)
    rows.srcPitch, rows.dstPitch, rows.Height = 8, 8, 2
    host = programs.copy_params(memory, ctypes.addressof(ctypes.c_int()), 4, from_host=True)
    other = ok(driver.cuGraphCreate(0))
    stranger = programs.affine(1, 1, graph=other)
    params = programs.kernel_params("affine", memory, 1, 1)
    for answer in (
        driver.cuGraphExecMemcpyNodeSetParams(executable, copy, rows, context),
        driver.cuGraphExecMemcpyNodeSetParams(executable, copy, host, context),
        driver.cuGraphExecMemsetNodeSetParams(executable, fill, programs.set_params(memory, 1, 1), context),
        driver.cuGraphExecKernelNodeSetParams(executable, copy, params),
        driver.cuGraphExecKernelNodeSetParams(executable, stranger, params),
        driver.cuGraphNodeSetEnabled(executable, stranger, 0),
    ):
        assert "ERROR_INVALID_VALUE" == name(answer)
    ok(driver.cuGraphDestroyNode(kernel))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphExecKernelNodeSetParams(executable, kernel, params))
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(other))


def test_disabled_node_does_nothing_but_order(driver, ok, programs, schedule):
    a = programs.add_host("a")
    kernel = programs.affine(1, 1, after=[a])
    programs.add_host("b", after=[kernel])
    executable = programs.instantiate()
    assert 1 == ok(driver.cuGraphNodeGetEnabled(executable, kernel))
    ok(driver.cuGraphNodeSetEnabled(executable, kernel, 0))
    assert 0 == ok(driver.cuGraphNodeGetEnabled(executable, kernel))
    programs.run(executable)
    assert ([0], ["a", "b"]) == (programs.numbers(), programs.order)
    ok(driver.cuGraphNodeSetEnabled(executable, kernel, 1))
    programs.run(executable)
    assert [1] == programs.numbers()
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphNodeSetEnabled(executable, a, 0))  # not for host nodes
    ok(driver.cuGraphExecDestroy(executable))


def test_update_takes_all_parameters_of_a_graph_of_the_same_shape(driver, ok, programs):
    diamond(programs)
    executable = programs.instantiate()
    other = ok(driver.cuGraphCreate(0))
    a = programs.affine(0, 100, graph=other)
    b, c = (programs.affine(0, 200 + i, at=1 + i, after=[a], graph=other) for i in range(2))
    programs.affine(0, 300, at=3, after=[b, c], graph=other)
    info = ok(driver.cuGraphExecUpdate(executable, other))
    assert "CU_GRAPH_EXEC_UPDATE_SUCCESS" == info.result.name
    ok(driver.cuGraphDestroy(other))
    programs.run(executable)
    assert [100, 200, 201, 300] == programs.numbers(4)
    ok(driver.cuGraphExecDestroy(executable))


def _one_more(programs, graph):
    a = programs.affine(1, 1, graph=graph)
    b = programs.affine(1, 1, after=[a], graph=graph)
    programs.affine(1, 1, after=[b], graph=graph)
    return None


def _two_ends(programs, graph):
    programs.affine(1, 1, graph=graph)
    return programs.affine(1, 1, graph=graph)


def _other_type(programs, graph):
    a = programs.affine(1, 1, graph=graph)
    return programs.add_host("h", after=[a], graph=graph)


@pytest.mark.parametrize(
    ("build", "reason"),
    [(_one_more, "TOPOLOGY_CHANGED"), (_two_ends, "TOPOLOGY_CHANGED"), (_other_type, "NODE_TYPE_CHANGED")],
)
def test_update_from_another_shape_says_why_and_where_and_changes_nothing(driver, ok, programs, build, reason):
    a = programs.affine(1, 1)
    programs.affine(1, 1, after=[a])
    executable = programs.instantiate()
    other = ok(driver.cuGraphCreate(0))
    culprit = build(programs, other)
    assert (reason, int(culprit or 0), 0) == update_failure(executable, other)
    programs.run(executable)
    assert [2] == programs.numbers()
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(other))


def test_update_to_other_edges_names_both_ends(driver, ok, programs):
    a = programs.affine(1, 1)
    b, c = (programs.affine(1, 1, after=[a]) for _ in range(2))
    programs.affine(1, 1, after=[b, c])
    executable = programs.instantiate()
    other = ok(driver.cuGraphCreate(0))
    a = programs.affine(1, 1, graph=other)
    b = programs.affine(1, 1, after=[a], graph=other)
    c = programs.affine(1, 1, after=[b], graph=other)  # behind b, and not behind a
    programs.affine(1, 1, after=[b, c], graph=other)
    assert ("TOPOLOGY_CHANGED", int(c), int(b)) == update_failure(executable, other)
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(other))


def test_update_of_priorities_fails_where_they_count(driver, ok, programs):
    programs.affine(1, 1)
    executables = [programs.instantiate(flags) for flags in (0, USE_NODE_PRIORITY)]
    other = ok(driver.cuGraphCreate(0))
    node = programs.affine(1, 1, graph=other)
    value = driver.CUkernelNodeAttrValue()
    value.priority = -1
    ok(driver.cuGraphKernelNodeSetAttribute(node, driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY, value))
    ok(driver.cuGraphExecUpdate(executables[0], other))
    assert ("ATTRIBUTES_CHANGED", int(node), 0) == update_failure(executables[1], other)
    for executable in executables:
        ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(other))


def test_update_from_pinned_to_device_memory_is_a_change_of_parameters(driver, ok, programs):
    pinned = ok(driver.cuMemAllocHost(64))
    memory, context = programs.memory, programs.context
    params = programs.copy_params(memory, memory + 64, 8)
    ok(driver.cuGraphAddMemcpyNode(programs.graph, None, 0, params, context))
    executable = programs.instantiate()
    other = ok(driver.cuGraphCreate(0))
    node = ok(
        driver.cuGraphAddMemcpyNode(
            other, None, 0, programs.copy_params(memory, int(pinned), 8, from_host=True), context
        )
    )
    assert ("PARAMETERS_CHANGED", int(node), 0) == update_failure(executable, other)
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(other))
    ok(driver.cuMemFreeHost(pinned))


def test_child_graph_of_an_executable_graph_changes_with_a_graph_of_its_shape(driver, ok, programs):
    child = ok(driver.cuGraphCreate(0))
    programs.affine(1, 1, graph=child)
    node = ok(driver.cuGraphAddChildGraphNode(programs.graph, None, 0, child))
    executable = programs.instantiate()
    other = ok(driver.cuGraphCreate(0))
    programs.affine(0, 42, graph=other)
    ok(driver.cuGraphExecChildGraphNodeSetParams(executable, node, other))
    programs.run(executable)
    assert [42] == programs.numbers()
    programs.affine(0, 43, graph=other)
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphExecChildGraphNodeSetParams(executable, node, other))
    ok(driver.cuGraphExecDestroy(executable))
    for graph in (child, other):
        ok(driver.cuGraphDestroy(graph))


# ---- Memory nodes ----


def memory_graph(driver, ok, programs, *, free):
    """Build: allocate a number, set it to 6, copy it to number 0 of the memory [, free it]. Return its address."""
    alloc, address = programs.add_alloc(64)
    context = programs.context
    fill = ok(driver.cuGraphAddMemsetNode(programs.graph, [alloc], 1, programs.set_params(address, 6, 1), context))
    params = programs.copy_params(programs.memory, address, 4)
    copy = ok(driver.cuGraphAddMemcpyNode(programs.graph, [fill], 1, params, context))
    if free:
        ok(driver.cuGraphAddMemFreeNode(programs.graph, [copy], 1, address))
    return address


def test_memory_that_a_graph_allocates_and_frees_is_there_in_between(machine, driver, ok, programs, schedule):
    address = memory_graph(driver, ok, programs, free=True)
    assert machine.allocations.holding(address) is None
    programs.run(times=3)
    assert [6] == programs.numbers()
    assert machine.allocations.holding(address) is None
    assert "ERROR_INVALID_VALUE" == name(driver.cuMemcpyDtoH((ctypes.c_int * 1)(), address, 4))


def test_memory_that_a_graph_leaves_is_used_and_freed_outside(driver, ok, programs):
    address = memory_graph(driver, ok, programs, free=False)
    executable = programs.instantiate()
    programs.run(executable)
    assert [6] == programs.numbers(address=address)
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphLaunch(executable, programs.stream))  # it is not freed
    ok(driver.cuMemFreeAsync(address, programs.stream))
    assert "ERROR_INVALID_VALUE" == name(driver.cuMemFreeAsync(address, programs.stream))
    programs.run(executable)
    ok(driver.cuMemFree(address))
    ok(driver.cuGraphExecDestroy(executable))


def test_automatic_free_lets_a_graph_be_launched_again(driver, ok, programs):
    address = memory_graph(driver, ok, programs, free=False)
    executable = programs.instantiate(AUTO_FREE)
    programs.run(executable, times=3)
    assert [6] == programs.numbers(address=address)
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(programs.graph))
    assert [6] == programs.numbers(address=address)  # it lives until it is freed
    ok(driver.cuMemFree(address))


def test_another_graph_frees_what_a_graph_leaves(driver, ok, programs):
    address = memory_graph(driver, ok, programs, free=False)
    other = ok(driver.cuGraphCreate(0))
    node = ok(driver.cuGraphAddMemFreeNode(other, None, 0, address))
    assert address == int(ok(driver.cuGraphMemFreeNodeGetParams(node)))
    executables = [programs.instantiate(), programs.instantiate(graph=other)]
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphLaunch(executables[1], programs.stream))  # not allocated yet
    for _ in range(2):
        for executable in executables:
            programs.run(executable)
    # What another graph frees, its own graph cannot free any more.
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphAddMemFreeNode(programs.graph, None, 0, address))
    for executable in executables:
        ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(other))


def test_graphs_with_memory_nodes_are_restricted(driver, ok, programs):
    address = memory_graph(driver, ok, programs, free=True)
    nodes = ok(driver.cuGraphGetNodes(programs.graph, 4))[0]
    other = ok(driver.cuGraphCreate(0))
    answers = [
        driver.cuGraphRemoveDependencies(programs.graph, [nodes[0]], [nodes[1]], None, 1),
        driver.cuGraphAddMemFreeNode(programs.graph, None, 0, address),  # twice
        driver.cuGraphAddMemFreeNode(other, None, 0, address),  # its own graph does
        driver.cuGraphAddMemFreeNode(other, None, 0, programs.memory),  # of no allocation node
        driver.cuGraphAddMemFreeNode(other, None, 0, 0),
        driver.cuGraphAddMemAllocNode(other, None, 0, programs.alloc_params(0)),
    ]
    assert ["ERROR_INVALID_VALUE"] * len(answers) == [name(answer) for answer in answers]
    assert "ERROR_NOT_SUPPORTED" == name(driver.cuGraphDestroyNode(nodes[1]))
    assert "ERROR_NOT_SUPPORTED" == name(driver.cuGraphClone(programs.graph))
    assert "ERROR_NOT_SUPPORTED" == name(driver.cuGraphAddChildGraphNode(other, None, 0, programs.graph))
    executable = programs.instantiate()
    assert "ERROR_NOT_SUPPORTED" == name(driver.cuGraphInstantiate(programs.graph, 0))  # one at a time
    ok(driver.cuGraphExecDestroy(executable))
    programs.run()
    ok(driver.cuGraphDestroy(other))


def test_graph_with_memory_nodes_becomes_a_child_by_moving(driver, ok, programs):
    child = ok(driver.cuGraphCreate(0))
    mine, programs.graph = programs.graph, child
    memory_graph(driver, ok, programs, free=True)
    programs.graph = mine
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = child
    params.graph.ownership = driver.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    ok(driver.cuGraphAddNode(programs.graph, None, None, 0, params))
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphDestroy(child))
    alloc = driver.cuGraphAddMemAllocNode(child, None, 0, programs.alloc_params(4))
    assert "ERROR_NOT_SUPPORTED" == name(alloc)
    programs.run()
    assert [6] == programs.numbers()


def attribute(driver, ok, number):
    return int(ok(driver.cuDeviceGetGraphMemAttribute(0, driver.CUgraphMem_attribute(number))))


def test_memory_of_graphs_is_kept_until_it_is_trimmed(machine, driver, ok, programs):
    ok(driver.cuDeviceGraphMemTrim(0))
    for number in (1, 3):
        zero = driver.cuuint64_t(0)
        ok(driver.cuDeviceSetGraphMemAttribute(0, driver.CUgraphMem_attribute(number), zero))
    free = ok(driver.cuMemGetInfo())[0]
    memory_graph(driver, ok, programs, free=True)
    assert [0, 0, 0, 0] == [attribute(driver, ok, number) for number in range(4)]
    programs.run()
    page = 2 << 20
    assert [64, 64, page, page] == [attribute(driver, ok, number) for number in range(4)]
    assert page == free - ok(driver.cuMemGetInfo())[0]
    ok(driver.cuDeviceGraphMemTrim(0))
    assert [0, 64, 0, page] == [attribute(driver, ok, number) for number in range(4)]
    assert free == ok(driver.cuMemGetInfo())[0]
    refused = driver.cuDeviceSetGraphMemAttribute(0, driver.CUgraphMem_attribute(1), driver.cuuint64_t(5))
    assert "ERROR_INVALID_VALUE" == name(refused)
    assert "ERROR_INVALID_DEVICE" == name(driver.cuDeviceGraphMemTrim(99))


def test_memory_of_a_dropped_graph_is_not_trimmed_while_it_is_allocated(driver, ok, programs):
    address = memory_graph(driver, ok, programs, free=False)
    programs.run()
    ok(driver.cuGraphDestroy(programs.graph))
    ok(driver.cuDeviceGraphMemTrim(0))
    assert [6] == programs.numbers(address=address)
    ok(driver.cuMemFree(address))
    ok(driver.cuDeviceGraphMemTrim(0))
    assert 0 == attribute(driver, ok, 2)


# ---- Conditional nodes ----


@pytest.mark.parametrize(("value", "expected"), [(0, 20), (1, 10), (5, 10)])
def test_if_runs_one_of_two_bodies(programs, schedule, value, expected):
    handle = programs.condition()
    setter = programs.add_kernel("set_value", handle, value)
    node, bodies = programs.add_conditional(IF, 2, handle, after=[setter])
    programs.affine(0, 10, graph=bodies[0])
    programs.affine(0, 20, graph=bodies[1])
    programs.affine(1, 1, after=[node])
    programs.run()
    assert [expected + 1] == programs.numbers()


def test_while_repeats_its_body_until_the_condition_is_zero(programs, schedule):
    handle = programs.condition(default=1)
    node, (body,) = programs.add_conditional(WHILE, 1, handle)
    first = programs.affine(1, 3, at=1, graph=body)
    programs.add_kernel("count_down", programs.memory, handle, after=[first], graph=body)
    programs.affine(2, 0, at=1, after=[node])
    programs.set(5, 0)
    executable = programs.instantiate()
    programs.run(executable)
    assert [0, 5 * 3 * 2] == programs.numbers(2)
    programs.set(2, 0)  # the default is there again at each launch
    programs.run(executable)
    assert [0, 2 * 3 * 2] == programs.numbers(2)
    programs.driver.cuGraphExecDestroy(executable)


@pytest.mark.parametrize(("value", "expected"), [(0, [1, 0]), (1, [0, 1]), (2, [0, 0])])
def test_switch_runs_the_body_of_that_number_if_there_is_one(programs, value, expected):
    _node, bodies = programs.add_conditional(SWITCH, 2, programs.condition(default=value))
    for index, body in enumerate(bodies):
        programs.affine(1, 1, at=index, graph=body)
    programs.run()
    assert expected == programs.numbers(2)


def test_conditional_nodes_can_be_nested(driver, ok, programs, schedule):
    outer, inner = programs.condition(default=1), programs.condition()
    _, (body,) = programs.add_conditional(IF, 1, outer)
    setter = programs.add_kernel("set_value", inner, 1, graph=body)
    params = programs.conditional_params(IF, 1, inner)
    ok(driver.cuGraphAddNode(body, [setter], None, 1, params))
    programs.affine(1, 7, graph=params.conditional.phGraph_out[0])
    programs.run()
    assert [7] == programs.numbers()


def test_two_executable_graphs_have_values_of_their_own(driver, ok, programs):
    handle = programs.condition()
    setter = programs.add_kernel("set_value", handle, 1)
    _, (body,) = programs.add_conditional(IF, 1, handle, after=[setter])
    programs.affine(1, 1, graph=body)
    first, second = programs.instantiate(), programs.instantiate()
    off = programs.kernel_params("set_value", handle, 0)
    ok(driver.cuGraphExecKernelNodeSetParams(second, setter, off))
    other = ok(driver.cuStreamCreate(1))
    ok(driver.cuGraphLaunch(first, programs.stream))
    ok(driver.cuGraphLaunch(second, other))
    ok(driver.cuCtxSynchronize())
    assert [1] == programs.numbers()
    for executable in (first, second):
        ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuStreamDestroy(other))


def test_update_of_a_conditional_node_takes_its_handle_and_bodies(driver, ok, programs):
    """Kernels of the new graph set the new graph's handle; the graph itself may be gone by then."""

    def build(added):
        handle = programs.condition(default=1)
        _, (body,) = programs.add_conditional(WHILE, 1, handle)
        first = programs.affine(1, added, at=1, graph=body)
        programs.add_kernel("count_down", programs.memory, handle, after=[first], graph=body)

    original = programs.graph
    build(3)
    executable = programs.instantiate()
    programs.graph = ok(driver.cuGraphCreate(0))
    build(7)
    info = ok(driver.cuGraphExecUpdate(executable, programs.graph))
    assert "CU_GRAPH_EXEC_UPDATE_SUCCESS" == info.result.name
    ok(driver.cuGraphDestroy(programs.graph))
    programs.graph = original
    for count in (4, 2):
        programs.set(count, 0)
        programs.run(executable)
        assert [0, 7 * count] == programs.numbers(2)
    ok(driver.cuGraphExecDestroy(executable))


def test_work_can_be_captured_into_the_body_of_a_conditional_node(driver, ok, programs):
    _, bodies = programs.add_conditional(SWITCH, 2, programs.condition(default=1))
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    for index, body in enumerate(bodies):
        ok(driver.cuStreamBeginCaptureToGraph(programs.stream, body, None, None, 0, mode))
        ok(driver.cuMemsetD32Async(programs.memory + 4 * index, 7 + index, 1, programs.stream))
        assert int(body) == int(ok(driver.cuStreamEndCapture(programs.stream)))
    programs.set(0, 0)
    programs.run()
    assert [0, 8] == programs.numbers(2)


def test_conditional_nodes_that_make_no_sense_are_refused(driver, ok, programs):
    handle, other = programs.condition(), ok(driver.cuGraphCreate(0))
    add = driver.cuGraphAddNode
    for params in (
        programs.conditional_params(WHILE, 2, handle),
        programs.conditional_params(IF, 3, handle),
        programs.conditional_params(SWITCH, 0, handle),
        programs.conditional_params(IF, 1, 12345),
    ):
        assert "ERROR_INVALID_VALUE" == name(add(programs.graph, None, None, 0, params))
    params = programs.conditional_params(IF, 1, handle)
    assert "ERROR_INVALID_VALUE" == name(add(other, None, None, 0, params))  # the handle is of another graph
    ok(add(programs.graph, None, None, 0, params))
    assert "ERROR_INVALID_VALUE" == name(add(programs.graph, None, None, 0, params))  # the handle has its node
    assert "ERROR_NOT_SUPPORTED" == name(driver.cuGraphClone(programs.graph))
    assert "ERROR_NOT_SUPPORTED" == name(driver.cuGraphAddChildGraphNode(other, None, 0, programs.graph))
    ok(driver.cuGraphDestroy(other))


def test_condition_of_a_destroyed_node_can_have_another(driver, ok, programs):
    handle = programs.condition(default=1)
    node, _ = programs.add_conditional(IF, 1, handle)
    ok(driver.cuGraphDestroyNode(node))
    _, (body,) = programs.add_conditional(IF, 1, handle)
    programs.affine(1, 1, graph=body)
    programs.run()
    assert [1] == programs.numbers()


def test_condition_without_a_node_cannot_be_instantiated(driver, programs):
    programs.condition()
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphInstantiateWithParams(programs.graph, params))
    assert "CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED" == params.result_out.name


def test_host_nodes_cannot_be_instantiated_in_a_body(driver, programs):
    _, (body,) = programs.add_conditional(IF, 1, programs.condition(default=0))
    host = programs.add_host("h", graph=body)
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphInstantiateWithParams(programs.graph, params))
    assert int(host) == int(params.hErrNode_out)


# ---- User objects ----


@pytest.fixture
def user_object(driver, ok, programs):
    """A user object with one reference; its destructor notes itself in programs.order."""
    return ok(driver.cuUserObjectCreate(0, driver.CUhostFn(programs.host_function("destroyed")), 1, 1))


def test_user_object_ends_with_its_last_reference(driver, ok, programs, user_object):
    ok(driver.cuUserObjectRetain(user_object, 2))
    ok(driver.cuUserObjectRelease(user_object, 2))
    assert [] == programs.order
    ok(driver.cuUserObjectRelease(user_object, 1))
    assert ["destroyed"] == programs.order


def test_user_object_lives_as_long_as_graphs_and_executable_graphs(driver, ok, programs, user_object):
    ok(driver.cuGraphRetainUserObject(programs.graph, user_object, 1, 1))  # moved: the graph's now
    clone = ok(driver.cuGraphClone(programs.graph))
    executable = programs.instantiate()
    ok(driver.cuGraphDestroy(programs.graph))
    ok(driver.cuGraphDestroy(clone))
    ok(driver.cuGraphLaunch(executable, programs.stream))
    ok(driver.cuGraphExecDestroy(executable))
    assert [] == programs.order  # a launch is in flight
    ok(driver.cuStreamSynchronize(programs.stream))
    assert ["destroyed"] == programs.order


def test_graph_releases_only_references_that_it_has(driver, ok, programs, user_object):
    assert "ERROR_INVALID_VALUE" == name(driver.cuGraphReleaseUserObject(programs.graph, user_object, 1))
    ok(driver.cuGraphRetainUserObject(programs.graph, user_object, 1, 0))
    ok(driver.cuUserObjectRelease(user_object, 1))
    assert [] == programs.order
    ok(driver.cuGraphReleaseUserObject(programs.graph, user_object, 1))
    assert ["destroyed"] == programs.order


def test_user_objects_with_wrong_numbers_are_refused(driver, ok, programs, user_object):
    function = driver.CUhostFn(programs.host_function("never"))
    for answer in (
        driver.cuUserObjectCreate(0, function, 0, 1),
        driver.cuUserObjectCreate(0, function, 1, 0),
        driver.cuUserObjectRetain(user_object, 0),
        driver.cuGraphRetainUserObject(programs.graph, user_object, 1, 2),
    ):
        assert "ERROR_INVALID_VALUE" == name(answer)
    ok(driver.cuUserObjectRelease(user_object, 1))
