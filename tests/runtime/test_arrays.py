"""Arrays: what they are, views, copies, fills, pinned memory; NumPy says what is right."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest

import cudatool
from cudatool.errors import OutOfMemoryError, UsageError


def host(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


DTYPES = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", "S3", [("a", "i4"), ("b", "f8")]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_keeps_every_dtype(dtype: Any) -> None:
    expected = np.zeros((3, 5), dtype)
    expected.view(np.uint8)[...] = np.arange(expected.nbytes).reshape(3, -1) % 2
    np.testing.assert_array_equal(cudatool.asarray(expected).get(), expected)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (4, 0, 2), 7, (2, 3, 4)])
def test_attributes_are_those_of_numpy(shape: Any) -> None:
    expected = np.empty(shape, np.float64)
    array = cudatool.empty(shape, np.float64)
    for name in ("shape", "dtype", "size", "nbytes", "ndim"):
        assert getattr(array, name) == getattr(expected, name), name
    assert array.strides == expected.strides or not array.size
    assert (array.data_ptr() != 0) == (array.size > 0)
    assert array.device == 0


def test_default_dtype_is_float32() -> None:
    assert {f(2).dtype for f in (cudatool.empty, cudatool.zeros, cudatool.ones)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("shape", [-1, (2, -3)])
def test_negative_extent_is_refused(shape: Any) -> None:
    with pytest.raises((UsageError, ValueError)):
        cudatool.empty(shape)


def test_python_objects_cannot_be_in_device_memory() -> None:
    with pytest.raises(UsageError, match="Python objects"):
        cudatool.empty(3, object)


VIEWS = [
    np.s_[1],
    np.s_[-1, 2],
    np.s_[1, 2, 3],
    np.s_[::2],
    np.s_[:, 1:3],
    np.s_[::-1, :, ::-2],
    np.s_[..., 0],
    np.s_[None, 1, ..., None],
    np.s_[np.int64(1)],
    np.s_[3:3],
]


@pytest.mark.parametrize("index", VIEWS, ids=repr)
def test_view_is_numpys(index: Any) -> None:
    expected = host(4, 5, 6)
    view = cudatool.asarray(expected)[index]
    assert (view.shape, view.strides) == (expected[index].shape, expected[index].strides if view.size else view.strides)
    np.testing.assert_array_equal(view.get(), expected[index])


@pytest.mark.parametrize("index", [[0, 1], np.array([True]), True, np.True_, 1.0, "a"], ids=repr)
def test_index_that_would_copy_is_refused(index: Any) -> None:
    with pytest.raises(UsageError, match="cannot index"):
        cudatool.zeros(2)[index]


def test_index_out_of_range_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        cudatool.zeros(2)[2]
    with pytest.raises(IndexError):
        cudatool.zeros(2)[0, 0]


def test_iteration_gives_views() -> None:
    array = cudatool.asarray(host(3, 2))
    assert [part.get().tolist() for part in array] == [[0, 1], [2, 3], [4, 5]]
    assert len(array) == 3


def test_writing_to_a_view_writes_to_the_array() -> None:
    array, expected = cudatool.zeros((4, 6)), np.zeros((4, 6), np.float32)
    for target in (array, expected):
        target[1] = 7
        target[:, 2] = np.arange(4)
        target[2:, ::3] = [[1.5, 2.5]]
        target[0, 0] = 9
    np.testing.assert_array_equal(array.get(), expected)


def test_reshape_is_a_view_where_it_can_be() -> None:
    array = cudatool.asarray(host(4, 6))
    assert array.reshape(3, 8).data_ptr() == array.data_ptr()
    assert array.ravel().data_ptr() == array.data_ptr()
    copied = array.T.reshape((8, 3))
    assert copied.data_ptr() != array.data_ptr()
    np.testing.assert_array_equal(copied.get(), host(4, 6).T.reshape(8, 3))


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.T])
def test_reshape_to_another_size_is_refused(view: Any) -> None:
    with pytest.raises(ValueError, match="cannot reshape"):
        view(cudatool.zeros((4, 6))).reshape(5, 5)


def test_transpose_and_contiguous() -> None:
    expected, array = host(2, 3, 4), cudatool.asarray(host(2, 3, 4))
    np.testing.assert_array_equal(array.transpose(1, 2, 0).get(), expected.transpose(1, 2, 0))
    assert array.contiguous() is array
    assert not array.T.is_contiguous()
    assert array.T.contiguous().is_contiguous()


LAYOUTS = [
    ("contiguous", lambda a: a),
    ("transposed", lambda a: a.transpose(2, 1, 0)),
    ("stepped", lambda a: a[::2, ::-1, 1::2]),
    ("column", lambda a: a[:, :, 1]),
    ("element", lambda a: a[1, 2, 3, ...]),
]


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "f4", "f8", "c16", "S3", "V6"])
@pytest.mark.parametrize(("name", "view"), LAYOUTS)
def test_copy_between_layouts(name: str, view: Any, dtype: str) -> None:
    source = (host(4, 6, 8, dtype=np.uint8) % 2).astype("u1").repeat(np.dtype(dtype).itemsize, -1)
    source = np.ascontiguousarray(source).view(dtype)
    expected = np.zeros_like(source)
    target = cudatool.asarray(expected)
    view(target).copy_(view(cudatool.asarray(source)))
    view(expected)[...] = view(source)
    assert target.get().tobytes() == expected.tobytes()


@pytest.mark.some_of("to", ["?", "i1", "u4", "i8", "f4", "f8"], 2)
@pytest.mark.parametrize("from_", ["?", "u1", "i2", "i8", "f4", "f8"])
def test_copy_casts_on_the_device_as_numpy_does(from_: str, to: str) -> None:
    source = np.array([[0, 1, 2], [100, 3, 1]]).astype(from_)
    target = cudatool.empty((2, 3), to).copy_(cudatool.asarray(source))
    np.testing.assert_array_equal(target.get(), source.astype(to))


def test_copy_from_the_host_casts_and_broadcasts() -> None:
    target = cudatool.zeros((3, 4), np.int32).copy_(np.array([[1.7], [2.2], [-3.9]]))
    np.testing.assert_array_equal(target.get(), np.repeat([[1], [2], [-3]], 4, axis=1))


def test_copy_that_the_device_cannot_cast_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot cast .*'x'.* to float32"):
        cudatool.zeros(3).copy_(cudatool.zeros(3, [("x", "f4"), ("y", "i4")]))


@pytest.mark.parametrize("source", [np.zeros(3), [1, 2, 3], "device"])
def test_copy_of_another_shape_is_refused(source: Any) -> None:
    source = cudatool.zeros(3) if isinstance(source, str) else source
    with pytest.raises(ValueError, match="broadcast"):
        cudatool.zeros(4).copy_(source)


@pytest.mark.parametrize("forward", [True, False])
def test_copy_within_an_array_may_overlap(forward: bool) -> None:
    expected, array = host(100), cudatool.asarray(host(100))
    if forward:
        array[1:] = array[:-1]
        expected[1:] = expected[:-1].copy()
    else:
        array[:-3] = array[3:]
        expected[:-3] = expected[3:].copy()
    np.testing.assert_array_equal(array.get(), expected)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("u1", 7),
        ("i2", -2),
        ("i4", 70000),
        ("f4", 1.5),
        ("f8", 0),
        ("f8", 1.5),
        ("c16", 2 + 1j),
        ("i8", -1),
        ("S3", b"ab"),
    ],
)
def test_fill_sets_every_element(dtype: str, value: Any) -> None:
    np.testing.assert_array_equal(cudatool.full((3, 5), value, dtype).get(), np.full((3, 5), value, dtype))


def test_fill_of_a_view_leaves_the_rest() -> None:
    array, expected = cudatool.zeros((6, 6), np.uint8), np.zeros((6, 6), np.uint8)
    array[1::2, ::3].fill_(5)
    expected[1::2, ::3] = 5
    np.testing.assert_array_equal(array.get(), expected)


def test_fill_with_an_array_is_refused() -> None:
    with pytest.raises(UsageError, match="one value"):
        cudatool.zeros(3).fill_([1, 2, 3])


def test_get_fills_an_array_that_fits() -> None:
    array = cudatool.asarray(host(3, 4))
    out = np.empty((3, 4), np.float32)
    assert array.get(out) is out
    np.testing.assert_array_equal(out, host(3, 4))


@pytest.mark.parametrize("out", [np.empty(3), np.empty(4, np.float32), np.empty((3, 2), np.float32)[:, 0]])
def test_get_into_what_does_not_fit_is_refused(out: Any) -> None:
    with pytest.raises(UsageError, match="out must have shape"):
        cudatool.zeros(3).get(out)


def test_iteration_yields_views_and_refuses_an_array_without_dimensions() -> None:
    array = cudatool.asarray(host(2, 3))
    first, second = array
    second.fill_(7)
    assert (first.shape, [7, 7, 7]) == ((3,), array[1].get().tolist())
    with pytest.raises(TypeError, match="without dimensions"):
        list(array[0, 0])


def test_get_does_not_write_to_what_is_read_only() -> None:
    given = b"abcd"
    with pytest.raises(UsageError, match="read-only"):
        cudatool.zeros(4, np.uint8).get(np.frombuffer(given, np.uint8))
    assert b"abcd" == given


def test_copies_of_pinned_memory_do_not_block() -> None:
    source, back = cudatool.pin_memory(host(1000)), cudatool.empty_pinned(1000)
    array = cudatool.empty(1000).copy_(source, non_blocking=True)
    array.get(back, blocking=False)
    cudatool.current_stream().synchronize()
    np.testing.assert_array_equal(back, host(1000))


def test_pinned_memory_may_be_dropped_before_its_copy_has_run() -> None:
    array = cudatool.empty(1000).copy_(cudatool.pin_memory(host(1000)), non_blocking=True)
    gc.collect()
    np.testing.assert_array_equal(array.get(), host(1000))


@pytest.mark.parametrize("shape", [(), 0, (2, 3)])
def test_pinned_array_is_an_ordinary_one(shape: Any) -> None:
    pinned = cudatool.empty_pinned(shape, np.int16)
    pinned[...] = 3
    np.testing.assert_array_equal(pinned, np.full(shape, 3, np.int16))


def test_conversion_to_numpy_is_never_silent() -> None:
    with pytest.raises(TypeError, match="call its get"):
        np.asarray(cudatool.zeros(3))


def test_repr_does_not_wait(events: list[Any]) -> None:
    array = cudatool.zeros(3)
    events.clear()
    assert repr(array) == f"<DeviceArray shape=(3,) dtype=float32 device=0 at {array.data_ptr():#x}>"
    assert events == []


def test_asarray_copies_only_what_must_be() -> None:
    array = cudatool.asarray([1, 2, 3])
    assert array.dtype == np.int64
    assert cudatool.asarray(array) is array
    assert cudatool.asarray(array, np.int64, device=0) is array
    assert cudatool.asarray(array, np.float32).get().tolist() == [1, 2, 3]


@pytest.mark.parametrize("shape", [(-2, -3), (0, -2), (-2,), (1 << 62, 1 << 62, 0)])
def test_shape_that_no_array_can_have_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        cudatool.empty(shape)


@pytest.mark.parametrize("shape", [1 << 40, 1 << 62, (1 << 40, 1 << 40)])
def test_array_beyond_all_addresses_is_out_of_memory(shape: int | tuple[int, int]) -> None:
    with pytest.raises(OutOfMemoryError):
        cudatool.empty(shape)


def test_stream_may_use_an_array_without_elements() -> None:
    cudatool.empty(0).record_stream(cudatool.Stream())


def test_shallow_copy_is_a_view_and_deep_copy_has_memory_of_its_own() -> None:
    array = cudatool.asarray(host(2, 3))
    shallow, (deep, again) = copy.copy(array), copy.deepcopy([array.T, array.T])
    array.fill_(7)
    assert (shallow.get() == 7).all()
    np.testing.assert_array_equal(deep.get(), host(2, 3).T)
    assert deep.device == array.device and deep.data_ptr() != again.data_ptr()
    one = array.T
    assert len({id(part) for part in copy.deepcopy([one, one])}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_pickled_array_comes_back_on_its_device_with_memory_of_its_own(dtype: Any) -> None:
    array = cudatool.asarray(np.zeros((3, 5), dtype))[1:, ::2]
    found = pickle.loads(pickle.dumps(array))
    np.testing.assert_array_equal(found.get(), array.get())
    assert (found.dtype, found.device) == (array.dtype, array.device)
    assert found.data_ptr() != array.data_ptr()


@pytest.mark.parametrize(("a", "b"), [(7.5, 2.0), (-7.5, 2.0), (7.5, -2.0)])
def test_divmod_and_plus_are_pythons(a: float, b: float) -> None:
    array, other = cudatool.full(3, a), cudatool.full(3, b)
    for quotient, rest in (divmod(array, other), divmod(array, b), divmod(a, other)):
        assert [divmod(a, b)] * 3 == list(zip(quotient.tolist(), rest.tolist(), strict=True))
    assert +array is array


def test_array_holds_the_numbers_that_its_elements_are() -> None:
    array = cudatool.asarray(host(2, 3))
    assert 5 in array and 5.5 not in array and "5" not in array
    assert [[0, 1, 2], [3, 4, 5]] == array.tolist()
    assert array[1, 2].tolist() == 5


def test_an_array_without_dimensions_is_formatted_as_its_number() -> None:
    array = cudatool.full((2,), 1.25)
    assert f"{array[0]:.3f} {array[0]:>6}" == "1.250   1.25"
    assert f"{array}" == repr(array)
    with pytest.raises(TypeError):
        f"{array:.3f}"
