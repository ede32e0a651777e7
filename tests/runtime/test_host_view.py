"""What the host reads and writes through its arrays in pinned memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cudatool as ct
from cudatool.trace import Event, hooks
from cudatool.trace.events import AccessFlag, Kind

R, W, SOME = AccessFlag.READ, AccessFlag.WRITE, AccessFlag.INEXACT


class Watch:
    """Says what is recorded, as (mode, offset in the array, bytes) or (mode, offset, bytes, stride, rows)."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.found: list[tuple[int, ...]] = []

    def __call__(self, event: Event) -> None:
        if event.kind is Kind.HOST_ACCESS:
            rows = (event.aux0, event.aux1) if event.aux1 else ()
            self.found.append((AccessFlag(event.flags), event.address - self.base, event.size, *rows))


@pytest.fixture
def x() -> ct.HostArray:
    """A 4 x 6 matrix of float32."""
    return ct.host_view(np.arange(24, dtype=np.float32).reshape(4, 6))


@pytest.fixture
def watch(x: ct.HostArray, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(hooks, "strict", True)
    monkeypatch.setattr(hooks, "wants_accesses", True)
    watch = Watch(x.ctypes.data)
    hooks.subscribe(watch)
    yield watch
    hooks.unsubscribe(watch)


ALL = (0, 96)
INDEX = np.array([0, 2])

READS: dict[str, tuple[Callable[[Any], Any], list[tuple[int, ...]]]] = {
    "element": (lambda x: x[1, 2], [(R, 32, 4)]),
    "negative element": (lambda x: x[-1, -1], [(R, 92, 4)]),
    "numpy integer": (lambda x: x[np.int64(1), 2], [(R, 32, 4)]),
    "view": (lambda x: x[1:3], []),
    "element of a view": (lambda x: x[1:3].T[0, 1], [(R, 48, 4)]),
    "transposed": (lambda x: x.T, []),
    "reshaped": (lambda x: x.reshape(6, 4), []),
    "reshaped as a copy": (lambda x: x.T.reshape(24), [(R, 0, 96)]),
    "row sum": (lambda x: x[1].sum(), [(R, 24, 24)]),
    "column sum": (lambda x: x[:, 1].sum(), [(R, 4, 4, 24, 4)]),
    "every other column": (lambda x: +x[:, ::2], [(R, 0, 4, 8, 12)]),
    "block": (lambda x: x[1:3, 2:4] * 2, [(R, 32, 8, 24, 2)]),
    "reversed": (lambda x: x[::-1] + 1, [(R, *ALL)]),
    "broadcast": (lambda x: np.broadcast_to(x[0], (9, 6)) + 1, [(R, 0, 24)]),
    "operator": (lambda x: 1 - x, [(R, *ALL)]),
    "two of them": (lambda x: x[0] + x[1], [(R, 0, 24), (R, 24, 24)]),
    "comparison": (lambda x: x > 3, [(R, *ALL)]),
    "contains": (lambda x: 3 in x, [(R, *ALL)]),
    "masked": (lambda x: np.add(x, 1, where=np.eye(4, 6, dtype=bool), out=np.zeros((4, 6))), [(R | SOME, *ALL)]),
    "index array": (lambda x: x[INDEX], [(R | SOME, *ALL)]),
    "mask": (lambda x: x[np.ones((4, 6), bool)], [(R | SOME, *ALL)]),
    "copy": (lambda x: x.copy(), [(R, *ALL)]),
    "cast": (lambda x: x.astype(np.int32), [(R, *ALL)]),
    "no cast": (lambda x: x.astype(np.float32, copy=False), []),
    "list": (lambda x: x[0].tolist(), [(R, 0, 24)]),
    "bytes": (lambda x: x.tobytes(), [(R, *ALL)]),
    "pickle": (lambda x: pickle.dumps(x), [(R, *ALL)]),
    "text": (lambda x: str(x), [(R, *ALL)]),
    "scalar": (lambda x: float(x[1, 0, ...]), [(R, 24, 4)]),
    "iteration": (lambda x: [value for value in x[0, :2]], [(R, 0, 4), (R, 4, 4)]),
    "argmax": (lambda x: x.argmax(), [(R, *ALL)]),
    "mean": (lambda x: np.mean(x[0]), [(R, 0, 24)]),
    "concatenate": (lambda x: np.concatenate([x[0], np.ones(2), x[2]]), [(R, 0, 24), (R, 48, 24)]),
    "take": (lambda x: np.take(x, [1]), [(R | SOME, *ALL)]),
    "shape": (lambda x: (np.shape(x), np.ndim(x), np.zeros_like(x), len(x), x.nbytes), []),
    "split": (lambda x: np.split(x, 2), []),
    "to the device as it is": (lambda x: ct.asarray(x), []),
    "to the device with a cast": (lambda x: ct.empty(6, np.float64).copy_(x[0]), [(R, 0, 24)]),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_reads(name: str, x: ct.HostArray, watch: Watch) -> None:
    read, expected = READS[name]
    read(x)
    assert expected == watch.found


def double(x: Any) -> None:
    x *= 2


WRITES: dict[str, tuple[Callable[[Any], Any], list[tuple[int, ...]]]] = {
    "element": (lambda x: x.__setitem__((1, 2), 5), [(W, 32, 4)]),
    "rows": (lambda x: x.__setitem__(slice(1, 3), 5), [(W, 24, 48)]),
    "column": (lambda x: x.__setitem__((slice(None), 1), 5), [(W, 4, 4, 24, 4)]),
    "index array": (lambda x: x.__setitem__(INDEX, 5), [(W | SOME, *ALL)]),
    "from another row": (lambda x: x.__setitem__(0, x[1]), [(R, 24, 24), (W, 0, 24)]),
    "in place": (lambda x: double(x[0]), [(R | W, 0, 24)]),
    "out": (lambda x: np.add(np.ones(6), 1, out=x[3]), [(W, 72, 24)]),
    "out of a function": (lambda x: np.cumsum(np.ones(6), out=x[3]), [(W, 72, 24)]),
    "out of a reduction": (lambda x: np.ones((4, 6)).sum(0, out=x[3]), [(W, 72, 24)]),
    "at": (lambda x: np.add.at(x[3], INDEX, 1), [(R | W | SOME, 72, 24)]),
    "fill": (lambda x: x[0].fill(0), [(W, 0, 24)]),
    "sort": (lambda x: x[0].sort(), [(R | W, 0, 24)]),
    "flat": (lambda x: setattr(x[0], "flat", 3), [(W, 0, 24)]),
    "copyto": (lambda x: np.copyto(x[0], x[1]), [(W, 0, 24), (R, 24, 24)]),
    "masked copyto": (lambda x: np.copyto(x[0], 0, where=np.ones(6, bool)), [(W | SOME, 0, 24)]),
    "put": (lambda x: np.put(x, [1], 0), [(W | SOME, *ALL)]),
    "from the device": (lambda x: ct.ones(6).get(out=x[0]), []),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str, x: ct.HostArray, watch: Watch) -> None:
    write, expected = WRITES[name]
    write(x)
    assert expected == watch.found


@pytest.mark.parametrize("name", [name for name in READS if name != "pickle" and not name.startswith("to the device")])
def test_results_are_those_of_a_plain_array(name: str, x: ct.HostArray) -> None:
    read, _ = READS[name]
    np.testing.assert_equal(read(x), read(x.view(np.ndarray)))


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_those_of_a_plain_array(name: str, x: ct.HostArray) -> None:
    write, _ = WRITES[name]
    plain = np.array(x)
    write(plain)
    write(x)
    np.testing.assert_array_equal(x, plain)


def test_views_are_watched_and_copies_are_not(x: ct.HostArray) -> None:
    views = [x[1:], x.T, x.reshape(-1), np.swapaxes(x, 0, 1), *np.split(x, 2), x[None], x.ravel()]
    copies = [x + 1, x.copy(), x[INDEX], np.sort(x), x.T.ravel(), x.flatten(), np.where(x > 1, x, 0)]
    assert {ct.HostArray} == {type(array) for array in views}
    assert {np.ndarray} == {type(array) for array in copies}


def test_result_with_out_is_the_array_given(x: ct.HostArray) -> None:
    assert x is np.add(x, 1, out=x)
    assert x is np.clip(x, 0, 1, out=x)


def test_fields_of_records(watch: Watch) -> None:
    records = ct.host_view(np.zeros(3, [("a", "<i4"), ("b", "<f8")]))
    watch.base = records.ctypes.data
    records["b"] = 1
    records["a"].sum()
    assert [(W, 4, 8, 12, 3), (R, 0, 4, 12, 3)] == watch.found


def test_pinned_arrays_are_host_arrays_while_accesses_are_recorded(watch: Watch) -> None:
    pinned = ct.pin_memory(np.ones(4, np.float32))
    assert ct.HostArray is type(pinned)
    assert [(W, pinned.ctypes.data - watch.base, 16)] == watch.found


def test_pinned_arrays_are_plain_otherwise() -> None:
    assert np.ndarray is type(ct.empty_pinned(4))


def test_nothing_is_recorded_unless_it_is_wanted(x: ct.HostArray, events: list[Event]) -> None:
    x += x[0]
    assert [] == events


def test_buffers_of_cuda_core_can_be_viewed() -> None:
    from cuda.core import PinnedMemoryResource

    device = ct.current_stream().core.device
    device.set_current()
    buffer = PinnedMemoryResource().allocate(64, stream=device.default_stream)
    view = ct.host_view(buffer)
    assert (64, int(buffer.handle)) == (view.nbytes, view.ctypes.data)
    del view
    buffer.close()


def test_device_memory_is_refused() -> None:
    with pytest.raises(ct.CudatoolError, match="DeviceArray is no array in memory of the host"):
        ct.host_view(ct.zeros(4))
