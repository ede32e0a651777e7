"""Compiled functions: what is traced, when a graph is replayed, where its memory lies, and what cannot be a graph."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import cudatool as ct
from cudatool import analyze, blas, ops
from cudatool.amp import autocast
from cudatool.blas import _gemm
from cudatool.compiler import CompiledFunction, compile
from cudatool.compiler._plan import Buffer, plan
from cudatool.errors import GraphBreakError, UsageError
from cudatool.runtime import calls
from cudatool.runtime.allocator import Memory
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.calls import check
from cudatool.trace import reader
from cudatool.trace.events import Event, Kind
from cudatool.trace.model import Trace

SAMPLES = Path(__file__).parents[2] / "samples"
pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def settings_as_before() -> Any:
    before = ct.get_float32_matmul_precision()
    library = ct.backends.cuda.preferred_blas_library()
    fp16 = ct.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    bf16 = ct.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    yield
    ct.set_float32_matmul_precision(before)
    ct.backends.cuda.preferred_blas_library(library)
    ct.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = fp16
    ct.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bf16
    ct.use_deterministic_algorithms(False)


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> DeviceArray:
    return ct.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


class Model:
    """State that the guarded function reads."""

    share = 0.5

    def __init__(self) -> None:
        self.weight = numbers(16, 8)
        self.rate = 0.25
        self.names = ["a", "b"]
        self.layers = [numbers(8), numbers(8, seed=1)]
        self.table = np.arange(4)
        self.saved = self.weight


FACTOR = 3.0


class Case:
    """A function, its arguments and its surroundings, which a row of the table changes."""

    def __init__(self) -> None:
        self.model = model = Model()
        self.args: tuple[Any, ...] = (numbers(4, 16),)
        self.kwargs: dict[str, Any] = {"scale": 2.0, "mode": "plus", "extra": [numbers(8), 1]}
        self.around = ExitStack()
        offset = 1

        def function(x: Any, *more: Any, scale: Any = 1.0, mode: Any = "plus", extra: Any = None, **others: Any) -> Any:
            y = blas.mm(x.reshape(-1, 16).to(model.weight.dtype), model.weight) * scale * model.rate * model.share
            y = y + offset + FACTOR + float(model.table.sum()) + len(model.names) + len(others)
            for part in model.layers:
                y = y + part
            if mode == "plus" and extra is not None:
                y = y + extra[0] * extra[1]
            model.saved = y
            return y if not more else y + more[0]

        self.function = function

    def set_offset(self, value: Any) -> None:
        assert self.function.__closure__ is not None
        cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__, strict=True))
        cells["offset"].cell_contents = value


def put(name: str, value: Callable[[Case], Any]) -> Callable[[Case], None]:
    return lambda case: case.kwargs.update({name: value(case)})


def first(value: Callable[[], Any]) -> Callable[[Case], None]:
    return lambda case: setattr(case, "args", (value(), *case.args[1:]))


def state(name: str, value: Callable[[Case], Any]) -> Callable[[Case], None]:
    return lambda case: setattr(case.model, name, value(case))


def inside(context: Callable[[], Any]) -> Callable[[Case], None]:
    return lambda case: case.around.enter_context(context())


def switch(name: str, value: bool) -> Callable[[Case], None]:
    return lambda case: setattr(ct.backends.cuda.matmul, name, value)


CHANGES: dict[str, tuple[Callable[[Case], Any], str]] = {
    # arguments that are arrays
    "nothing": (lambda case: None, "hit"),
    "another array of the same kind": (first(lambda: numbers(4, 16, seed=5)), "hit"),
    "other values in the array": (lambda case: case.args[0].fill_(2), "hit"),
    "a contiguous view elsewhere": (first(lambda: numbers(8, 16)[4:]), "hit"),
    "more rows": (first(lambda: numbers(5, 16)), "retrace"),
    "no rows": (first(lambda: numbers(0, 16)), "retrace"),
    "another dimension": (first(lambda: numbers(2, 2, 16)), "retrace"),
    "the same elements in another shape": (first(lambda: numbers(2, 32)), "retrace"),
    "another dtype": (first(lambda: numbers(4, 16, dtype=np.float64)), "retrace"),
    "a shorter dtype": (first(lambda: numbers(4, 16).to(np.float16)), "retrace"),
    "other strides": (first(lambda: numbers(16, 4).T), "retrace"),
    "strides with gaps": (first(lambda: numbers(4, 32)[:, ::2]), "error"),
    "repeated rows": (first(lambda: numbers(16).broadcast_to((4, 16))), "error"),
    "an argument that is state": (lambda case: setattr(case, "args", (case.model.weight.reshape(8, 16),)), "error"),
    "one array twice": (lambda case: put("extra", lambda c: [c.args[0].reshape(-1)[:8], 1])(case), "error"),
    # arguments that are constants, containers and objects
    "another number": (put("scale", lambda case: 2.5), "retrace"),
    "an int in place of a float": (put("scale", lambda case: 2), "retrace"),
    "an equal number": (put("scale", lambda case: float("2.0")), "hit"),
    "another string": (put("mode", lambda case: "minus"), "retrace"),
    "an equal list": (put("extra", lambda case: list(case.kwargs["extra"])), "hit"),
    "a tuple in place of a list": (put("extra", lambda case: tuple(case.kwargs["extra"])), "retrace"),
    "a longer list": (put("extra", lambda case: [*case.kwargs["extra"], 1]), "retrace"),
    "None in place of a list": (put("extra", lambda case: None), "retrace"),
    "one more keyword": (put("other", lambda case: 1), "retrace"),
    "one more argument": (lambda case: setattr(case, "args", (*case.args, numbers(8))), "retrace"),
    # what decides which elements meet in a fused kernel, and in which dtype
    "an operand of the broadcast shape": (put("extra", lambda case: [numbers(4, 8), 1]), "retrace"),
    "an operand with a dimension of one": (put("extra", lambda case: [numbers(1, 8), 1]), "retrace"),
    "an operand that widens the result": (put("extra", lambda case: [numbers(3, 4, 8), 1]), "retrace"),
    "an operand of no dimensions": (put("extra", lambda case: [numbers(), 1]), "retrace"),
    "an operand of a shorter dtype": (put("extra", lambda case: [numbers(8).to(np.float16), 1]), "retrace"),
    "an operand that promotes to float64": (put("extra", lambda case: [numbers(8, dtype=np.float64), 1]), "retrace"),
    "an operand of integers": (put("extra", lambda case: [numbers(8, dtype=np.int32), 1]), "retrace"),
    "a number that promotes to complex": (put("scale", lambda case: 2.0j), "retrace"),
    "a bool in place of an int": (put("extra", lambda case: [case.kwargs["extra"][0], True]), "retrace"),
    # state
    "another weight": (state("weight", lambda case: numbers(16, 8, seed=7)), "retrace"),
    "the weight changed in place": (lambda case: case.model.weight.fill_(0.5), "hit"),
    "another number in an attribute": (state("rate", lambda case: 0.5), "retrace"),
    "an equal list in an attribute": (state("layers", lambda case: case.model.layers), "hit"),
    "a layer appended": (lambda case: case.model.layers.append(numbers(8)), "retrace"),
    "a layer replaced": (lambda case: case.model.layers.__setitem__(0, numbers(8, seed=3)), "retrace"),
    "another host array": (lambda case: case.model.table.fill(2), "retrace"),
    "a new attribute": (state("new", lambda case: 1), "retrace"),
    "another number in a closure": (lambda case: case.set_offset(4), "retrace"),
    "what a run replaces": (state("saved", lambda case: numbers(2)), "hit"),
    # surroundings
    "another stream": (inside(lambda: ct.stream(ct.Stream())), "hit"),
    "autocast": (inside(lambda: autocast(dtype=ct.bfloat16)), "retrace"),
    "autocast that is off": (inside(lambda: autocast(enabled=False)), "hit"),
    "TF32": (lambda case: ct.set_float32_matmul_precision("high"), "retrace"),
    "float16 sums": (switch("allow_fp16_reduced_precision_reduction", False), "retrace"),
    "bfloat16 sums": (switch("allow_bf16_reduced_precision_reduction", False), "retrace"),
    "another library": (lambda case: ct.backends.cuda.preferred_blas_library("cublaslt"), "retrace"),
    "deterministic": (lambda case: ct.use_deterministic_algorithms(True, warn_only=True), "retrace"),
}


@pytest.mark.filterwarnings("ignore:products of cuBLAS may differ")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_a_hit_a_retrace_or_an_error(change: str) -> None:
    apply, expected = CHANGES[change]
    case = Case()
    compiled = compile(case.function, fullgraph=True)
    for _ in range(3):
        compiled(*case.args, **case.kwargs)
    assert (1, 2) == (compiled.hits, compiled.misses), compiled.explain()
    apply(case)
    with case.around:
        wanted = case.function(*case.args, **case.kwargs).get()
        if change == "what a run replaces":
            case.model.saved = numbers(2)
        if expected == "error":
            compiled(*case.args, **case.kwargs)
            with pytest.raises(GraphBreakError):
                compiled(*case.args, **case.kwargs)
            return
        first_result = compiled(*case.args, **case.kwargs).get()
        assert expected == ("hit" if compiled.hits == 2 else "retrace")
        for _ in range(2):
            result = compiled(*case.args, **case.kwargs).get()
        assert compiled.hits > 1
        np.testing.assert_array_equal(wanted, first_result)
        np.testing.assert_array_equal(wanted, result)


def sample(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"compiled_{name}", SAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_transformer_has_the_same_losses_as_without_in_less_memory() -> None:
    module = sample("transformer")

    def losses(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
        training, rng = module.Training(), np.random.default_rng(0)
        step, found = wrap(training.step), []
        for _ in range(5):
            training.load(rng)
            found.append(float(step().get()))
        return found, step

    eager, _ = losses(lambda step: step)
    traced, step = losses(lambda step: compile(step, fullgraph=True))
    assert eager == traced
    assert (3, 2) == (step.hits, step.misses)
    (graph,), (memory,) = step.graphs, step.plans
    assert {"kernel", "product", "fill"} <= {node.kind for node in graph.nodes}
    assert {"", "bfloat16"} == {node.autocast for node in graph.nodes}
    assert "cudatool.optim.Optimizer.step" in {node.op for node in graph.nodes}
    assert memory.peak < memory.unshared / 2


def test_a_perceptron_with_kernels_of_its_own_trains_as_without() -> None:
    source = """
    extern "C" __global__ void bias_relu(float *x, const float *bias, int rows, int columns) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < rows * columns) x[i] = fmaxf(x[i] + bias[i % columns], 0.0f);
    }
    extern "C" __global__ void sgd(float *weight, const float *gradient, float rate, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) weight[i] -= rate * gradient[i];
    }
    """
    bias_relu, sgd = ct.compile(source, "bias_relu"), ct.compile(source, "sgd")

    def train(wrap: Callable[[Any], Any]) -> list[list[float]]:
        w1, w2, b1 = numbers(16, 32), numbers(32, 8), ct.zeros(32)

        def step(x: DeviceArray, target: DeviceArray) -> DeviceArray:
            hidden = blas.mm(x, w1)
            bias_relu[4 * len(x), 128](hidden, b1, len(x), 32)
            error = blas.mm(hidden, w2) - target
            gradient = blas.mm(hidden.T, error)
            sgd[2, 128](w2, gradient, 1e-3, w2.size)
            return ops.sum(error * error, -1)

        step = wrap(step)
        return [step(numbers(4, 16, seed=i), numbers(4, 8, seed=i)).get().tolist() for i in range(5)]

    assert train(lambda step: step) == train(lambda step: compile(step, fullgraph=True))


UNFUSED = {"max_fusion_size": 1}


def chain(x: DeviceArray) -> DeviceArray:
    for _ in range(6):
        x = x * 2.0
    return x


def rows(x: DeviceArray) -> DeviceArray:
    for _ in range(6):
        x = ops.softmax(x, -1)
    return x


def test_the_planned_peak_is_what_the_allocator_gave_to_the_byte(events: list[Event]) -> None:
    x = numbers(1000)
    compiled = compile(rows, fullgraph=True)
    compiled(x)
    events.clear()
    compiled(x)
    (memory,) = compiled.plans
    given = [event.size for event in events if event.kind is Kind.BLOCK_ALLOC and not event.aux1]
    larger_than_arguments_and_results = [size for size in given if size > 4096]
    assert [memory.peak] == larger_than_arguments_and_results
    assert (2 * 4096, 7 * 4096) == (memory.peak, memory.unshared)
    assert (memory.peak,) == compiled.peaks
    assert "8 KiB planned, 8 KiB used, 28 KiB if no buffers shared" in compiled.explain()


def test_an_elementwise_operation_writes_where_it_reads_for_the_last_time() -> None:
    x, compiled = numbers(1000), compile(chain, fullgraph=True, options=UNFUSED)
    for _ in range(3):
        np.testing.assert_array_equal(chain(x).get(), compiled(x).get())
    (memory,) = compiled.plans
    assert (4096, 7 * 4096) == (memory.peak, memory.unshared)


def test_nothing_is_written_where_it_is_read_later_or_in_another_place() -> None:
    def later(x: DeviceArray) -> DeviceArray:
        return ops.softmax(x * 2.0, -1) + x

    def elsewhere(x: DeviceArray) -> DeviceArray:
        return ops.softmax(x.T + 1.0, -1)

    def twice(x: DeviceArray) -> DeviceArray:
        return ops.softmax(x + x.T, -1)

    x = numbers(32, 32)
    for function in (later, elsewhere, twice):
        compiled = compile(function, fullgraph=True, options=UNFUSED)
        for _ in range(3):
            np.testing.assert_array_equal(function(x).get(), compiled(x).get())
        assert 4096 < compiled.plans[0].peak


def test_an_array_that_the_function_holds_longer_than_it_needs_takes_no_memory_after_its_last_use() -> None:
    def holds(x: DeviceArray) -> DeviceArray:
        held = [x]
        for _ in range(6):
            held.append(ops.softmax(held[-1], -1))
        return held[-1]

    x, compiled = numbers(1000), compile(holds, fullgraph=True)
    for _ in range(3):
        np.testing.assert_array_equal(holds(x).get(), compiled(x).get())
    assert (2 * 4096, 7 * 4096) == (compiled.plans[0].peak, compiled.plans[0].unshared)


def test_a_buffer_that_a_second_stream_reads_is_not_reused_before_the_program_waits() -> None:
    side = ct.Stream()

    def forked(x: DeviceArray) -> DeviceArray:
        main = ct.current_stream()
        y = ops.softmax(x, -1)
        side.wait_stream(main)
        with ct.stream(side):
            z = ops.softmax(y, -1)  # not ordered with what follows on the other stream
        a = ops.softmax(x, -1)
        b = ops.softmax(a, -1)
        main.wait_stream(side)
        z.record_stream(main)
        return b + z + y * 0.0

    compiled = compile(forked, fullgraph=True)
    for _ in range(3):
        compiled(numbers(4, 8))
    (plan,) = compiled.plans
    line = f"test_compiler.py:{forked.__code__.co_firstlineno + 2}"
    (y,) = [number for number, buffer in enumerate(plan.buffers) if buffer.line == line]
    others = [offset for number, offset in enumerate(plan.offsets) if number != y and plan.buffers[number].stream == 0]
    assert plan.offsets[y] not in others[1:-1]


def test_an_argument_is_copied_back_only_if_the_function_changes_it(events: list[Event]) -> None:
    def changes(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        y.add_(x)
        return ops.sum(x)

    compiled = compile(changes, fullgraph=True)
    x, y = numbers(1000), numbers(1000)
    for _ in range(2):
        compiled(x, y)
    events.clear()
    compiled(x, y)
    assert [4000, 4000, 4000, 4] == [event.size for event in events if event.kind is Kind.MEMCPY]
    assert [False, True] == [buffer.kept for buffer in compiled.plans[0].buffers[:2]]


def test_results_stay_when_the_function_is_called_again() -> None:
    compiled = compile(chain, fullgraph=True)
    results = [compiled(ct.full(4, i)) for i in range(5)]
    assert [[64.0 * i] * 4 for i in range(5)] == [result.get().tolist() for result in results]


def test_arguments_that_the_function_changes_are_changed() -> None:
    @compile(fullgraph=True)
    def increase(x: DeviceArray) -> DeviceArray:
        return x.add_(1.0)

    x, y = ct.zeros(4), ct.zeros(4)
    for _ in range(4):
        assert increase(x) is x
    assert increase(y) is y
    assert ([4.0] * 4, [1.0] * 4) == (x.get().tolist(), y.get().tolist())


def test_work_on_a_second_stream_is_in_the_graph_with_its_waits() -> None:
    side = ct.Stream()

    @compile(fullgraph=True)
    def forked(x: DeviceArray) -> DeviceArray:
        main = ct.current_stream()
        side.wait_stream(main)
        with ct.stream(side):
            y = x * 3.0
        z = x + 1.0
        main.wait_stream(side)
        y.record_stream(main)
        return y + z

    for i in range(4):
        assert [4.0 * i + 1] * 3 == forked(ct.full(3, i)).get().tolist()
    (graph,) = forked.graphs
    assert {0, 1} == {node.stream for node in graph.nodes}
    assert 2 == [node.kind for node in graph.nodes].count("wait_event")
    assert [False] == [buffer.shares for buffer in forked.plans[0].buffers if buffer.stream == 1]


def test_questions_about_the_device_become_constants() -> None:
    @compile(fullgraph=True)
    def asks(x: DeviceArray) -> DeviceArray:
        major, _ = ct.get_device_capability()
        return x * float(major + x.shape[0]) if ct.is_available() else x

    for _ in range(3):
        asks(ct.ones(2))
    (graph,) = asks.graphs
    assert ("cudatool.get_device_capability", "cudatool.is_available") == graph.folded
    assert ["cudatool.ops.mul"] == [node.op for node in graph.nodes]
    assert graph.nodes[0].line.startswith("test_compiler.py:")


def test_a_value_that_is_needed_breaks_the_graph_and_the_error_names_the_line() -> None:
    def branches(x: DeviceArray) -> DeviceArray:
        y = x + 1.0
        if float(ops.sum(y)) > 3:  # here
            y = y * 2.0
        return y

    compiled = compile(branches, fullgraph=True)
    assert [4.0] * 3 == compiled(ct.ones(3)).get().tolist()
    with pytest.raises(GraphBreakError) as caught:
        compiled(ct.ones(3))
    assert f"test_compiler.py:{branches.__code__.co_firstlineno + 2}" == caught.value.line
    assert not ct.is_current_stream_capturing()

    eager = compile(branches)
    for _ in range(3):
        assert [4.0] * 3 == eager(ct.ones(3)).get().tolist()
        assert [1.0] * 1 == eager(ct.zeros(1)).get().tolist()
    assert 0 == eager.hits
    assert "graph break: test_compiler.py" in eager.explain()


def test_a_counter_in_python_breaks_the_graph_and_is_right() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def step(self, x: DeviceArray) -> DeviceArray:
            self.count += 1
            return x * float(self.count)

    counter = Counter()
    step = compile(counter.step)
    assert [1.0, 2.0, 3.0, 4.0] == [float(step(ct.ones(1))) for _ in range(4)]
    assert 4 == counter.count
    assert "the function changes self.count" in step.explain()


@pytest.mark.parametrize(
    "use",
    [
        lambda number: ct.ones(4, np.int64) + number,
        lambda number: ct.ones(4, np.int64).clamp(max=number),
        lambda number: ct.full(4, number, np.int32) * 1,
        lambda number: ct.full(4, number, np.float64) * 1,
    ],
    ids=["an operand", "a keyword", "a fill", "a fill of two words"],
)
def test_whole_numbers_from_elsewhere_break_the_graph_and_are_right(use: Callable[[int], DeviceArray]) -> None:
    def step() -> DeviceArray:
        return use(-(time.monotonic_ns() % 2**30))

    step_compiled = compile(step)
    assert 4 == len({float(step_compiled()[0]) for _ in range(4)})
    assert "the function computes with other numbers each time it runs" in step_compiled.explain()


def test_state_that_is_read_before_it_is_replaced_breaks_the_graph_and_is_right() -> None:
    class Sum:
        def __init__(self) -> None:
            self.total = ct.zeros(2)

        def step(self, x: DeviceArray) -> DeviceArray:
            self.total = self.total + x
            return self.total

    total = Sum()
    step = compile(total.step)
    assert [1.0, 2.0, 3.0, 4.0] == [float(step(ct.ones(2))[0]) for _ in range(4)]
    assert "reads self.total before it replaces it" in step.explain()


def test_what_a_run_stores_is_what_the_replay_computed() -> None:
    class Layer:
        def __init__(self) -> None:
            self.saved = [ct.zeros(2)]

        def forward(self, x: DeviceArray) -> DeviceArray:
            self.saved = [x * 3.0]
            return self.saved[0] + 1.0

    layer = Layer()
    forward = compile(layer.forward, fullgraph=True)
    for i in range(5):
        assert [3.0 * i + 1] * 2 == forward(ct.full(2, i)).get().tolist()
        assert [3.0 * i] * 2 == layer.saved[0].get().tolist()
    assert 3 == forward.hits


def test_an_argument_that_a_run_stores_is_the_argument_of_each_call() -> None:
    class Layer:
        def __init__(self) -> None:
            self.x = ct.zeros(2)

        def forward(self, x: DeviceArray) -> DeviceArray:
            self.x = x
            return x * 3.0

    layer = Layer()
    forward = compile(layer.forward, fullgraph=True)
    kept = ct.ones(2)
    for x in (kept, kept, kept, ct.full(2, 5), kept):
        assert (x * 3.0).get().tolist() == forward(x).get().tolist()
        assert layer.x is x
    assert 3 == forward.hits, forward.explain()


LARGE = 1 << 18  # elements, of 4 bytes each: the fewest of an argument that is read where it is


def test_a_large_argument_is_read_and_changed_where_it_is(events: list[Event]) -> None:
    def step(x: DeviceArray, small: DeviceArray) -> DeviceArray:
        x.mul_(2.0)
        return ops.sum(x + small)

    compiled, x, small = compile(step, fullgraph=True), ct.ones(LARGE), ct.ones(1)
    for number in range(1, 6):
        assert LARGE * (2**number + 1) == compiled(x, small).item()
    assert (3, 2) == (compiled.hits, compiled.misses), compiled.explain()
    events.clear()
    compiled(x, small)
    assert [4, 4] == [event.size for event in events if event.kind is Kind.MEMCPY], "the small one, and the result"
    assert ["args[1]"] == [buffer.line for buffer in compiled.plans[0].buffers if buffer.line.startswith("args")]
    assert 2.0**6 == x[0].item()


def test_a_large_argument_that_moves_is_copied_from_then_on() -> None:
    def step(x: DeviceArray) -> DeviceArray:
        return x + 1.0

    compiled, first, second = compile(step, fullgraph=True), ct.ones(LARGE), ct.full(LARGE, 5)
    for x, wanted in ((first, 2), (first, 2), (first, 2), (second, 6), (first, 2), (second, 6)):
        assert wanted == compiled(x)[-1].item()
    assert (3, 3) == (compiled.hits, compiled.misses), compiled.explain()
    assert "args[0] is in another place than before: traced" in compiled.explain()


def test_a_large_argument_is_not_kept() -> None:
    compiled = compile(lambda x: ops.sum(x), fullgraph=True)
    x = ct.ones(LARGE)
    for _ in range(3):
        assert LARGE == compiled(x).item()
    assert 1 == compiled.hits, compiled.explain()
    before = ct.memory_allocated()
    del x
    gc.collect()
    assert 4 * LARGE == before - ct.memory_allocated()


def test_a_large_argument_that_the_function_stores_and_returns_is_the_callers() -> None:
    class Layer:
        def __init__(self) -> None:
            self.x = ct.zeros(2)

        def forward(self, x: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
            self.x = x
            return x, x + 1.0

    layer, x = Layer(), ct.ones(LARGE)
    forward = compile(layer.forward, fullgraph=True)
    for _ in range(4):
        same, other = forward(x)
        assert same is x and layer.x is x and 2 == other[0].item()


def test_a_product_that_fills_memory_first_is_known_and_what_it_works_in_lies_apart(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """As one of cuBLAS: it is two nodes of a graph, and its workspace is freed before the event that tells of it."""
    if device != "sim":
        pytest.skip("there each product is one of cuBLAS, with a workspace of its own beside this one")
    size, real = 1 << 16, _gemm.default_implementation()

    def in_two_nodes(gemm: Any, stream: Any) -> None:
        workspace = Memory(size, stream)
        check(calls.driver.cuMemsetD8Async(workspace.address, 0, size, stream.cuda_stream))
        real(gemm, stream)

    monkeypatch.setattr(_gemm, "_default", in_two_nodes)

    def step(x: DeviceArray, y: DeviceArray) -> DeviceArray:
        return blas.mm(x, y) + 1.0

    compiled, x, y = compile(step, fullgraph=True, options=UNFUSED), numbers(64, 64), numbers(64, 64, seed=2)
    for _ in range(3):
        np.testing.assert_array_equal(step(x, y).get(), compiled(x, y).get())
    assert (1, 2) == (compiled.hits, compiled.misses), compiled.explain()
    (memory,) = compiled.plans
    lives = [(buffer.line.partition(":")[0], buffer.first, buffer.last, buffer.kept) for buffer in memory.buffers]
    program = "test_compiler.py"
    assert [("args[0]", 0, 0, False), ("args[1]", 0, 0, False)] == lives[:2], "neither is written"
    assert [(program, 0, 0, False), (program, 0, 0, False), (program, 1, 1, True)] == lives[2:]
    places = [range(at, at + buffer.size) for at, buffer in zip(memory.offsets, memory.buffers, strict=True)]
    (works_in,) = [place for place in places if len(place) == size]
    for place in places[:4]:  # the last is written when the product is done
        assert place == works_in or not (place.start < works_in.stop and works_in.start < place.stop)


def test_a_function_is_given_no_more_than_eight_graphs() -> None:
    compiled = compile(chain)
    for size in range(1, 11):
        for _ in range(2):
            compiled(ct.ones(size))
    assert 8 == len(compiled.graphs)
    assert "has 8 graphs already" in compiled.explain()
    compiled.reset()
    assert () == compiled.graphs


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(UsageError, match="compile takes a function, not int"):
        compile(3)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="compile takes a dict of options, not list"):
        compile(chain, options=["max_fusion_size"])  # type: ignore[call-overload]
    assert isinstance(compile(chain), CompiledFunction)


def test_no_two_buffers_that_exist_at_once_overlap() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        count = int(rng.integers(1, 30))
        starts = rng.integers(0, 200, count).tolist()
        buffers = [
            Buffer(
                512 * int(rng.integers(1, 9)),
                start,
                start + int(rng.integers(1, 50)),
                False,
                int(rng.integers(2)),
                bool(rng.integers(5)),
                "",
            )
            for start in starts
        ]
        pairs = {
            (a, b)
            for a, b in itertools.permutations(range(count), 2)
            if buffers[a].last == buffers[b].first and may_meet(buffers[a], buffers[b])
        }
        found = plan(buffers, pairs)
        assert max(o + b.size for o, b in zip(found.offsets, buffers, strict=True)) == found.peak <= found.unshared
        for a, b in itertools.combinations(range(count), 2):
            start = max(found.offsets[a], found.offsets[b])
            end = min(found.offsets[a] + buffers[a].size, found.offsets[b] + buffers[b].size)
            if start < end:
                assert may_meet(buffers[a], buffers[b])
                one, other = buffers[a], buffers[b]
                in_place = {(a, b), (b, a)} & pairs and found.offsets[a] == found.offsets[b]
                assert one.last < other.first or other.last < one.first or in_place


def may_meet(one: Buffer, other: Buffer) -> bool:
    return one.shares and other.shares and one.stream == other.stream


def recorded(tmp_path: Path, during: Callable[[], object]) -> Trace:
    path = tmp_path / "plan.ctrace"
    with ct.record(path):
        during()
    return reader.read(path)


def test_a_recording_has_the_plan_as_the_function_has_it(tmp_path: Path) -> None:
    x, compiled = numbers(1000), compile(rows, fullgraph=True)
    trace = recorded(tmp_path, lambda: [compiled(x) for _ in range(3)])
    (memory,), (found,) = compiled.plans, analyze.plans(trace)
    assert (memory.peak, memory.peak, memory.unshared) == (found.planned, found.ran, found.unshared)
    assert ("rows", len(compiled.graphs[0].nodes), 2 * 4096) == (found.function, found.nodes, found.most_live)
    assert [(o, b.size) for o, b in zip(memory.offsets, memory.buffers, strict=True)] == [
        (buffer.offset, buffer.size) for buffer in found.buffers
    ]
    assert ["args[0]", *["cudatool.ops.softmax"] * 6] == [buffer.node for buffer in found.buffers]
    assert all("test_compiler.py" in buffer.label and "rows" in buffer.label for buffer in found.buffers[1:])


def test_the_result_of_a_plan_is_kept_and_lasts_to_the_end(tmp_path: Path) -> None:
    x, compiled = numbers(1000), compile(chain, fullgraph=True, options=UNFUSED)
    (found,) = analyze.plans(recorded(tmp_path, lambda: [compiled(x), compiled(x)]))
    assert [False] * 6 + [True] == [buffer.kept for buffer in found.buffers]
    assert found.nodes == found.buffers[-1].end
    assert [buffer.kept for buffer in compiled.plans[0].buffers] == [buffer.kept for buffer in found.buffers]


def test_a_plan_from_before_a_recording_is_in_it_while_it_is_in_use(tmp_path: Path) -> None:
    x, compiled = numbers(1000), compile(chain, fullgraph=True)
    compiled(x)
    compiled(x)
    during = analyze.plans(recorded(tmp_path, lambda: compiled(x)))
    assert ["chain"] == [found.function for found in during]
    assert all("chain" in buffer.label for buffer in during[0].buffers[1:])
    compiled.reset()
    gc.collect()
    (tmp_path / "plan.ctrace").unlink()
    assert () == analyze.plans(recorded(tmp_path, lambda: chain(x)))


def test_what_another_thread_does_while_a_function_is_traced_is_its_own() -> None:
    """Memory from the driver, for example, which a capture of the default mode refuses in every thread."""

    def take() -> None:
        ct.set_device(0)
        check(driver.cuMemFree(check(driver.cuMemAlloc(512))))

    def doubled(x: DeviceArray) -> DeviceArray:
        threads.submit(take).result()
        return x * 2

    x = numbers(4)
    with ThreadPoolExecutor(1) as threads:
        compiled = compile(doubled, fullgraph=True)
        results = [compiled(x).get().tolist() for _ in range(3)]
    assert [(x * 2).get().tolist()] * 3 == results
    assert 1 == len(compiled.graphs)


def test_functions_that_two_threads_trace_at_the_same_time_become_graphs() -> None:
    together = threading.Barrier(2)

    def doubled(x: DeviceArray) -> DeviceArray:
        time.sleep(0.1)  # so that the one is traced while the other is
        return x * 2

    def use(function: CompiledFunction) -> list[float]:
        x = numbers(4)
        function(x)
        together.wait()
        return [float(one) for one in (function(x) - x * 2).get()]

    functions = [compile(doubled, fullgraph=True) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        differences = list(threads.map(use, functions))
    assert [[0.0] * 4] * 2 == differences
    assert [1, 1] == [len(function.graphs) for function in functions]
