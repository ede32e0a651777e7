"""cudatool.nccl: collective operations over two devices of one process."""

from __future__ import annotations

import contextlib
import threading
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool import nccl
from cudatool._driver import gpu_names
from cudatool.errors import CudaError, UsageError
from cudatool.overview.execution import kernels, operations
from cudatool.trace.events import AccessFlag, Event, Kind, unpack_dims
from cudatool.trace.reader import read

RNG = np.random.default_rng(0)
REDUCED = {nccl.SUM: np.add, nccl.PROD: np.multiply, nccl.MAX: np.maximum, nccl.MIN: np.minimum}


@pytest.fixture(autouse=True)
def bindings(device: str) -> None:
    if device == "cuda":
        pytest.importorskip("nccl.bindings", reason="NCCL's bindings are not installed")


def random(size: int, dtype: object = np.float32) -> list[np.ndarray]:
    return [(RNG.normal(size=size) * 8).astype(dtype) for _ in range(2)]


def spread(data: list[np.ndarray]) -> list[cudatool.DeviceArray]:
    return [cudatool.asarray(part, device=index) for index, part in enumerate(data)]


def blank(size: int, dtype: object = np.float32) -> list[cudatool.DeviceArray]:
    return [cudatool.zeros(size, dtype, device=index) for index in range(2)]


@pytest.mark.parametrize("op", REDUCED)
@pytest.mark.parametrize("in_place", [False, True])
def test_all_reduce_gives_every_device_the_result(second: int, op: int, in_place: bool) -> None:
    data = random(100)
    inputs, outputs = spread(data), blank(100)
    nccl.all_reduce(inputs, None if in_place else outputs, op)
    for array in inputs if in_place else outputs:
        np.testing.assert_array_equal(REDUCED[op](*data), array.get())
    if not in_place:
        for array, part in zip(inputs, data, strict=True):
            np.testing.assert_array_equal(part, array.get())


@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.uint8, np.int32, np.int64, np.uint64],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_all_reduce_adds_and_averages_every_dtype(second: int, dtype: object) -> None:
    data = [np.abs(part).astype(dtype) for part in random(50)]
    for op in (nccl.SUM, nccl.AVG):
        arrays = spread(data)
        nccl.all_reduce(arrays, op=op)
        wide = data[0].astype(np.float64) + data[1].astype(np.float64)
        if op == nccl.AVG:
            wide = wide / 2 if data[0].dtype.kind not in "iu" else wide // 2
        for array in arrays:
            np.testing.assert_array_equal(wide.astype(dtype), array.get())


def test_reduce_gives_the_root_the_result(second: int) -> None:
    data = random(10)
    arrays = spread(data)
    nccl.reduce(arrays, root=1)
    np.testing.assert_array_equal(data[0] + data[1], arrays[1].get())
    np.testing.assert_array_equal(data[0], arrays[0].get())
    output = cudatool.zeros(10)
    nccl.reduce(spread(data), output, op=nccl.MAX)
    np.testing.assert_array_equal(np.maximum(*data), output.get())


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.complex64, np.bool, np.int16, ml_dtypes.float8_e5m2],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_broadcast_copies_the_roots_array(second: int, dtype: object) -> None:
    data = random(10, dtype)
    arrays = spread(data)
    nccl.broadcast(arrays, root=1)
    for array in arrays:
        np.testing.assert_array_equal(data[1], array.get())


def test_all_gather_puts_arrays_one_behind_the_other(second: int) -> None:
    data = random(10)
    outputs = blank(20)
    nccl.all_gather(spread(data), outputs)
    for array in outputs:
        np.testing.assert_array_equal(np.concatenate(data), array.get())


def test_all_gather_in_place_sends_a_part_of_what_it_receives(second: int) -> None:
    data = random(10)
    outputs = blank(20)
    inputs = [output[10 * rank : 10 * rank + 10].copy_(data[rank]) for rank, output in enumerate(outputs)]
    nccl.all_gather(inputs, outputs)
    for array in outputs:
        np.testing.assert_array_equal(np.concatenate(data), array.get())


