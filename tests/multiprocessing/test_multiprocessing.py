"""Arrays and events through queues of multiprocessing: used where they lie, kept while somebody needs them."""

from __future__ import annotations

import multiprocessing
import pickle
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cudatool
import cudatool.multiprocessing
from cudatool.errors import UsageError
from cudatool.runtime import ipc_loans

sys.path.insert(0, str(Path(__file__).parent))  # the other processes import it, too

import shared_arrays

CONTEXT = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def nothing_is_lent() -> Iterator[None]:
    yield
    wait_until_given_back()
    cudatool.ipc_collect()


def wait_until_given_back() -> None:
    """Wait for the thread of multiprocessing that passes on descriptors: it has its own until after the other's."""
    poll = select.poll()
    pipes = [lent.pipe.number for lent in ipc_loans._lent.values()]
    for pipe in pipes:
        poll.register(pipe, 0)
    deadline = time.monotonic() + 60
    while len(poll.poll(0)) < len(pipes):
        assert time.monotonic() < deadline, "a loan is not over"
        time.sleep(0.001)


@contextmanager
def other(part: Callable[..., None]) -> Iterator[tuple[Any, Any, Any]]:
    """A process that runs `part`, and queues to it and from it."""
    inbox, outbox = CONTEXT.Queue(), CONTEXT.Queue()
    process = CONTEXT.Process(target=part, args=(inbox, outbox))
    process.start()
    try:
        yield inbox, outbox, process
        inbox.put(None)
        process.join(timeout=60)
        assert process.exitcode is not None
    finally:
        process.kill()  # this process would wait for it at its end


def test_array_is_used_where_it_lies() -> None:
    """Source: test_multiprocessing.py::test_cuda_simple"""
    with other(shared_arrays.doubles) as (inbox, outbox, _):
        for data in (np.arange(5.0), np.arange(600_000, dtype=np.float32).reshape(2, -1)):
            array = cudatool.asarray(data)
            inbox.put(array)
            np.testing.assert_array_equal(data, outbox.get(timeout=60))
            np.testing.assert_array_equal(2 * data, array.get())


def test_what_any_stream_has_written_is_there() -> None:
    array, stream = cudatool.zeros(1000), cudatool.Stream()
    stream.wait_stream(cudatool.current_stream())
    with other(shared_arrays.echoes) as (inbox, outbox, _):
        with cudatool.stream(stream):
            array.fill_(4)
            inbox.put(array)
        *_, values = outbox.get(timeout=60)
    np.testing.assert_array_equal(np.full(1000, 4, np.float32), values)


def test_views_and_dtypes_arrive_as_they_are() -> None:
    """
    Source: test_multiprocessing.py::test_cuda_small_tensors
    Source: test_multiprocessing.py::test_empty_tensor_sharing_cuda
    """
    data = np.arange(24.0).reshape(4, 6)
    whole = cudatool.asarray(data)
    views = [whole[1:], whole[::2, ::-3].T, whole[3, 2], whole[:0], cudatool.asarray(data, ml_dtypes.bfloat16)]
    with other(shared_arrays.echoes) as (inbox, outbox, _):
        for view in views:
            inbox.put(view)
            shape, dtype, strides, values = outbox.get(timeout=60)
            assert (view.shape, str(view.dtype)) == (shape, dtype)
            if view.size:
                assert view.strides == strides
            np.testing.assert_array_equal(view.get(), values)


def test_block_is_not_used_again_while_the_receiver_has_it() -> None:
    """
    Source: test_multiprocessing.py::test_cuda_send_many
    Source: test_multiprocessing.py::test_cuda_memory_allocation
    """
    with other(shared_arrays.holds) as (inbox, outbox, _):
        array = cudatool.full(1000, 5)
        address, before = array.data_ptr(), cudatool.memory_allocated()
        inbox.put(array)
        assert "here" == outbox.get(timeout=60)
        del array
        cudatool.ipc_collect()
        again = [cudatool.full(1000, 6) for _ in range(3)]
        assert address not in [found.data_ptr() for found in again]
        inbox.put("let go")
        np.testing.assert_array_equal(np.full(1000, 5, np.float32), outbox.get(timeout=60))
        wait_until_given_back()
        cudatool.ipc_collect()
        assert before - 4096 + 3 * 4096 == cudatool.memory_allocated()
        assert address == cudatool.empty(1000).data_ptr()


