"""cudatool.comm: arrays spread over two devices and brought together again."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool import comm
from cudatool.errors import UsageError
from cudatool.trace.events import Event, Kind

RNG = np.random.default_rng(0)


def random(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return (RNG.normal(size=shape) * 10).astype(dtype)


@pytest.mark.parametrize("on_host", [False, True])
def test_broadcast_reaches_every_device(second: int, on_host: bool) -> None:
    """
    Source: test_cuda_multigpu.py::test_broadcast_cpu
    Source: test_cuda_multigpu.py::test_broadcast_gpu
    """
    data = random(5, 5)
    source = data if on_host else cudatool.asarray(data)
    results = comm.broadcast(source, (0, second))
    assert [0, second] == [array.device for array in results]
    for array in results:
        np.testing.assert_array_equal(data, array.get())
    assert (results[0] is source) == (not on_host)


@pytest.mark.parametrize("in_place", [False, True])
def test_broadcast_into_arrays(second: int, in_place: bool) -> None:
    """Source: test_cuda_multigpu.py::test_broadcast_gpu"""
    data = random(5, 5)
    source = cudatool.asarray(data)
    out = [source if in_place else cudatool.empty((5, 5)), cudatool.empty((5, 5), device=second)]
    results = comm.broadcast(source, out=out)
    for array, given in zip(results, out, strict=True):
        assert array is given
        np.testing.assert_array_equal(data, array.get())


def test_broadcast_says_what_does_not_fit(second: int) -> None:
    """Source: test_cuda_multigpu.py::test_broadcast_gpu"""
    source = cudatool.zeros((5, 5))
    with pytest.raises(UsageError, match="Exactly one of 'devices' and 'out'"):
        comm.broadcast(source, (0, second), out=[source])
    with pytest.raises(UsageError, match="CUDA tensors, but output tensor at index 1"):
        comm.broadcast(source, out=[source, np.zeros((5, 5))])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"same shape as the source .+ at index 1"):
        comm.broadcast(source, out=[source, cudatool.zeros((1, 5, 5), device=second)])


def test_broadcast_coalesced_gives_what_broadcast_gives(second: int) -> None:
    """
    Source: test_cuda_multigpu.py::test_broadcast_coalesced_dense_only
    Source: test_cuda_multigpu.py::test_broadcast_coalesced_empty_tensors
    """
    data = [
        random(5, dtype=np.int64),
        random(5),
        random(0, dtype=np.uint8),
        random(5, dtype=np.int64),
        random(5, dtype=np.int64),
        random(10, dtype=np.int32),
        random(5),
        random(3, 4).T,
    ]
    arrays = [cudatool.asarray(part) for part in data]
    first, others = comm.broadcast_coalesced(arrays, (0, second), buffer_size=100)
    assert all(mine is given for mine, given in zip(first, arrays, strict=True))
    for array, part in zip(others, data, strict=True):
        assert (second, part.dtype) == (array.device, array.dtype)
        np.testing.assert_array_equal(part, array.get())


def copies_between(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind is Kind.MEMCPY and event.name == "cuMemcpyPeerAsync"]


@pytest.mark.parametrize(("limit", "travels"), [(64, 2), (63, 4), (1, 4)])
def test_buckets_hold_at_most_the_buffer_size(second: int, events: list[Event], limit: int, travels: int) -> None:
    arrays = [cudatool.zeros(8), cudatool.zeros(8), cudatool.zeros(4, np.float64), cudatool.zeros(4, np.float64)]
    comm.broadcast_coalesced(arrays, (0, second), buffer_size=limit)
    assert travels == len(copies_between(events))


def test_broadcast_coalesced_wants_the_arrays_on_the_first_device(second: int) -> None:
    with pytest.raises(UsageError, match=r"devices\[0\]"):
        comm.broadcast_coalesced([cudatool.zeros(1, device=second)], (0, second))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.int64, np.uint8, np.float16, ml_dtypes.bfloat16, np.complex64], ids=str
)
def test_reduce_add_sums_on_the_destination(second: int, dtype: object) -> None:
    """Source: test_cuda_multigpu.py::test_reduce_add"""
    x, y = random(5, 5, dtype=dtype), random(5, 5, dtype=dtype)
    for destination in (None, second):
        result = comm.reduce_add((cudatool.asarray(x), cudatool.asarray(y, device=second)), destination)
        assert (destination or 0, x.dtype) == (result.device, result.dtype)
        np.testing.assert_array_equal(x + y, result.get())


def test_reduce_add_of_one_array_is_that_array(second: int) -> None:
    array = cudatool.ones(3)
    assert comm.reduce_add([array]) is array


def test_reduce_add_says_what_does_not_fit(second: int) -> None:
    with pytest.raises(UsageError, match="invalid size"):
        comm.reduce_add([cudatool.zeros(2), cudatool.zeros(3, device=second)])
    with pytest.raises(UsageError, match="destination"):
        comm.reduce_add([cudatool.zeros(2), cudatool.zeros(2)], second)


def test_reduce_add_coalesced_gives_what_reduce_add_gives(second: int) -> None:
    """Source: test_cuda_multigpu.py::test_reduce_add_coalesced_dense_only"""
    data = [random(5, dtype=np.int64), random(5), random(5, dtype=np.int64), random(10, dtype=np.int32), random(2, 3)]
    inputs = [[cudatool.asarray(part, device=index) for part in data] for index in (0, second)]
    results = comm.reduce_add_coalesced(inputs, buffer_size=100)
    for result, part in zip(results, data, strict=True):
        assert result.dtype == part.dtype
        np.testing.assert_array_equal(2 * part, result.get())


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("dim", "sizes"), [(0, None), (1, None), (-2, None), (0, (2, 4))])
def test_scatter_cuts_along_a_dimension(second: int, on_host: bool, dim: int, sizes: tuple[int, ...] | None) -> None:
    """
    Source: test_cuda_multigpu.py::test_scatter_cpu
    Source: test_cuda_multigpu.py::test_scatter_cpu_dim
    Source: test_cuda_multigpu.py::test_scatter_cpu_neg_dim
    Source: test_cuda_multigpu.py::test_scatter_cpu_sizes
    Source: test_cuda_multigpu.py::test_scatter_gpu
    Source: test_cuda_multigpu.py::test_scatter_gpu_dim
    Source: test_cuda_multigpu.py::test_scatter_gpu_neg_dim
    Source: test_cuda_multigpu.py::test_scatter_gpu_sizes
    """
    data = random(6, 4)
    source = data if on_host else cudatool.asarray(data)
    expected = np.split(data, [sizes[0] if sizes else data.shape[dim] // 2], axis=dim)
    results = comm.scatter(source, (0, second), sizes, dim)
    for index, (result, part) in enumerate(zip(results, expected, strict=True)):
        assert index == result.device
        np.testing.assert_array_equal(part, result.get())
    if not on_host:
        assert source.data_ptr() == results[0].data_ptr()  # a view
    out = tuple(cudatool.empty(part.shape, device=index) for index, part in enumerate(expected))
    results = comm.scatter(source, dim=dim, out=out)
    for result, given, part in zip(results, out, expected, strict=True):
        assert result is given
        np.testing.assert_array_equal(part, result.get())


def test_scatter_in_unequal_chunks_gives_the_last_device_less(second: int) -> None:
    results = comm.scatter(np.arange(5.0), (0, second))
    assert [[0, 1, 2], [3, 4]] == [result.get().tolist() for result in results]


def test_scatter_copies_on_the_given_streams(second: int, events: list[Event]) -> None:
    stream = cudatool.Stream(second)
    data = np.arange(4.0)
    _, result = comm.scatter(cudatool.asarray(data), (0, second), streams=[None, stream])
    (copy,) = copies_between(events)
    assert stream.trace_id() == copy.stream
    assert cudatool.current_stream(second) == cudatool.default_stream(second)
    with cudatool.stream(stream):
        np.testing.assert_array_equal(data[2:], result.get())


def test_scatter_copies_on_each_of_a_devices_streams(events: list[Event]) -> None:
    streams = [cudatool.Stream(0), None, cudatool.Stream(0)]
    results = comm.scatter(np.arange(6.0), (0, 0, 0), streams=streams)
    ids = [(stream or cudatool.default_stream(0)).trace_id() for stream in streams]
    assert ids == [event.stream for event in events if event.kind is Kind.MEMCPY]
    cudatool.synchronize()
    assert [[0, 1], [2, 3], [4, 5]] == [result.get().tolist() for result in results]


def test_scatter_says_what_does_not_fit(second: int) -> None:
    """Source: test_cuda_multigpu.py::test_scatter_gpu_sizes"""
    source, out = cudatool.zeros((6, 4)), [cudatool.zeros((3, 4)), cudatool.zeros((3, 4), device=second)]
    with pytest.raises(UsageError, match="Expected devices and chunk_sizes to be of same length"):
        comm.scatter(source, (0, 0, 0), chunk_sizes=(2, 4))
    with pytest.raises(UsageError, match="do not add up"):
        comm.scatter(source, (0, second), chunk_sizes=(2, 5))
    with pytest.raises(UsageError, match="'devices' must not be specified"):
        comm.scatter(source, (0, second), out=out)
    with pytest.raises(UsageError, match="'chunk_sizes' must not be specified"):
        comm.scatter(source, chunk_sizes=(3, 3), out=out)
    with pytest.raises(UsageError, match="Expected at least one device to scatter to"):
        comm.scatter(source, ())
    with pytest.raises(UsageError, match="Expected at least one output tensor to scatter to"):
        comm.scatter(source, out=[])
    with pytest.raises(UsageError, match="CUDA tensors, but output tensor at index 0"):
        comm.scatter(source, out=[np.zeros((3, 4)), out[1]])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="Output tensor at index 0 has incorrect shape"):
        comm.scatter(source, out=[out[0].reshape(1, 3, 4), out[1]])
    with pytest.raises(UsageError, match="Total size for output tensors along scatter dim 0"):
        comm.scatter(source, out=[out[0][1:], out[1]])
    with pytest.raises(UsageError, match="Expected the device associated with the stream at index 1"):
        comm.scatter(source, (0, second), streams=[None, cudatool.Stream(0)])
    with pytest.raises(UsageError, match="no dimension 2"):
        comm.scatter(source, (0, second), dim=2)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("destination", [None, 0, "cpu"])
def test_gather_puts_arrays_one_behind_the_other(second: int, dim: int, destination: object) -> None:
    """
    Source: test_cuda_multigpu.py::test_gather
    Source: test_cuda_multigpu.py::test_gather_dim
    Source: test_cuda_multigpu.py::test_gather_neg_dim
    """
    x, y = random(2, 5), random(2, 5)
    parts = cudatool.asarray(x), cudatool.asarray(y, device=second)
    expected = np.concatenate((x, y), dim)
    with cudatool.device(second):
        result = comm.gather(parts, dim, destination=destination)
        where = second if destination is None else destination
        out = np.empty_like(expected) if where == "cpu" else cudatool.empty(expected.shape, device=where)
        assert comm.gather(parts, dim, out=out) is out
    if destination == "cpu":
        assert isinstance(result, np.ndarray)
        np.testing.assert_array_equal(expected, result)
        np.testing.assert_array_equal(expected, out)
    else:
        assert where == result.device
        np.testing.assert_array_equal(expected, result.get())
        np.testing.assert_array_equal(expected, out.get())


def test_gather_says_what_does_not_fit(second: int) -> None:
    """Source: test_cuda_multigpu.py::test_gather"""
    x, y = cudatool.zeros((2, 5)), cudatool.zeros((2, 5), device=second)
    with pytest.raises(UsageError, match="'destination' must not be specified"):
        comm.gather((x, y), destination="cpu", out=np.zeros((4, 5)))
    with pytest.raises(UsageError, match="Expected at least one tensor to gather from"):
        comm.gather(())
    with pytest.raises(UsageError, match="Expected all input tensors to be CUDA tensors"):
        comm.gather((np.zeros((2, 5)), y))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Expected all input tensors to have the same number of dimensions"):
        comm.gather((x, y.reshape(1, 2, 5)))
    with pytest.raises(UsageError, match="Input tensor at index 1 has invalid shape"):
        comm.gather((x, y[:, 1:]))
    with pytest.raises(UsageError, match="Expected out tensor to have shape"):
        comm.gather((x, y), out=np.zeros((5, 5)))
    with pytest.raises(UsageError, match="has dtype"):
        comm.gather((x, cudatool.zeros((2, 5), np.float64, device=second)))


def test_calls_are_in_the_trace_by_their_names(second: int, calls: list[Event]) -> None:
    arrays = comm.broadcast(np.zeros(2), (0, second))
    comm.reduce_add(arrays)
    assert ["cudatool.comm.broadcast", "cudatool.comm.reduce_add"] == [
        event.name for event in calls if event.name.startswith("cudatool.comm.")
    ]
