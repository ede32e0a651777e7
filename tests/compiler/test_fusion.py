"""Elementwise operations of a traced function that become one kernel: which do, which must not, and the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver  # as a program uses it that does not know cudatool
from warm_process import COMMAND_LINE, run_python

import cudatool as ct
from cudatool import analyze, blas, jiterator, ops
from cudatool.amp import autocast
from cudatool.compiler import CompiledFunction, _fusion, compile
from cudatool.errors import UsageError
from cudatool.optim import clip_grad_norm_
from cudatool.runtime.allocator import Memory
from cudatool.runtime.array import DeviceArray
from cudatool.trace import reader
from cudatool.trace.events import Event, Kind

pytestmark = pytest.mark.usefixtures("device")

HALF = """extern "C" __global__ void half(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x] / 2; }"""
DTYPES = [np.float32, np.float16, ct.bfloat16, np.float64, np.int32, np.complex64]


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> DeviceArray:
    return ct.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def traced(function: Callable[..., Any], *args: Any, **options: Any) -> CompiledFunction:
    """Return the function after two calls, with its results compared to the eager ones in every bit."""
    compiled = compile(function, fullgraph=True, options=options)
    for _ in range(3):
        given, wanted = [[arg.clone() for arg in args] for _ in range(2)]
        same(function(*wanted), compiled(*given))
        same(wanted, given)
    assert 1 == compiled.hits, compiled.explain()
    return compiled


def same(wanted: Any, found: Any) -> None:
    if isinstance(wanted, DeviceArray):
        assert (wanted.dtype, wanted.shape) == (found.dtype, found.shape)
        a, b = wanted.get(), found.get()
        # The sign of zero counts; the bits of a NaN say nothing.
        np.testing.assert_array_equal(a, b)
        if a.dtype.kind == "f" and a.dtype.itemsize > 2:
            np.testing.assert_array_equal(np.signbit(a)[a == 0], np.signbit(b)[b == 0])
    else:
        for one, other in zip(wanted, found, strict=True):
            same(one, other)


def kernels(compiled: CompiledFunction) -> list[str]:
    (graph,) = compiled.graphs
    return [node.name.partition("<")[0] for node in graph.nodes]


def test_a_chain_becomes_one_kernel_and_its_intermediates_have_no_memory(events: list[Event]) -> None:
    def chain(x: DeviceArray) -> DeviceArray:
        y = x * 2.0
        z = ops.gelu(y)
        return ops.tanh(z - 1.0) / 3.0

    x = numbers(1000)
    compiled = traced(chain, x)
    assert ["fused_mul_gelu_sub_tanh_div"] == kernels(compiled)
    (plan,) = compiled.plans
    assert (4096, 2 * 4096) == (plan.peak, plan.unshared)  # the argument, and in its place the result
    assert "4 KiB planned, 4 KiB used" in compiled.explain()
    unfused = compile(chain, fullgraph=True, options={"max_fusion_size": 1})
    unfused(x)
    unfused(x)
    assert (5, 4096 * 6) == (len(unfused.graphs[0].nodes), unfused.plans[0].unshared)


def test_the_planned_peak_is_the_measured_one_to_the_byte(events: list[Event]) -> None:
    def mixed(x: DeviceArray) -> DeviceArray:
        y = ops.relu(x * 2.0) + 1.0
        s = ops.softmax(y, -1)
        return (s * y).to(np.float16) - 1.0

    compiled, x = compile(mixed, fullgraph=True), numbers(32, 100)
    compiled(x)
    events.clear()
    compiled(x)
    (plan,) = compiled.plans
    given = [event.size for event in events if event.kind is Kind.BLOCK_ALLOC and not event.aux1]
    assert 1 == given.count(plan.peak)
    used = max(offset + buffer.size for offset, buffer in zip(plan.offsets, plan.buffers, strict=True))
    assert plan.peak == used
    assert f"{ct.units.format_bytes(used)} planned, {ct.units.format_bytes(used)} used" in compiled.explain()


def test_the_graph_shows_the_parts_with_their_lines() -> None:
    def lines(x: DeviceArray) -> DeviceArray:
        y = x * 2.0
        return y + 1.0

    compiled = traced(lines, numbers(5))
    (graph,), first = compiled.graphs, lines.__code__.co_firstlineno
    (node,) = graph.nodes
    assert ("kernel", f"test_fusion.py:{first + 2}") == (node.kind, node.line)
    assert [
        ("cudatool.ops.mul", f"test_fusion.py:{first + 1}"),
        ("cudatool.ops.add", f"test_fusion.py:{first + 2}"),
    ] == [(part.op, part.line) for part in node.parts]
    (line,) = [line for line in compiled.explain().splitlines() if "cudatool.ops.mul [mul<" in line]
    assert line.endswith(f" test_fusion.py:{first + 1}")


def test_a_recording_has_the_operations_of_a_kernel_with_their_lines(tmp_path: Path) -> None:
    def lines(x: DeviceArray) -> DeviceArray:
        y = blas.mm(x * 2.0, x)
        z = y * 3.0
        return z + 1.0

    with ct.record(tmp_path / "fused.ctrace"):
        compiled = traced(lines, numbers(5, 5))
    (plan,) = analyze.plans(reader.read(tmp_path / "fused.ctrace"))
    (kernel,), (node,) = plan.fused, [node for node in compiled.graphs[0].nodes if node.parts]
    assert ("fused_mul_add", 2, 3) == (kernel.name, kernel.node, plan.nodes)
    assert ["cudatool.ops.mul", "cudatool.ops.add"] == [operation.name for operation in kernel.operations]
    assert all(part.line in each.label for part, each in zip(node.parts, kernel.operations, strict=True))
    assert {0, 1, 2} == {buffer.first for buffer in plan.buffers}


def test_an_intermediate_is_rounded_as_in_memory() -> None:
    def contracts(x: DeviceArray, y: DeviceArray, negative: DeviceArray) -> DeviceArray:
        return x * y + negative

    a, b = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
    # With one rounding of x * y + negative in place of two, most elements would not be 0.
    assert np.count_nonzero(np.float64(a) * np.float64(b) - np.float64(a * b)) > 400
    given = ct.asarray(a), ct.asarray(b), ct.asarray(-(a * b))
    compiled = traced(contracts, *given)
    assert ["fused_mul_add"] == kernels(compiled)
    assert not compiled(*given).get().any()


def test_a_cast_rounds_inside_of_a_kernel() -> None:
    def casts(x: DeviceArray) -> DeviceArray:
        return (x.to(np.float16) * 3.0).to(ct.bfloat16).to(np.float64) + x

    compiled = traced(casts, numbers(7, 9))
    assert ["fused_copy_mul_copy_copy_add"] == kernels(compiled)


def test_a_product_that_two_parts_compute_is_contracted_in_each_as_it_was() -> None:
    def twice(x: DeviceArray, y: DeviceArray, z: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        return ops.addcmul(z, x, y), x * y

    compiled = traced(twice, *(numbers(300, seed=k) for k in range(3)))
    assert ["fused_addcmul_mul"] == kernels(compiled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_operands_of_any_strides_and_dtypes(dtype: Any) -> None:
    def mixed(x: DeviceArray, row: DeviceArray, column: DeviceArray, scalar: DeviceArray) -> Any:
        y = x * row + column
        return ops.where(ops.ne(y, 0), y * scalar, 1) - x.T

    given = numbers(8, 8, dtype=dtype), numbers(8), numbers(8, 1, dtype=np.float16), numbers(dtype=dtype)
    compiled = traced(mixed, *given)
    assert 1 == len(kernels(compiled)), compiled.explain()


def test_a_transposed_array_is_gone_through_as_it_lies_in_memory() -> None:
    def backward(gradient: DeviceArray, x: DeviceArray, weight: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        with autocast(dtype=ct.bfloat16):
            scaled = gradient * 2.0
            return blas.mm(scaled.T, x), blas.mm(scaled, weight)  # both cast it, one of them turned

    compiled = traced(backward, numbers(8, 16), numbers(8, 8, seed=1), numbers(16, 8, seed=2))
    assert ["fused_mul_copy", "copy", "copy"] == [name for name in kernels(compiled) if "gemm" not in name]


def test_several_results_are_written_by_one_kernel() -> None:
    def several(x: DeviceArray) -> tuple[DeviceArray, ...]:
        y = x + 1.0
        z = y * 2.0
        return y, ops.exp(z), ops.gt(z, 0)

    compiled = traced(several, numbers(77))
    assert ["fused_add_mul_exp_gt"] == kernels(compiled)
    assert 1 + 3 == len(compiled.plans[0].buffers)


def test_arrays_without_elements() -> None:
    compiled = traced(lambda x, y: (x * 2.0 + 1.0, y * 2.0 - 1.0), numbers(0, 4), numbers(4))
    assert ["fused_mul_sub"] == kernels(compiled)


def test_another_shape_is_another_kernel() -> None:
    def grows(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        return x * 2.0 + 1.0 + y

    assert ["fused_mul_add", "add"] == kernels(traced(grows, numbers(5), numbers(3, 5)))


def test_writes_in_place() -> None:
    def updates(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        before = x * 1.0
        x.add_(y)
        x.mul_(2.0)
        return before + x

    compiled = traced(updates, numbers(40), numbers(40, seed=1))
    assert ["fused_mul_add_mul_add"] == kernels(compiled)


def test_an_argument_that_is_changed_first_is_not_where_another_ends() -> None:
    def step(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        x.add_(y)
        return ops.softmax(x, -1)

    traced(step, numbers(4, 16), numbers(4, 16, seed=1))


def test_elements_that_another_thread_has_written_are_read_by_another_kernel() -> None:
    def turned(x: DeviceArray) -> DeviceArray:
        x.mul_(2.0)
        return x.T + 1.0

    assert ["mul", "add"] == kernels(traced(turned, numbers(6, 6)))


def test_elements_that_another_thread_reads_are_written_by_another_kernel() -> None:
    def turned(x: DeviceArray) -> DeviceArray:
        y = x.T + 1.0
        x.mul_(2.0)
        return y * 3.0

    assert ["add", "mul", "mul"] == kernels(traced(turned, numbers(6, 6)))


def test_shifted_elements_of_one_array() -> None:
    def shifted(x: DeviceArray) -> DeviceArray:
        x[1:].add_(x[:-1])
        x[:-1].mul_(3.0)
        return x * 2.0

    traced(shifted, numbers(33))


def test_bytes_that_are_read_as_another_type() -> None:
    def other(x: DeviceArray) -> DeviceArray:
        y = x * 2.0
        return y.T.contiguous() + y

    traced(other, numbers(6, 6))


def test_no_read_is_moved_past_a_write_of_something_else() -> None:
    def overwritten(x: DeviceArray) -> DeviceArray:
        y = x * 2.0
        x.fill_(0)
        return y + 1.0

    compiled = traced(overwritten, numbers(9))
    assert 3 == len(kernels(compiled))


def test_no_write_is_moved_past_a_read_of_something_else() -> None:
    def read(x: DeviceArray) -> DeviceArray:
        y = x * 2.0
        s = ops.softmax(y, -1)
        return y + 1.0 + ops.sum(s)

    assert ["mul", "softmax", "sum", "fused_add_add"] == kernels(traced(read, numbers(4, 9)))


def test_operations_are_moved_past_work_that_has_nothing_to_do_with_them() -> None:
    def independent(x: DeviceArray, w: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        y = x * 2.0
        product = blas.mm(w, w)
        return y + 1.0, product

    compiled = traced(independent, numbers(9), numbers(4, 4))
    assert ["product", "kernel"] == [node.kind for node in compiled.graphs[0].nodes]


def test_memory_that_work_unknown_to_cudatool_uses_is_left_as_it_is() -> None:
    kernel = ct.compile(HALF, "half")

    def foreign(x: DeviceArray) -> tuple[DeviceArray, ...]:
        out = ct.zeros(32)
        y = x * 2.0
        values = np.array([y.data_ptr(), out.data_ptr()], np.uint64)
        pointers = np.array([values.ctypes.data, values.ctypes.data + 8], np.uint64)
        stream = ct.current_stream().cuda_stream
        (status,) = driver.cuLaunchKernel(kernel.handle, 1, 1, 1, 32, 1, 1, 0, stream, pointers.ctypes.data, 0)
        assert not status
        z = y + 1.0
        return y, z, z + out

    compiled = traced(foreign, numbers(32))
    assert ["mul", "fused_add_add"] == kernels(compiled)[1:]


def test_memory_that_unknown_work_uses_is_not_left_out_of_the_plan() -> None:
    kernel = ct.compile(HALF, "half")

    def foreign(x: DeviceArray) -> DeviceArray:
        out = ct.zeros(32)
        y = x * 2.0
        z = y + 1.0
        values = np.array([y.data_ptr(), out.data_ptr()], np.uint64)
        pointers = np.array([values.ctypes.data, values.ctypes.data + 8], np.uint64)
        stream = ct.current_stream().cuda_stream
        (status,) = driver.cuLaunchKernel(kernel.handle, 1, 1, 1, 32, 1, 1, 0, stream, pointers.ctypes.data, 0)
        assert not status
        return ops.softmax(z, -1) + out

    assert "fused_mul_add" in kernels(traced(foreign, numbers(32)))


def test_lists_of_arrays_whose_accesses_are_declared_keep_nothing_else_in_memory() -> None:
    def clips(x: DeviceArray, gradient: DeviceArray) -> DeviceArray:
        y = x * 2.0
        z = y + 1.0
        clip_grad_norm_([gradient], 1.0)
        return z

    compiled = traced(clips, numbers(300), numbers(50))
    assert "fused_mul_add" in kernels(compiled)
    assert 1 == [buffer.line for buffer in compiled.plans[0].buffers].count(
        f"test_fusion.py:{clips.__code__.co_firstlineno + 2}"
    )
    assert not [b for b in compiled.plans[0].buffers if b.line.endswith(f":{clips.__code__.co_firstlineno + 1}")]


def test_what_a_product_works_in_has_one_place_in_the_plan() -> None:
    size = 1 << 20

    def products(x: DeviceArray) -> DeviceArray:
        for _ in range(3):  # as a product of cuBLAS does while it is captured
            held = Memory(size, ct.current_stream())
            x = ops.softmax(x, -1)
            del held
        return x

    (plan,) = traced(products, numbers(4, 8)).plans
    places = [offset for offset, buffer in zip(plan.offsets, plan.buffers, strict=True) if buffer.size == size]
    assert (3, 1) == (len(places), len(set(places)))
    assert plan.peak < size + 4096


def test_nothing_is_moved_past_an_event() -> None:
    side = ct.Stream()

    def forked(x: DeviceArray) -> DeviceArray:
        main = ct.current_stream()
        y = x * 2.0
        side.wait_stream(main)
        with ct.stream(side):
            z = y * 3.0 - 1.0
        w = y + 1.0
        main.wait_stream(side)
        z.record_stream(main)
        return w + z

    compiled = traced(forked, numbers(9))
    (graph,) = compiled.graphs
    assert ["mul", "fused_mul_sub", "add", "add"] == [
        node.name.partition("<")[0] for node in graph.nodes if node.kind == "kernel"
    ]


def test_functions_of_the_program_are_not_fused() -> None:
    doubled = jiterator.create_jit_fn("template <typename T> T doubled(T x) { return x * 2; }")
    compiled = traced(lambda x: doubled(x * 3.0) + 1.0, numbers(5))
    assert ["mul", "jit_doubled", "add"] == kernels(compiled)


def test_a_launch_whose_accesses_the_program_declares_stays_one() -> None:
    def declared(x: DeviceArray) -> DeviceArray:
        with ct.annotate(reads=[x]):
            y = x * 2.0
        return y + 1.0

    assert ["mul", "add"] == kernels(traced(declared, numbers(5)))


def test_elements_know_their_place() -> None:
    compiled = traced(lambda x: ops.tril(x * 2.0) + ops.triu(x.T, 1), numbers(5, 5))
    assert 1 == len(kernels(compiled))


def test_the_peak_does_not_rise() -> None:
    def sums(x: DeviceArray, w: DeviceArray) -> DeviceArray:
        total = blas.mm(x, w) + 0.0
        for _ in range(5):
            total = total + blas.mm(x, w)
        return total

    given = numbers(64, 64), numbers(64, 64, seed=1)
    fused, unfused = traced(sums, *given), traced(sums, *given, max_fusion_size=1)
    assert fused.plans[0].peak <= unfused.plans[0].peak


def test_a_kernel_has_no_more_operations_than_the_option_says() -> None:
    def long(x: DeviceArray) -> DeviceArray:
        for _ in range(10):
            x = x + 1.0
        return x

    assert 1 == len(kernels(traced(long, numbers(5))))
    assert ["fused_add_add_add_add"] * 2 + ["fused_add_add"] == kernels(traced(long, numbers(5), max_fusion_size=4))
    assert ["add"] * 10 == kernels(traced(long, numbers(5), max_fusion_size=1))


def test_a_kernel_of_many_arrays_is_several() -> None:
    def many(*arrays: DeviceArray) -> list[DeviceArray]:
        found, total = [], arrays[0]
        for array in arrays:
            total = total + array
            found.append(total)
        return found

    compiled = traced(many, *(numbers(6, seed=k) for k in range(40)))
    assert 1 < len(kernels(compiled)) < 10


def test_groups_that_share_no_memory_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, takes = [], _fusion._Open.takes

    def counted(self: Any, *args: Any) -> bool:
        compared.append(args)
        return takes(self, *args)

    monkeypatch.setattr(_fusion._Open, "takes", counted)

    def many(*arrays: DeviceArray) -> list[DeviceArray]:
        halves = [array.to(np.float16) for array in arrays]
        return [half * 2.0 for half in halves]

    compiled = traced(many, *(numbers(6, seed=k) for k in range(40)))
    assert ["fused_copy_mul"] * 40 == kernels(compiled)
    assert 40 == len(compared)


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="compile has no option fuse; it has max_fusion_size"):
        compile(numbers, options={"fuse": True})
    with pytest.raises(UsageError, match="max_fusion_size must be at least 1"):
        compile(numbers, options={"max_fusion_size": 0})


UNARY: list[Callable[[Any], Any]] = [
    ops.relu,
    ops.neg,
    ops.abs,
    ops.square,
    lambda x: x.to(np.float16),
    lambda x: x.to(np.float32),
    lambda x: x.to(np.float64),
    lambda x: x.T,
    lambda x: ops.tril(x, 1),
    lambda x: x * 0.5,
    lambda x: ops.clamp(x, -2, 2),
    lambda x: ops.gt(x, 0),
    lambda x: x.clone(),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    ops.add,
    ops.mul,
    ops.maximum,
    lambda x, y: ops.sub(x.to(np.float32), y, alpha=2.0),
    lambda x, y: ops.where(ops.gt(x, y), x, y),
]
OTHER: list[Callable[[Any], Any]] = [
    lambda x: ops.softmax(x.to(np.float32), -1),
    lambda x: ops.layer_norm(x.to(np.float32), (6,)),
    lambda x: ops.softmax_backward(x.to(np.float32), x.to(np.float32), -1),
    lambda x: blas.mm(x.to(np.float32), x.to(np.float32)),
    lambda x: ops.sum(x.to(np.float32), -1),
]


def random_program(seed: int) -> Callable[..., list[DeviceArray]]:
    """Return a function of three 6 x 6 arrays whose operations, aliases and writes in place depend on the seed."""

    def program(*given: DeviceArray) -> list[DeviceArray]:
        rng = np.random.default_rng(seed)
        arrays = [*given, given[0].T, given[1][2], given[2][:, 1:2]]

        def any_array() -> DeviceArray:
            return arrays[int(rng.integers(len(arrays)))]

        for _ in range(14):
            draw = rng.random()
            square = [array for array in arrays if array.shape == (6, 6)]
            x = square[int(rng.integers(len(square)))]
            if x.dtype == np.bool:
                x = x.to(np.float16)
            if draw < 0.4:
                arrays.append(UNARY[int(rng.integers(len(UNARY)))](x))
            elif draw < 0.7:
                arrays.append(BINARY[int(rng.integers(len(BINARY)))](x, any_array()))
            elif draw < 0.85:
                other, part = any_array(), rng.random() < 0.5
                if other.dtype == x.dtype:
                    if part and other.ndim == 2 and other.shape == x.shape:
                        x[1:].add_(other[:-1])
                    else:
                        x.add_(other)
            elif draw < 0.93:
                arrays.append(OTHER[int(rng.integers(len(OTHER)))](x))
            elif len(arrays) > 6:
                del arrays[6 + int(rng.integers(len(arrays) - 6))]
        kept = [array for array in arrays[6:] if rng.random() < 0.5] or [x * 1.0]
        return [array.clone() for array in kept]

    return program


@pytest.mark.some_of("seed", range(16), 5)
def test_random_programs_compute_the_same_bits_as_without(seed: int) -> None:
    given = [numbers(6, 6, dtype=dtype, seed=k) for k, dtype in enumerate([np.float32, np.float16, np.float32])]
    program = random_program(seed)
    compiled = traced(program, *given)
    unfused = traced(program, *given, max_fusion_size=1)
    assert compiled.plans[0].peak <= unfused.plans[0].peak
    assert len(kernels(compiled)) <= len(kernels(unfused))


def _norm(x: DeviceArray) -> tuple[DeviceArray, ...]:
    columns = x.shape[-1]
    return ops.native_layer_norm(x, (columns,), ct.ones(columns), ct.full(columns, 0.25), 1e-5)


def _norm_backward(x: DeviceArray, gradient: DeviceArray) -> DeviceArray:
    _, mean, scale = ops.native_layer_norm(x, (x.shape[-1],), None, None, 1e-5)
    return ops.native_layer_norm_backward(gradient, x, (x.shape[-1],), mean, scale, None, None, (True, False, False))[0]


ROWS: dict[str, Callable[[DeviceArray, DeviceArray], DeviceArray]] = {
    "softmax": lambda x, y: ops.softmax(x, -1),
    "log_softmax": lambda x, y: ops.log_softmax(x, -1),
    "softmax_backward": lambda x, y: ops.softmax_backward(x, y, -1),
    "log_softmax_backward": lambda x, y: ops.log_softmax_backward(x, y, -1),
    "layer_norm": lambda x, y: ops.layer_norm(x, (x.shape[-1],)),
    "layer_norm_backward": lambda x, y: _norm_backward(x, y),
}


@pytest.mark.parametrize("shape", [(5, 64), (3, 7), (1, 1), (2, 3, 40), (2, 1030)])
@pytest.mark.parametrize("rows", ROWS)
def test_what_is_done_with_the_result_of_a_kernel_on_rows_is_done_in_it(rows: str, shape: tuple[int, ...]) -> None:
    def after(x: DeviceArray, y: DeviceArray) -> tuple[DeviceArray, ...]:
        ops.softmax(ct.zeros((64, 1024)), -1)  # where the peak is
        z = ROWS[rows](x, y)
        w = (z * 0.5 + y).to(np.float16)
        return w, w.to(np.float64) - 1.0, ops.gt(w, 0)

    compiled = traced(after, numbers(*shape), numbers(*shape, seed=1))
    assert f"fused_{rows}_mul_add_copy_copy_sub_gt" == kernels(compiled)[-1]


@pytest.mark.parametrize("dtype", [np.float16, ct.bfloat16, np.float64])
def test_a_kernel_on_rows_rounds_before_the_next_operation_as_in_memory(dtype: Any) -> None:
    def after(x: DeviceArray) -> tuple[DeviceArray, ...]:
        ops.softmax(ct.zeros((64, 1024)), -1)  # where the peak is
        y = ops.softmax(x, -1)
        return y, y.to(np.float32) * 3.0, _norm(x.to(np.float32))[0].to(dtype)

    names = kernels(traced(after, numbers(9, 24, dtype=dtype)))
    assert ["fused_layer_norm_copy", "fused_softmax_copy_mul"] == sorted(name for name in names if "_" in name)


def test_what_other_threads_of_a_kernel_on_rows_read_or_write_is_left_to_another_kernel() -> None:
    def over_its_input(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        z = ops.softmax(x, -1)
        x.copy_(z * 2.0)
        return x + y

    def input_again(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        return ops.softmax(x, -1) * x + y

    def broadcast(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        return ops.softmax(x, -1) * y[0] + y

    def turned(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        return ops.softmax(x, -1).T + y.T

    def two(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        return ops.softmax(x, -1) + ops.softmax(y, -1)

    def one_of_another(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        return ops.softmax(ops.softmax(x, -1) * 2.0 + y, -1) + y

    def of_its_rows(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        z, mean, scale = _norm(x)
        return z * mean + scale * y

    for function in (over_its_input, input_again, broadcast, turned, two, one_of_another, of_its_rows):
        traced(function, numbers(6, 16), numbers(6, 16, seed=1))
    assert ["softmax", "fused_mul_add"] == kernels(traced(broadcast, numbers(6, 16), numbers(6, 16, seed=1)))
    names = kernels(traced(one_of_another, numbers(6, 16), numbers(6, 16, seed=1)))
    assert ["fused_softmax_mul_add", "fused_softmax_add"] == names


def test_a_row_that_begins_between_two_packs_is_left_to_another_kernel() -> None:
    def after(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        return ops.softmax(x, -1) * y.reshape(-1)[1:65].reshape(4, 16)

    assert ["softmax", "mul"] == kernels(traced(after, numbers(4, 16), numbers(5, 16)))


def test_what_is_computed_twice_from_the_same_numbers_is_computed_once() -> None:
    def casts(x: DeviceArray, w: DeviceArray) -> DeviceArray:
        y = blas.mm(x.to(np.float16), w)
        return blas.mm(x.to(np.float16).T, y) + blas.mm(x.T.to(np.float16), y)  # the last one turns the array, too

    given = numbers(8, 8), numbers(8, 8, dtype=np.float16)
    names = kernels(traced(casts, *given))
    assert 2 == names.count("copy")
    assert 3 == kernels(traced(casts, *given, max_fusion_size=1)).count("copy")


def test_what_has_changed_or_is_kept_is_computed_again() -> None:
    def source_changes(x: DeviceArray) -> DeviceArray:
        y = ops.softmax(x.to(np.float16), -1)
        x.add_(1.0)
        return y + ops.softmax(x.to(np.float16), -1)

    def result_changes(x: DeviceArray) -> DeviceArray:
        y = x.to(np.float16)
        z = ops.softmax(y, -1)
        y.add_(1.0)
        return z + ops.softmax(y, -1) + ops.softmax(x.to(np.float16), -1)

    def second_changes(x: DeviceArray) -> DeviceArray:
        y = x.to(np.float16)
        z = x.to(np.float16)
        z.add_(1.0)
        return ops.softmax(y, -1) + ops.softmax(z, -1)

    def both_are_returned(x: DeviceArray) -> list[DeviceArray]:
        return [x.to(np.float16), ops.softmax(x, -1), x.to(np.float16)]

    def other_numbers(x: DeviceArray) -> DeviceArray:
        return ops.softmax(x * 2.0, -1) + ops.softmax(x * 3.0, -1)

    for function in (source_changes, result_changes, second_changes, both_are_returned, other_numbers):
        traced(function, numbers(4, 8))
    compiled = compile(both_are_returned, fullgraph=True)
    for _ in range(3):
        first, _, second = compiled(numbers(4, 8))
    first.add_(1.0)
    assert not np.array_equal(first.get(), second.get())


def _layer(x: DeviceArray, w: DeviceArray, bias: DeviceArray, between: Callable[[DeviceArray], Any]) -> DeviceArray:
    """Return the gradient of an activation, with a product between the two uses of what it is taken of."""
    before = blas.mm(x, w) + bias
    gradient = blas.mm(ops.gelu(before), w.T)
    gradient = blas.mm(gradient, w)
    between(before)
    result = ops.gelu_backward(gradient, before)
    return result + ops.sum(ops.softmax(ct.ones((512, 512)), -1))  # which needs most memory: all else may be in it


def test_a_sum_with_a_bias_is_computed_again_by_what_reads_it_later() -> None:
    x, w, bias = numbers(256, 64), numbers(64, 128), numbers(128)  # not arguments, whose copies would be needed longer
    compiled = traced(lambda: _layer(x, w, bias, lambda before: None))
    first, second = [name for name in kernels(compiled) if "gelu" in name]
    assert "fused_add_gelu" == first
    is_joined = second == "fused_add_gelu_backward_add"  # where the sum is ready before, as on a GPU
    assert is_joined or second == "fused_add_gelu_backward"
    large = [buffer for buffer in compiled.plans[0].buffers if buffer.size == 256 * 128 * 4]
    assert 5 - is_joined == len(large), "two products, the activation, its gradient unless it is joined, and the result"


def test_what_is_needed_in_memory_or_would_be_read_from_more_is_not_computed_again() -> None:
    given = numbers(256, 64), numbers(64, 128), numbers(128)

    def by_a_product(x: DeviceArray, w: DeviceArray, bias: DeviceArray) -> list[DeviceArray]:
        products: list[DeviceArray] = []
        return [_layer(x, w, bias, lambda before: products.append(blas.mm(before, w.T))), *products]

    def returned(x: DeviceArray, w: DeviceArray, bias: DeviceArray) -> list[DeviceArray]:
        results: list[DeviceArray] = []
        return [_layer(x, w, bias, results.append), *results]

    def changed_itself(x: DeviceArray, w: DeviceArray, bias: DeviceArray) -> DeviceArray:
        return _layer(x, w, bias, lambda before: before[0].add_(1.0))

    def of_two_arrays(x: DeviceArray, w: DeviceArray, bias: DeviceArray) -> DeviceArray:
        large = blas.mm(x, w)
        return _layer(x, w, large, lambda before: None) + large.sum()

    def bias_changes(x: DeviceArray, w: DeviceArray, bias: DeviceArray) -> DeviceArray:
        return _layer(x, w, bias, lambda before: bias.add_(1.0))

    for function in (by_a_product, returned, changed_itself, of_two_arrays, bias_changes):
        compiled = traced(function, *given)
        assert "fused_add_gelu_backward" not in kernels(compiled), function.__name__


def test_copies_and_fills_are_not_work_unknown_to_cudatool() -> None:
    def copies(x: DeviceArray) -> DeviceArray:
        both = ops.stack([x, x])
        y = both[0] * 2.0
        return y + 1.0

    assert "fused_mul_add" in kernels(traced(copies, numbers(4, 8)))


_RACY = """
import sys
import cudatool as ct
from cudatool.compiler import compile