def test_reduce_scatter_gives_each_device_its_part(second: int) -> None:
    data = random(20)
    outputs = blank(10)
    nccl.reduce_scatter(spread(data), outputs)
    for array, part in zip(outputs, np.split(data[0] + data[1], 2), strict=True):
        np.testing.assert_array_equal(part, array.get())


def test_ranks_send_to_each_other_in_a_group(second: int) -> None:
    data = random(10)
    inputs, outputs = spread(data), blank(10)
    communicators = nccl.init_all([0, second])
    with nccl.group():
        for communicator in communicators:
            other = 1 - communicator.rank
            communicator.recv(outputs[communicator.rank], other)
            communicator.send(inputs[communicator.rank], other)
    for array, part in zip(outputs, reversed(data), strict=True):
        np.testing.assert_array_equal(part, array.get())
    for communicator in communicators:
        communicator.close()


def test_operations_of_a_group_are_all_done(second: int) -> None:
    data = random(10)
    sums, most, copies = (spread(data) for _ in range(3))
    with nccl.group():
        nccl.all_reduce(sums)
        nccl.all_reduce(most, op=nccl.MAX)
        nccl.broadcast(copies)
    for index in range(2):
        np.testing.assert_array_equal(data[0] + data[1], sums[index].get())
        np.testing.assert_array_equal(np.maximum(data[0], data[1]), most[index].get())
        np.testing.assert_array_equal(data[0], copies[index].get())


def test_group_that_an_exception_leaves_takes_back_its_own_calls_alone(second: int) -> None:
    data = random(10)
    sums, kept = spread(data), spread(data)
    communicators = nccl.init_all([0, second])
    with nccl.group():
        nccl.all_reduce(sums)
        with contextlib.suppress(ZeroDivisionError), nccl.group():
            communicators[0].broadcast(kept[0])  # the other rank's call does not come
            raise ZeroDivisionError
    for index in range(2):
        np.testing.assert_array_equal(data[0] + data[1], sums[index].get())
        np.testing.assert_array_equal(data[index], kept[index].get())
    for communicator in communicators:
        communicator.close()


def test_operation_is_in_order_with_the_streams_it_is_given(second: int) -> None:
    data = random(1000)
    streams = [cudatool.Stream(index) for index in range(2)]
    arrays = spread(data)
    for stream, array in zip(streams, arrays, strict=True):
        stream.wait_stream(cudatool.current_stream(array.device))
        with cudatool.stream(stream):
            array.fill_(2 + array.device)
    nccl.all_reduce(arrays, streams=streams)
    for stream, array in zip(streams, arrays, strict=True):
        with cudatool.stream(stream):
            after = array.clone()
            array.fill_(0)
            np.testing.assert_array_equal(np.full(1000, 5, np.float32), after.get())


def test_captured_operation_takes_place_at_every_launch_of_the_graph(second: int) -> None:
    streams = [cudatool.Stream(index) for index in range(2)]
    arrays = spread([np.ones(10, np.float32)] * 2)
    for stream in streams:
        stream.wait_stream(cudatool.current_stream(stream.device_index))
    nccl.all_reduce(arrays, streams=streams)  # NCCL connects the devices at the first operation
    cudatool.synchronize(second)  # the capture waits for its own device alone
    graph = cudatool.CUDAGraph()
    with cudatool.graph(graph, stream=streams[0]):
        streams[1].wait_stream(streams[0])
        nccl.all_reduce(arrays, streams=streams)
        streams[0].wait_stream(streams[1])
    for _ in range(3):
        graph.replay()
    for index in range(2):
        cudatool.synchronize(index)
    assert [[16.0] * 10] * 2 == [array.get().tolist() for array in arrays]


def test_arrays_without_elements_are_reduced_too(second: int) -> None:
    arrays = blank(0)
    nccl.all_reduce(arrays)
    assert [(0,), (0,)] == [array.get().shape for array in arrays]


