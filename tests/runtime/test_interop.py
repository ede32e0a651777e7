"""Arrays of other libraries, in and out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cudatool
from cudatool.errors import UsageError
from cudatool.trace.events import Event, Kind


class Foreign:
    """Another library's array, which knows one protocol."""

    def __init__(self, array: cudatool.DeviceArray, *, readonly: bool = False, stream: int | None = None) -> None:
        interface = dict(array.__cuda_array_interface__)
        interface["data"] = (interface["data"][0], readonly)
        interface["stream"] = interface["stream"] if stream is None else stream
        self.__cuda_array_interface__ = interface
        self.owner = array


VIEWS = [np.s_[...], np.s_[::2], np.s_[:, 1:3], np.s_[::-1], np.s_[1, ::2], np.s_[1, 2]]


@pytest.mark.parametrize("index", VIEWS, ids=repr)
def test_cuda_array_interface_there_and_back(index: Any) -> None:
    view = cudatool.asarray(np.arange(24.0).reshape(4, 6))[index]
    found = cudatool.asarray(Foreign(view))
    assert (found.data_ptr(), found.shape, found.dtype) == (view.data_ptr(), view.shape, view.dtype)
    np.testing.assert_array_equal(found.get(), view.get())


@pytest.mark.parametrize("index", VIEWS, ids=repr)
def test_dlpack_there_and_back(index: Any) -> None:
    view = cudatool.asarray(np.arange(24.0).reshape(4, 6))[index]
    found = cudatool.from_dlpack(view)
    assert (found.data_ptr(), found.shape, found.dtype) == (view.data_ptr(), view.shape, view.dtype)
    np.testing.assert_array_equal(found.get(), view.get())


class ForeignDLPack:
    """Another library's array, which knows DLPack alone."""

    def __init__(self, array: cudatool.DeviceArray) -> None:
        self.owner = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.owner.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.owner.__dlpack__(**options)


@pytest.mark.parametrize("library", [Foreign, ForeignDLPack])
def test_arrays_of_other_libraries_are_copied_into_ours(library: Any) -> None:
    given = library(cudatool.asarray(np.arange(3.0)))
    assert [0, 1, 2] == cudatool.zeros(3).copy_(given).get().tolist()
    array = cudatool.zeros(5)
    array[1:4] = given
    assert [0, 0, 1, 2, 0] == array.get().tolist()


@pytest.mark.parametrize("dtype", ["?", "i1", "u4", "i8", "f2", "bfloat16", "f4", "c8"])
def test_dlpack_keeps_the_dtype(dtype: str) -> None:
    array = cudatool.ones(3, dtype)
    found = cudatool.from_dlpack(array)
    assert found.dtype == array.dtype
    assert found.get().tolist() == array.get().tolist()


def test_interface_names_memory_layout_and_stream() -> None:
    array = cudatool.zeros((4, 6))
    interface = array[:, 1:3].__cuda_array_interface__
    assert interface["version"] == 3
    assert interface["shape"] == (4, 2)
    assert interface["strides"] == (24, 4)
    assert interface["data"] == (array.data_ptr() + 4, False)
    assert interface["stream"] == 1
    assert array.__cuda_array_interface__["strides"] is None
    with cudatool.stream(cudatool.Stream()) as _:
        assert array.__cuda_array_interface__["stream"] == cudatool.current_stream().cuda_stream


def test_exported_memory_lives_as_long_as_the_importer() -> None:
    array = cudatool.ones(1000)
    address = array.data_ptr()
    found = cudatool.from_dlpack(array)
    del array
    assert cudatool.empty(1000).data_ptr() != address
    assert found.get().sum() == 1000


def test_consumer_stream_waits_for_the_producer(events: list[Event]) -> None:
    consumer = cudatool.Stream()
    array = cudatool.ones(3)
    events.clear()
    array.__dlpack__(stream=consumer.cuda_stream)
    waits = [event for event in events if event.kind is Kind.STREAM_WAIT_EVENT]
    assert [event.stream for event in waits] == [consumer.trace_id()]


@pytest.mark.parametrize("stream", [-1, 1, None])
def test_no_wait_where_none_is_needed(events: list[Event], stream: int | None) -> None:
    array = cudatool.ones(3)
    events.clear()
    array.__dlpack__(stream=stream)
    assert [event for event in events if event.kind is Kind.STREAM_WAIT_EVENT] == []


class Copied:
    """Asks the exporter for a copy, as a consumer may."""

    def __init__(self, array: cudatool.DeviceArray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**{**options, "copy": True})


def test_dlpack_copy_is_another_array() -> None:
    array = cudatool.ones(3)
    found = cudatool.from_dlpack(Copied(array))
    assert found.data_ptr() != array.data_ptr()
    assert found.get().tolist() == [1, 1, 1]


def test_host_arrays_come_over_dlpack_too() -> None:
    found = cudatool.from_dlpack(np.arange(5))
    assert found.get().tolist() == [0, 1, 2, 3, 4]


def test_foreign_array_can_be_copied_from() -> None:
    source = Foreign(cudatool.asarray(np.arange(6.0)))
    assert cudatool.zeros(6, np.float32).copy_(source).get().tolist() == [0, 1, 2, 3, 4, 5]


def test_array_of_an_unknown_device_is_refused() -> None:
    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 10, 0  # kDLROCM

    with pytest.raises(UsageError, match="device type 10"):
        cudatool.from_dlpack(Elsewhere())


def test_read_only_import_cannot_be_written() -> None:
    found = cudatool.asarray(Foreign(cudatool.ones(3), readonly=True))
    assert found.get().tolist() == [1, 1, 1]
    for write in (lambda: found.fill_(2), lambda: found.copy_(np.zeros(3)), lambda: found[:1].fill_(2)):
        with pytest.raises(UsageError, match="read-only"):
            write()


def test_foreign_memory_needs_no_record_stream(events: list[Event]) -> None:
    found = cudatool.asarray(Foreign(cudatool.ones(3)))
    events.clear()
    found.record_stream(cudatool.Stream())
    assert [event for event in events if event.kind is Kind.BLOCK_RECORD_STREAM] == []