side = ct.Stream()


@compile(fullgraph=True)
def step(x):
    main = ct.current_stream()
    y = ct.zeros(1024)
    side.wait_stream(main)
    with ct.stream(side):
        y.add_(x)
        y.mul_(2.0)  # writes
    if sys.argv[1] == "wait":
        main.wait_stream(side)
    z = y * 3.0
    w = z + 1.0  # reads
    main.wait_stream(side)
    y.record_stream(main)
    return w


x = ct.ones(1024)
ct.synchronize()
for _ in range(3):
    step(x)
    ct.synchronize()
"""


@pytest.mark.parametrize("how", ["race", "wait"])
def test_a_race_between_fused_kernels_is_found_at_their_lines(how: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_RACY)
    done = run_python(COMMAND_LINE, "sanitize", "--device", "sim", "--json", "program.py", how, folder=tmp_path)
    findings = json.loads(done.stdout)["findings"]
    fused = [each for each in findings if "fused_" in each["first"]["operation"]]
    assert (how == "race", how == "race") == (bool(findings), bool(fused)), done.stderr
    lines = _RACY.splitlines()
    for finding in fused:
        assert ["kernel fused_add_mul<4> of a graph", "kernel fused_mul_add<4> of a graph"] == [
            finding[side]["operation"] for side in ("first", "second")
        ]
        places = [lines[finding[side]["stack"][0]["line"] - 1] for side in ("first", "second")]
        assert ["writes", "reads"] == [place.rpartition("# ")[2] for place in places]


_PIPELINE = """
import sys
import cudatool as ct
from cudatool.compiler import compile