def test_is_available_for_contiguous_arrays_of_different_devices(second: int) -> None:
    one, other = blank(4)
    assert nccl.is_available([one, other])
    assert not nccl.is_available([one, one])
    assert not nccl.is_available([one, other[::2]])
    assert not nccl.is_available([cudatool.zeros(1, np.complex64)])
    assert not nccl.is_available([np.zeros(4)])  # type: ignore[list-item]


def test_version_has_three_numbers() -> None:
    major, _, _ = nccl.version()
    assert major == 2


def test_unique_ids_are_unique() -> None:
    ids = {nccl.unique_id() for _ in range(3)}
    assert 3 == len(ids)
    assert {128} == {len(uid) for uid in ids}


def test_what_does_not_fit_is_refused(second: int) -> None:
    one, other = blank(4)
    with pytest.raises(UsageError, match="collection of device arrays"):
        nccl.all_reduce(one)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="as many outputs as inputs"):
        nccl.all_reduce([one, other], [one])
    with pytest.raises(UsageError, match="differ in size or dtype"):
        nccl.all_reduce([one, other[1:]])
    with pytest.raises(UsageError, match="needs its own device"):
        nccl.all_reduce([one, one])
    with pytest.raises(UsageError, match="contiguous"):
        nccl.all_reduce([one[::2], other[::2]])
    with pytest.raises(UsageError, match="8 of float32 are needed"):
        nccl.all_gather([one, other], [one, other])
    with pytest.raises(UsageError, match="2 of float32 are needed"):
        nccl.reduce_scatter([one, other], [one, other])
    with pytest.raises(UsageError, match="cannot compute with int16"):
        nccl.all_reduce(blank(1, np.int16))
    with pytest.raises(UsageError, match="is no reduction"):
        nccl.all_reduce([one, other], op=7)
    with pytest.raises(UsageError, match="no rank 2"):
        nccl.reduce([one, other], root=2)
    with pytest.raises(UsageError, match="the stream is of device 0"):
        nccl.all_reduce([one, other], streams=[None, cudatool.Stream(0)])
    nccl.all_reduce([one, other])  # nothing of the above is left over


def test_init_rank_checks_its_numbers() -> None:
    with pytest.raises(UsageError, match="rank 2 is none of 2"):
        nccl.init_rank(2, nccl.unique_id(), 2)
    with pytest.raises(UsageError, match="128 bytes"):
        nccl.init_rank(2, b"me", 1)


def test_communicator_of_one_rank_gives_back_what_it_is_given() -> None:
    with nccl.init_rank(1, nccl.unique_id(), 0) as communicator:
        array = communicator.all_reduce(cudatool.full(3, 4), op=nccl.AVG)
        assert [4, 4, 4] == array.get().tolist()
    with pytest.raises(CudaError, match="closed"):
        communicator.all_reduce(array)


def test_nothing_is_kept_of_ranks_that_are_closed(device: str) -> None:
    if device == "cuda":
        pytest.skip("NCCL's own")
    communicator = nccl.init_rank(1, nccl.unique_id(), 0)
    communicator.all_reduce(cudatool.ones(3))
    handle = weakref.ref(communicator._handle)
    communicator.close()
    assert handle() is None


def test_ranks_can_be_threads(second: int) -> None:
    uid, results = nccl.unique_id(), {}

    def run(rank: int) -> None:
        with cudatool.device(rank), nccl.init_rank(2, uid, rank) as communicator:
            array = cudatool.full(10, rank + 1)
            communicator.all_reduce(array)
            communicator.broadcast(array.fill_(rank), root=1)
            results[rank] = (communicator.device, array.get().tolist())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {0: (0, [1.0] * 10), 1: (1, [1.0] * 10)} == results


@pytest.mark.skipif(bool(gpu_names()), reason="NCCL does not notice that calls do not fit each other")
class TestMistakes:
    def test_call_of_one_rank_alone_is_refused(self, second: int) -> None:
        communicators = nccl.init_all()
        with pytest.raises(UsageError, match="put those of all ranks in one"):
            communicators[0].all_reduce(cudatool.zeros(1))

    def test_different_operations_are_refused(self, second: int) -> None:
        communicators, arrays = nccl.init_all(), blank(4)
        with pytest.raises(UsageError, match=r"all_reduce\(op=0, root=0\) and broadcast"), nccl.group():
            communicators[0].all_reduce(arrays[0])
            communicators[1].broadcast(arrays[1])

    def test_different_sizes_are_refused(self, second: int) -> None:
        communicators, arrays = nccl.init_all(), blank(4)
        with pytest.raises(UsageError, match="4 elements of float32 are received in 3 of float32"), nccl.group():
            communicators[0].send(arrays[0], 1)
            communicators[1].recv(arrays[1][:3], 0)


