"""Calls that say what they access."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cudatool as ct
from cudatool.runtime.extents import Extent, extents
from cudatool.trace import Event, hooks
from cudatool.trace.events import AccessFlag, Kind

R, W = AccessFlag.READ, AccessFlag.WRITE
SOURCE = 'extern "C" __global__ void follow(float **rows) { rows[0][threadIdx.x] = 1; }'


@pytest.fixture
def told(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that gives each operation of the test, by name, with its accesses."""
    monkeypatch.setattr(hooks, "wants_accesses", True)

    def operations() -> list[tuple[str, list[tuple[int, ...]]]]:
        ct.synchronize()
        return [
            (
                event.name,
                [
                    (access.flags, access.address, access.size, *([access.aux0, access.aux1] if access.aux1 else []))
                    for access in events
                    if access.kind is Kind.ACCESS and access.correlation == event.correlation
                ],
            )
            for event in events
            if event.kind in (Kind.KERNEL_LAUNCH, Kind.HOST_FUNCTION)
        ]

    yield operations


def follow(*arrays: ct.DeviceArray) -> None:
    pointers = ct.asarray(np.array([array.data_ptr() for array in arrays], np.uint64))
    ct.compile(SOURCE, "follow")[1, 4](pointers)


def test_launch_inside_has_the_accesses_said_and_not_those_inferred(told):
    x, y = ct.zeros(4), ct.zeros((4, 6))
    with ct.annotate(reads=[x], writes=[y[:, 2:4]]):
        follow(x)
    assert [("follow", [(R, x.data_ptr(), 16), (W, y.data_ptr() + 8, 8, 24, 4)])] == told()


def test_after_it_accesses_are_inferred_again(told):
    x = ct.zeros(4)
    with ct.annotate(writes=[x]):
        pass
    follow(x)
    (_, annotated), (name, inferred) = told()
    assert ("follow", [(W, x.data_ptr(), 16)]) == (name, annotated)
    assert all(flags & AccessFlag.INEXACT for flags, *_ in inferred)


def test_call_that_enqueues_nothing_seen_is_an_operation_on_the_current_stream(told, events):
    x, stream = ct.zeros(4), ct.Stream()
    with stream, ct.annotate(reads=[(x.data_ptr(), 8)], name="fft"):
        pass
    with ct.annotate(writes=[x], stream=stream):
        pass
    assert [
        ("fft", [(R, x.data_ptr(), 8)]),
        ("annotated call", [(W, x.data_ptr(), 16)]),
    ] == told()
    launches = [event for event in events if event.kind is Kind.KERNEL_LAUNCH]
    assert {stream.trace_id()} == {event.stream for event in launches}
    assert __file__ == hooks.stacks.frames(launches[0].stack)[0].file


def test_copies_inside_are_known_by_themselves(told, events):
    x, y = ct.zeros(4), ct.zeros(4)
    with ct.annotate(writes=[y]):
        x.copy_(y)
    assert [] == told()


def test_device_that_measures_needs_no_annotation(told, monkeypatch):
    monkeypatch.setattr(hooks, "measures_accesses", True)
    with ct.annotate(writes=[ct.zeros(4)]):
        follow(ct.zeros(4))
    with ct.annotate(writes=[ct.zeros(4)]):
        pass
    assert [("follow", [])] == told()


def test_call_that_fails_is_no_operation(told):
    with pytest.raises(ZeroDivisionError), ct.annotate(writes=[ct.zeros(4)]):
        _ = 1 / 0
    assert [] == told()


def test_other_threads_work_is_not_meant(told):
    import threading

    x = ct.zeros(4)
    with ct.annotate(writes=[x], name="mine"):
        thread = threading.Thread(target=follow, args=(x,))
        thread.start()
        thread.join()
    accesses = dict(told())
    assert [(W, x.data_ptr(), 16)] == accesses["mine"]
    assert (W, x.data_ptr(), 16) not in accesses["follow"]


def test_one_annotation_can_be_shared_by_threads(told, shared_by_threads):
    before = len(hooks._subscribers)
    said = ct.annotate(writes=[ct.zeros(4)])
    inside = shared_by_threads(said, ct.annotate(), lambda: len(hooks._subscribers))
    assert [before + 2, before + 1] == inside  # the other thread is in both, then in its own
    assert before == len(hooks._subscribers)


def test_function_names_its_parameters(told):
    @ct.annotate(reads=["a"], writes=["out"])
    def transform(a, scale=1, *, out):
        """Return nothing."""
        return scale

    a, out = ct.zeros(4), ct.zeros(2)
    assert 3 == transform(a, 3, out=out)
    assert ("transform", "Return nothing.") == (transform.__name__, transform.__doc__)
    assert [("transform", [(R, a.data_ptr(), 16), (W, out.data_ptr(), 8)])] == told()