SOURCE = '''
extern "C" __global__ void make_batch(float *batch, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) batch[i] = value;
}
extern "C" __global__ void accumulate(const float *batch, float *total, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) total[i] += batch[i];
}
'''
make_batch, accumulate = ct.compile(SOURCE, "make_batch"), ct.compile(SOURCE, "accumulate")
producer, consumer = ct.Stream(), ct.Stream()


@compile(fullgraph=True)
def pipeline(total):
    main, batch = ct.current_stream(), ct.zeros(1024)
    producer.wait_stream(main)
    consumer.wait_stream(main)
    for number in range(1, 5):
        if sys.argv[1] == "wait":
            producer.wait_stream(consumer)
        with ct.stream(producer):
            make_batch[4, 256](batch, float(number), 1024)  # writes
        if sys.argv[1] == "wait":
            consumer.wait_stream(producer)
        with ct.stream(consumer):
            accumulate[4, 256](batch, total, 1024)  # reads
    main.wait_stream(producer)
    main.wait_stream(consumer)
    return total + 0.0


for _ in range(3):
    pipeline(ct.zeros(1024))
    ct.synchronize()
print(len(pipeline.graphs), "graph")
"""


@pytest.mark.parametrize("how", ["race", "wait"])
def test_a_race_between_kernels_of_the_program_in_a_traced_pipeline_is_found_at_their_lines(
    how: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(_PIPELINE)
    done = run_python(COMMAND_LINE, "sanitize", "--device", "sim", "--json", "program.py", how, folder=tmp_path)
    assert "1 graph" in done.stdout + done.stderr
    findings = json.loads(done.stdout[done.stdout.index("{") :])["findings"]
    of_graph = [each for each in findings if "of a graph" in each["first"]["operation"]]
    assert (how == "race", how == "race") == (bool(findings), bool(of_graph)), done.stderr
    lines, pairs = _PIPELINE.splitlines(), set()
    for finding in of_graph:
        places = [lines[finding[side]["stack"][0]["line"] - 1] for side in ("first", "second")]
        pairs.add(frozenset(place.rpartition("# ")[2] for place in places))
    assert pairs <= {frozenset({"writes", "reads"})}
