"""Memory of another device: copies of every layout, and kernels that use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool.errors import DeviceUnavailableError, ShapeError, UsageError
from cudatool.trace.events import AccessFlag, CopyFlag, Event, Kind

View = Callable[[Any], Any]
ADD = """
extern "C" __global__ void add(float *sum, const float *a, const float *b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}
"""


@pytest.mark.parametrize(
    ("target_view", "source_view", "dtype"),
    [
        (lambda a: a, lambda a: a, np.float32),
        (lambda a: a.T, lambda a: a, np.float32),
        (lambda a: a[:, 3:], lambda a: a[::-1, ::2], np.float32),
        (lambda a: a[:, ::2], lambda a: a[::2].T, np.float32),
        (lambda a: a, lambda a: a[0], np.float32),
        (lambda a: a[1:2, 3], lambda a: a[2, 2], np.float32),
        (lambda a: a, lambda a: a, np.int64),
        (lambda a: a[:, 1:4], lambda a: a[:, 2:5], np.float64),
        (lambda a: a[:0], lambda a: a[:0], np.float32),
    ],
)
def test_copies_of_every_layout_arrive(second: int, target_view: View, source_view: View, dtype: object) -> None:
    data = np.arange(36, dtype=np.float32).reshape(6, 6)
    for to, from_ in ((0, second), (second, 0)):
        source, target = cudatool.asarray(data, device=from_), cudatool.full((6, 6), -1, dtype, device=to)
        target_view(target).copy_(source_view(source))
        expected = np.full((6, 6), -1, dtype)
        target_view(expected)[...] = source_view(data)
        np.testing.assert_array_equal(expected, target.get())


def test_shapes_that_do_not_fit_are_refused_before_anything_is_copied(second: int, events: list[Event]) -> None:
    target, source = cudatool.zeros((2, 3)), cudatool.zeros((3, 2), device=second)
    events.clear()
    with pytest.raises(ShapeError, match="broadcast"):
        target.copy_(source)
    assert [] == events


def test_copy_is_told_with_both_devices(second: int, events: list[Event]) -> None:
    target, source = cudatool.zeros(6, device=second), cudatool.zeros(6)
    events.clear()
    target.copy_(source)
    (copy,) = [event for event in events if event.kind is Kind.MEMCPY]
    stream = cudatool.current_stream(second).trace_id()
    assert ("cuMemcpyPeerAsync", second, stream, 0b11) == (copy.name, copy.device, copy.stream, copy.aux1)
    assert CopyFlag.ASYNC | CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE == copy.flags
    told = [(e.address, e.size, e.flags) for e in events if e.kind is Kind.ACCESS and e.correlation == copy.correlation]
    assert [(source.data_ptr(), 24, AccessFlag.READ), (target.data_ptr(), 24, AccessFlag.WRITE)] == told


def test_memory_that_is_dropped_after_a_copy_is_not_used_again_too_early(second: int) -> None:
    data = np.arange(10_000, dtype=np.float32)
    with cudatool.stream(cudatool.Stream(second)), cudatool.stream(cudatool.Stream(0)):
        results = []
        for number in range(20):
            source = cudatool.asarray(data + number)
            results.append(cudatool.empty(5000, device=second).copy_(source[::2]))
            del source
        for number, result in enumerate(results):
            np.testing.assert_array_equal(data[::2] + number, result.get())


def test_captured_copy_takes_place_at_every_launch_of_the_graph(second: int) -> None:
    source, target = cudatool.ones(1000), cudatool.zeros(1000, device=second)
    cudatool.synchronize(second)
    graph, stream = cudatool.CUDAGraph(), cudatool.Stream(second)  # a default stream cannot be captured
    with cudatool.stream(stream), cudatool.device(0), cudatool.graph(graph):
        target.copy_(source)
    for value in (2, 3):
        source.fill_(value)
        graph.replay()
        cudatool.synchronize()
        assert [float(value)] * 1000 == target.get().tolist()


def test_kernel_uses_memory_of_a_peer(second: int) -> None:
    for device, peer in ((0, second), (second, 0)):
        if not cudatool.can_device_access_peer(device, peer):
            pytest.skip("the machine does not connect the devices")
        cudatool.enable_peer_access(device, peer)
        cudatool.enable_peer_access(device, peer)  # again changes nothing
        here, there = cudatool.full(100, 2, device=device), cudatool.full(100, 3, device=peer)
        target = cudatool.zeros(100, device=peer)
        cudatool.synchronize(peer)
        with cudatool.device(device):
            cudatool.compile(ADD, "add")[1, 128](target, here, there, 100)
            cudatool.synchronize()
        assert [5.0] * 100 == target.get().tolist()


@pytest.mark.parametrize("make", [cudatool.Stream, cudatool.default_stream])
def test_block_rests_until_the_stream_of_another_device_is_done(
    second: int, make: Callable[[int], cudatool.Stream], delay: Callable[[], None], events: list[Event]
) -> None:
    array = cudatool.full(1000, 3)
    address = array.data_ptr()
    cudatool.synchronize()
    stream = make(second)
    with cudatool.stream(stream):
        delay()
    array.record_stream(stream)
    (told,) = [event for event in events if event.kind is Kind.BLOCK_RECORD_STREAM]
    assert (0, stream.trace_id()) == (told.device, told.stream)
    del array
    assert address != cudatool.empty(1000).data_ptr()
    stream.synchronize()
    assert address == cudatool.empty(1000).data_ptr()


def test_device_is_no_peer_of_itself(second: int) -> None:
    assert not cudatool.can_device_access_peer(0, 0)
    with pytest.raises(UsageError, match="no peer of itself"):
        cudatool.enable_peer_access(0, 0)
    with pytest.raises(DeviceUnavailableError):
        cudatool.enable_peer_access(0, 99)


def test_three_devices_share_what_one_has(device: str) -> None:
    if device != "sim":
        pytest.skip("runs on software devices, once")
    program = (
        "import numpy as np, cudatool as ct\n"
        "from cudatool import comm, nccl\n"
        "data = np.arange(12.0)\n"
        "copies = comm.broadcast(ct.asarray(data), range(3))\n"
        "assert all((copy.get() == data).all() for copy in copies)\n"
        "assert (comm.reduce_add(copies, 2).get() == 3 * data).all()\n"
        "assert (comm.gather(comm.scatter(copies[1], range(3)), destination=0).get() == data).all()\n"
        "nccl.all_reduce(copies, op=nccl.AVG)\n"
        "parts = [ct.zeros(4, np.float64, device=index) for index in range(3)]\n"
        "nccl.reduce_scatter(copies, parts)\n"
        "nccl.all_gather(parts, copies)\n"
        "assert all((copy.get() == 3 * data).all() for copy in copies)\n"
    )
    done = run_python(program, environment={"CUDATOOL_DEVICE": "sim:count=3"})
    assert done.returncode == 0, done.stderr