def test_function_calls_itself(told):
    x = ct.zeros(4)

    @ct.annotate(writes=[x])
    def again(times):
        if times:
            again(times - 1)

    again(2)
    assert 1 == len(told())  # the inner call is what the outer ones enqueue


class Interface:
    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {"version": 3, **interface}


class Tensor:
    """As far as it matters, one of PyTorch's, of a dtype that NumPy has not."""

    shape = (2, 3)

    def data_ptr(self) -> int:
        return 4096

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return (10, 1)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (Interface(shape=(2, 3), typestr="<f4", data=(4096, False), strides=None), (4096, 24)),
        (Interface(shape=(2, 3), typestr="<f4", data=(4096, False), strides=(20, 4)), (4096, 12, 20, 2)),
        (Interface(shape=(), typestr="<f8", data=(4096, False)), (4096, 8)),
        (Interface(shape=(0, 3), typestr="<f8", data=(0, False)), None),
        (Tensor(), (4096, 6, 20, 2)),
        ((4096, 10), (4096, 10)),
        ((4096, 0), None),
    ],
)
def test_what_counts_as_an_array(array, expected, told):
    with ct.annotate(reads=[array]):
        pass
    assert [("annotated call", [(R, *expected)] if expected else [])] == told()


def test_arrays_of_dlpack_and_of_the_host(told):
    class Exporter:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    x, pinned = ct.zeros((4, 6)), ct.empty_pinned(4)
    with ct.annotate(reads=[Exporter(x[:, 1])], writes=[pinned]):
        pass
    assert [
        ("annotated call", [(R, x.data_ptr() + 4, 4, 24, 4), (W, pinned.ctypes.data, 16)]),
    ] == told()


def test_what_is_no_array_is_refused(events):
    with pytest.raises(ct.CudatoolError, match="str is no array"), ct.annotate(reads=["x"]):
        pass
    with pytest.raises(ct.CudatoolError, match="not DeviceArray"):
        ct.annotate(reads=ct.zeros(4))
    with pytest.raises(ct.CudatoolError, match="has no parameter 'y'"):
        ct.annotate(writes=["y"])(lambda x: None)
    with pytest.raises(ct.CudatoolError, match=r"\(-1, 4\) is not \(address, bytes\)"), ct.annotate(reads=[(-1, 4)]):
        pass


def test_nothing_happens_without_subscribers():
    with ct.annotate(reads=["no array"]):
        pass


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (np.s_[:], [(0, 480)]),
        (np.s_[::-1, ::-1, ::-1], [(0, 480)]),
        (np.s_[1], [(120, 120)]),
        (np.s_[:, :, 1], [(4 * 1, 4, 24, 20)]),
        (np.s_[:, 1:3], [(24, 48, 120, 4)]),
        (np.s_[::2, :, ::-5], [(0, 4, 24, 5), (20, 4, 24, 5), (240, 4, 24, 5), (260, 4, 24, 5)]),
        (np.s_[None, 0, None, 0, :2], [(0, 8)]),
        (np.s_[2:2], []),
    ],
)  # fmt: skip
def test_bytes_of_views(view, expected):
    array = np.zeros((4, 5, 6), np.float32)
    parts = extents(array[view])
    start = array.ctypes.data
    assert expected == [
        (part.address - start, part.size, *([part.stride, part.rows] if part.rows > 1 else [])) for part in parts
    ]


@pytest.mark.some_of("seed", range(40), 12)
def test_bytes_of_any_view_are_those_of_its_elements(seed):
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 6, random.integers(1, 5)))
    array = np.zeros(shape, random.choice(["u1", "<u2", "<f4", "V3"]))
    array = array.transpose(random.permutation(array.ndim))
    view = array[tuple(slice(None, None, int(random.choice([1, 1, 2, 3, -1, -2]))) for _ in shape)]
    if seed % 4 == 0:
        view = np.lib.stride_tricks.sliding_window_view(view, tuple((n + 1) // 2 for n in view.shape))
    touched = set()
    for part in extents(view):
        for row in range(part.rows):
            touched |= set(range(part.address + row * part.stride, part.address + row * part.stride + part.size))
    expected = set()
    for index in np.ndindex(*view.shape):
        at = view.ctypes.data + sum(i * stride for i, stride in zip(index, view.strides, strict=True))
        expected |= set(range(at, at + view.itemsize))
    assert expected == touched


def test_view_of_too_many_rows_is_one_inexact_range():
    array = np.zeros((160, 160, 160), np.uint8)[:, :159, ::3]
    (part,) = extents(array)
    assert Extent(array.ctypes.data, 159 * 160 * 160 + 158 * 160 + 159 + 1, exact=False) == part