def test_trace_tells_each_ranks_part_with_its_accesses(second: int, events: list[Event]) -> None:
    inputs, outputs = blank(6), blank(12)
    events.clear()
    nccl.all_gather(inputs, outputs)
    parts = [event for event in events if event.kind is Kind.COLLECTIVE]
    assert [(0, 2, 1), (1, 2, 1)] == [unpack_dims(event.aux1) for event in parts]
    assert 1 == len({event.aux0 for event in parts})
    for rank, part in enumerate(parts):
        stream = cudatool.current_stream(rank).trace_id()
        assert ("all_gather", rank, stream, 48) == (part.name, part.device, part.stream, part.size)
        told = [
            (e.address, e.size, e.flags) for e in events if e.kind is Kind.ACCESS and e.correlation == part.correlation
        ]
        assert [
            (inputs[rank].data_ptr(), 24, AccessFlag.READ),
            (outputs[rank].data_ptr(), 48, AccessFlag.WRITE),
        ] == told


def test_trace_tells_which_parts_are_of_one_group(second: int, events: list[Event]) -> None:
    arrays = blank(6)
    events.clear()
    nccl.all_reduce(arrays)
    nccl.all_reduce(arrays)
    assert [0, 1, 0, 1] == [event.flags for event in events if event.kind is Kind.COLLECTIVE]


def test_trace_tells_nothing_that_a_rank_does_not_touch(second: int, events: list[Event]) -> None:
    arrays = blank(6)
    events.clear()
    nccl.broadcast(arrays, root=1)
    accesses = [event for event in events if event.kind is Kind.ACCESS]
    assert [(0, AccessFlag.WRITE), (1, AccessFlag.READ)] == [(event.device, event.flags) for event in accesses]


def test_calls_are_in_the_trace_by_their_names(second: int, calls: list[Event]) -> None:
    nccl.all_reduce(blank(1))
    names = [event.name for event in calls if event.name.startswith("cudatool.nccl.")]
    assert ["cudatool.nccl.Communicator.all_reduce"] * 2 + ["cudatool.nccl.all_reduce"] == names[-3:]


def test_software_device_computes_in_what_the_trace_tells_of_each_rank(
    second: int, device: str, tmp_path: Path
) -> None:
    if device != "sim":
        pytest.skip("executions on a GPU are told by CUPTI")
    arrays = blank(6)
    with cudatool.record(tmp_path / "t.ctrace"):
        nccl.all_reduce(arrays)
        cudatool.synchronize(0), cudatool.synchronize(1)
    trace = read(tmp_path / "t.ctrace")
    ran = operations(trace)
    assert [(0, Kind.COLLECTIVE), (1, Kind.COLLECTIVE)] == list(
        zip(ran.device.tolist(), trace.records["kind"][ran.call].tolist(), strict=True)
    )
    (kernel,) = kernels(trace, ran)
    assert ("all_reduce", 2) == (kernel.name, kernel.launches)


def test_a_rank_of_the_software_device_has_its_result_when_its_own_stream_comes() -> None:
    from cudatool.nccl._calls import Name, RankPart
    from cudatool.nccl._host import _Meeting

    arrays = [np.full(3, 1, np.float32), np.full(3, 2, np.float32)]
    stream: Any = None
    meeting = _Meeting([RankPart(Name.ALL_REDUCE, x, x, rank, 0, nccl.SUM, stream) for rank, x in enumerate(arrays)])
    meeting.come(0)
    assert [3, 2] == [x[0] for x in arrays]
    meeting.come(1)
    assert [3, 3] == [x[0] for x in arrays]
