"""What a PyTorch operator touches: byte sets against counting every element, and plans from schemas."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.collect.torch_accesses import Argument, ByteSet, TensorView, byte_sets, make_plan
from cudatool.collect.torch_calls import make_call, merged
from cudatool.trace.events import AccessFlag, CopyFlag

READ, WRITE, INEXACT = AccessFlag.READ, AccessFlag.WRITE, AccessFlag.INEXACT
SELF, OTHER, RESULT = Argument("self"), Argument("other"), Argument("")
CHANGED = Argument("self", is_written=True)


def tensor(sizes=(), strides=None, *, address=4096, item=4, **facts):
    if strides is None:
        strides = tuple(itertools.accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=1))[::-1] if sizes else ()
    given_facts = {
        "position": 0,
        "is_result": False,
        "on_device": True,
        "is_pinned": False,
        "is_bound": False,
        "device": 0,
        "storage": 4096,
        "storage_bytes": 1 << 20,
        "stream": 0,
    }
    return TensorView(address=address, item=item, sizes=sizes, strides=strides, **given_facts | facts)


def bytes_of(sets):
    return {
        byte
        for found in sets
        for row in range(found.rows)
        for byte in range(found.address + row * found.stride, found.address + row * found.stride + found.size)
    }


def bytes_by_counting(view):
    return {
        view.address + view.item * sum(i * s for i, s in zip(index, view.strides, strict=True)) + byte
        for index in itertools.product(*map(range, view.sizes))
        for byte in range(view.item)
    }


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-7, 40)), max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_byte_sets_are_the_bytes_of_the_elements(dimensions, item):
    view = tensor(tuple(s for s, _ in dimensions), tuple(s for _, s in dimensions), address=1 << 20, item=item)
    sets, exact = byte_sets(view)
    expected = bytes_by_counting(view)
    if exact:
        assert bytes_of(sets) == expected
    else:
        assert bytes_of(sets) > expected


@pytest.mark.parametrize(
    ("sizes", "strides", "expected"),
    [
        ((), (), [ByteSet(4096, 4)]),
        ((3, 4), (4, 1), [ByteSet(4096, 48)]),
        ((4, 3), (1, 4), [ByteSet(4096, 48)]),  # transposed
        ((5, 1, 7), (7, 99, 1), [ByteSet(4096, 140)]),
        ((8, 3), (10, 1), [ByteSet(4096, 12, 40, 8)]),  # columns of a matrix
        ((6,), (2,), [ByteSet(4096, 4, 8, 6)]),
        ((1000, 3), (0, 1), [ByteSet(4096, 12)]),  # expanded
        ((10, 10), (1, 1), [ByteSet(4096, 76)]),  # overlapping windows
        ((2, 3, 4), (100, 10, 1), [ByteSet(4096, 16, 40, 3), ByteSet(4496, 16, 40, 3)]),
        ((0, 4), (4, 1), []),
    ],
)
def test_views_have_the_shortest_sets(sizes, strides, expected):
    assert byte_sets(tensor(sizes, strides)) == (expected, True)


def test_too_many_rows_of_rows_have_their_hull():
    assert byte_sets(tensor((100, 3, 4), (1000, 10, 1))) == ([ByteSet(4096, 4 * (99_000 + 20 + 4))], False)


@pytest.mark.parametrize(
    ("name", "arguments", "results", "inputs", "outputs"),
    [
        ("aten::add.Tensor", [SELF, OTHER], [RESULT], (READ, READ), (WRITE,)),
        ("aten::add_.Tensor", [CHANGED, OTHER], [CHANGED], (READ | WRITE, READ), (0,)),
        ("aten::copy_", [CHANGED, OTHER], [CHANGED], (WRITE, READ), (0,)),
        ("aten::mm.out", [SELF, Argument("out", True, is_keyword=True)], [CHANGED], (READ, WRITE), (0,)),
        ("aten::zeros_like", [SELF], [RESULT], (0,), (WRITE,)),
        ("aten::new_zeros", [SELF], [RESULT], (0,), (WRITE,)),
        ("aten::index_select", [SELF, Argument("index")], [RESULT], (READ | INEXACT, READ), (WRITE,)),
        ("aten::index_put_", [CHANGED, Argument("values")], [CHANGED], (READ | WRITE | INEXACT, READ), (0,)),
        ("mine::fused", [SELF, CHANGED], [RESULT], (READ | INEXACT, READ | WRITE | INEXACT), (WRITE | INEXACT,)),
        (
            "aten::native_batch_norm",
            [Argument("input"), Argument("running_mean")],
            [RESULT],
            (READ, READ | WRITE | INEXACT),
            (WRITE,),
        ),
    ],
)
def test_schema_says_what_is_read_and_written(name, arguments, results, inputs, outputs):
    plan = make_plan(name, arguments, results)
    assert (plan.runs, plan.is_known, plan.inputs, plan.results) == (True, True, inputs, outputs)


@pytest.mark.parametrize("name", ["aten::empty_strided", "aten::detach_", "aten::_unsafe_view", "aten::record_stream"])
def test_allocation_and_changes_of_shape_touch_nothing(name):
    assert not make_plan(name, [SELF], [RESULT]).runs


def test_what_a_collective_with_other_arguments_touches_is_not_known():
    call = make_call("c10d::allreduce_", "", make_plan("c10d::allreduce_", [CHANGED], []), [tensor((4,))], 0)
    assert (call.runs, call.is_known, call.accesses) == (True, False, [])


def test_call_has_the_accesses_of_all_tensors_with_their_arguments():
    plan = make_plan("aten::add.Tensor", [SELF, OTHER], [RESULT])
    tensors = [
        tensor((4,), stream=7),
        tensor((2, 2), (3, 1), address=8192, position=1, storage=8192),
        tensor((4,), address=12288, storage=12288, is_result=True),
    ]
    call = make_call("aten::add.Tensor", "autograd::MulBackward0", plan, tensors, 0)
    assert call.name == "aten::add.Tensor (MulBackward0)"
    assert call.stream == 7
    assert call.accesses == [
        (4096, 16, READ, 0, 0, "self"),
        (8192, 8, READ, 12, 2, "other"),
        (12288, 16, WRITE, 0, 0, ""),
    ]


def test_result_that_is_an_argument_is_not_written():
    plan = make_plan("aten::clone_if_needed", [SELF], [RESULT])
    call = make_call("aten::clone_if_needed", "", plan, [tensor((4,)), tensor((4,), is_result=True)], 0)
    assert call.accesses == [(4096, 16, READ, 0, 0, "self")]


def host(*, pinned, **facts):
    return tensor((4,), address=1 << 30, storage=1 << 30, on_device=False, is_pinned=pinned, **facts)


@pytest.mark.parametrize(
    ("to", "source", "flags"),
    [
        (tensor((4,)), host(pinned=True, position=1), CopyFlag.DESTINATION_DEVICE),
        (tensor((4,)), host(pinned=False, position=1), CopyFlag.DESTINATION_DEVICE | CopyFlag.SOURCE_PAGEABLE),
        (host(pinned=True), tensor((4,), position=1), CopyFlag.SOURCE_DEVICE),
        (host(pinned=False), tensor((4,), position=1), CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_PAGEABLE),
    ],
)
def test_copy_between_memories_says_which(to, source, flags):
    call = make_call(
        "aten::copy_", "", make_plan("aten::copy_", [CHANGED, Argument("src")], [CHANGED]), [to, source], 0
    )
    assert call.copy == (CopyFlag.ASYNC | flags, to.address, source.address, 16)
    assert [(access[0], access[2]) for access in call.accesses] == [(to.address, WRITE), (source.address, READ)]


def test_copy_inside_of_a_device_is_an_operation_as_any_other():
    plan = make_plan("aten::copy_", [CHANGED, Argument("src")], [CHANGED])
    call = make_call("aten::copy_", "", plan, [tensor((4,)), tensor((4,), address=8192, position=1)], 0)
    assert (call.copy, len(call.accesses)) == (None, 2)


def test_host_operator_touches_pinned_memory_itself():
    plan = make_plan("aten::add_.Tensor", [CHANGED], [CHANGED])
    call = make_call("aten::add_.Tensor", "", plan, [host(pinned=True)], 0)
    assert (call.runs, call.on_host) == (False, [(ByteSet(1 << 30, 16), READ | WRITE)])


def test_new_pinned_memory_is_made():
    plan = make_plan("aten::empty.memory_format", [], [RESULT])
    call = make_call("aten::empty.memory_format", "", plan, [host(pinned=True, is_result=True, storage_bytes=64)], 0)
    assert (call.runs, call.made) == (False, [(1 << 30, 64)])


ACCESSES = st.tuples(
    st.integers(0, 60), st.integers(1, 12), st.sampled_from([1, 2, 3]), st.just(0), st.just(0), st.just("x")
)


@settings(deadline=None)
@given(st.lists(ACCESSES, max_size=12))
def test_merged_accesses_are_the_same_bytes_in_fewer_runs(accesses):
    found = merged(accesses)
    for flags in (1, 2, 3):
        before = {b for a, n, f, *_ in accesses if f == flags for b in range(a, a + n)}
        runs = [(a, a + n) for a, n, f, *_ in found if f == flags]
        assert {b for low, high in runs for b in range(low, high)} == before
        assert all(first[1] < second[0] for first, second in itertools.pairwise(sorted(runs)))


def test_strided_accesses_are_merged_only_if_equal():
    strided = (0, 4, 1, 16, 3, "self")
    assert merged([strided, (*strided[:5], "other"), (4, 4, 1, 16, 3, "")]) in (
        [(*strided[:5], ""), (4, 4, 1, 16, 3, "")],
        [(4, 4, 1, 16, 3, ""), (*strided[:5], "")],
    )