def test_block_that_is_on_its_way_is_kept() -> None:
    array = cudatool.full(1000, 5)
    address = array.data_ptr()
    message = ForkingPickler.dumps(array)
    del array
    cudatool.ipc_collect()
    again = cudatool.zeros(1000)
    assert address != again.data_ptr()
    arrived = ForkingPickler.loads(message)
    assert (address, [5.0] * 1000) == (arrived.data_ptr(), arrived.get().tolist())


def test_block_comes_back_from_a_process_that_was_killed() -> None:
    with other(shared_arrays.is_killed) as (inbox, outbox, process):
        array = cudatool.full(1000, 5)
        before = cudatool.memory_allocated()
        inbox.put(array)
        assert "here" == outbox.get(timeout=60)
        del array
        process.kill()
        process.join()
        wait_until_given_back()
        cudatool.ipc_collect()
        assert before - 4096 == cudatool.memory_allocated()


def test_allocator_takes_back_what_it_needs_before_it_asks_for_more() -> None:
    cudatool.empty_cache()  # another free block would do as well
    with other(shared_arrays.doubles) as (inbox, outbox, _):
        array = cudatool.zeros(30 << 20, np.uint8)
        address = array.data_ptr()
        inbox.put(array)
        outbox.get(timeout=60)
        del array
        wait_until_given_back()
        assert address == cudatool.empty(30 << 20, np.uint8).data_ptr()


def test_array_that_is_dropped_during_a_capture_does_not_disturb_it() -> None:
    array = cudatool.ones(3)
    with other(shared_arrays.captures) as (inbox, outbox, _):
        inbox.put(array)
        assert outbox.get(timeout=60).tolist() == [2] * 3


def test_what_was_sent_once_is_not_received_twice() -> None:
    sent = bytes(ForkingPickler.dumps(cudatool.ones(3)))
    assert pickle.loads(sent).get().tolist() == [1] * 3
    with pytest.raises(UsageError, match="received once"):
        pickle.loads(sent)


def test_array_of_another_process_is_not_sent_on() -> None:
    with other(shared_arrays.resends) as (inbox, outbox, _):
        inbox.put(cudatool.zeros(3))
        assert "pass array.clone()" in outbox.get(timeout=60)


def test_memory_of_another_library_is_not_sent() -> None:
    foreign = cudatool.from_dlpack(cudatool.zeros(3))
    with pytest.raises(UsageError, match="another library's"):
        ForkingPickler.dumps(foreign)


def test_event_of_this_process_is_waited_for_in_another() -> None:
    """
    Source: test_multiprocessing.py::test_event_multiprocess
    Source: test_multiprocessing.py::test_event
    """
    outbox = CONTEXT.Queue()
    array, event, stream = cudatool.zeros(1000), cudatool.Event(interprocess=True), cudatool.Stream()
    stream.wait_stream(cudatool.current_stream())
    with cudatool.stream(stream):
        array.fill_(3)
        event.record()
        process = CONTEXT.Process(target=shared_arrays.waits, args=(array, event, outbox))
        process.start()
    np.testing.assert_array_equal(np.full(1000, 3, np.float32), outbox.get(timeout=60))
    process.join(timeout=60)
    assert 0 == process.exitcode


def test_event_is_recorded_in_another_process() -> None:
    """
    Source: test_multiprocessing.py::test_event_handle_importer
    Source: test_multiprocessing.py::test_event_handle_exporter
    """
    outbox = CONTEXT.Queue()
    array, event = cudatool.zeros(1000), cudatool.Event(interprocess=True)
    process = CONTEXT.Process(target=shared_arrays.records, args=(array, event, outbox))
    process.start()
    assert "recorded" == outbox.get(timeout=60)
    event.synchronize()
    np.testing.assert_array_equal(np.full(1000, 7, np.float32), array.get())
    process.join(timeout=60)
    assert 0 == process.exitcode


def test_event_with_timing_is_not_sent() -> None:
    with pytest.raises(UsageError, match="interprocess=True"):
        ForkingPickler.dumps(cudatool.Event(enable_timing=True))


def test_it_has_the_names_of_multiprocessing() -> None:
    assert cudatool.multiprocessing.get_context is multiprocessing.get_context
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = cudatool.multiprocessing.no_such_name
