"""Random numbers as PyTorch has them: those it draws on an H200, and its own tests of generators, re-expressed.

Each of the latter names the test that it comes from.
"""

from __future__ import annotations

import gc
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generated
import numpy as np
import numpy.typing as npt
import pytest
from random_cases import APPROXIMATE, THREADS, assert_same, cases, draw, places
from warm_process import run_python

import cudatool
from cudatool import random
from cudatool.errors import UsageError

with np.load(Path(__file__).parents[1] / "data" / "torch_rng.npz") as _file:
    RECORDED = dict(_file)
CASES = list(enumerate(json.loads(str(RECORDED["cases"]))))


@pytest.fixture(autouse=True)
def same_generators() -> Any:
    with random.fork_rng():
        yield


def test_the_recording_has_the_cases_that_are_drawn() -> None:
    assert json.loads(json.dumps(cases())) == [case for _, case in CASES]


@pytest.mark.some_of("third", range(3), 1)
@pytest.mark.parametrize("method", sorted({case["method"] for _, case in CASES}))
def test_numbers_are_those_that_torch_draws(method: str, third: int) -> None:
    """float32, of which there are arrays of all kinds, a third of the dtypes and of the largest arrays in each run.

    There is a kernel for each dtype, and to compile them takes most of the time; millions of numbers take the rest.
    """
    source = random.Generator()
    dtypes = sorted({case["dtype"] for _, case in CASES if case["method"] == method})
    chosen = {"float32", *dtypes[third % len(dtypes) :: 3]}
    for index, case in CASES:
        if case["method"] != method or case["dtype"] not in chosen:
            continue
        if np.prod(case["shape"]) > THREADS and index % 3 != third and generated.seed is not None:
            continue
        source.manual_seed(case["seed"]).set_offset(case["offset"])
        found = [draw(case, source).reshape(-1) for _ in range(2)]
        kept = RECORDED["samples"][RECORDED["starts"][index] : RECORDED["starts"][index + 1]].tobytes()
        samples = np.concatenate([one[places(one.size)] for one in found])
        expected = np.frombuffer(kept, samples.dtype)
        assert (expected.size, RECORDED["offsets"][index]) == (samples.size, source.get_offset()), case
        assert_same(case, expected, samples)
        if case["method"] not in APPROXIMATE:
            assert RECORDED["checks"][index].tolist() == [zlib.crc32(one.tobytes()) for one in found], case


# test_cuda.py


def test_a_seed_brings_the_same_numbers() -> None:
    """Source: test_cuda.py::test_manual_seed"""
    x = cudatool.zeros((4, 4))
    random.manual_seed(2)
    assert 2 == random.initial_seed()
    random.uniform_(x)
    random.manual_seed(2)
    y = random.uniform_(x.clone())
    np.testing.assert_array_equal(x.get(), y.get())
    assert 2 == random.initial_seed()


def test_one_seed_for_all_devices() -> None:
    """Source: test_cuda.py::test_torch_manual_seed_seeds_cuda_devices"""
    x = cudatool.zeros((4, 4))
    random.manual_seed_all(2)
    assert {2} == {generator.initial_seed() for generator in random.default_generators}
    random.uniform_(x)
    random.manual_seed_all(2)
    np.testing.assert_array_equal(x.get(), random.uniform_(x.clone()).get())


def test_states_of_all_devices_bring_their_numbers_back() -> None:
    """Source: test_cuda_multigpu.py::test_get_set_rng_state_all"""
    states = random.get_rng_state_all()
    devices = range(cudatool.device_count())
    before = [random.randn(100, device=index).get() for index in devices]
    random.set_rng_state_all(states)
    after = [random.randn(100, device=index).get() for index in devices]
    np.testing.assert_array_equal(before, after)


def test_the_offset_can_be_set_and_the_state_restored() -> None:
    """Source: test_cuda_multigpu.py::test_rng_state_offset"""
    before = random.get_rng_state()
    (generator, *_) = random.default_generators
    generator.set_offset(100)
    assert 100 == generator.get_offset()
    random.set_rng_state(before)
    np.testing.assert_array_equal(before, random.get_rng_state())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("function", [random.rand, random.randn])
def test_two_calls_never_share_numbers(function: Callable[..., Any], dtype: Any) -> None:
    """Source: test_cuda.py::test_random_no_reused_random_states"""
    size = 400_000  # more than one number for each thread of the device
    random.manual_seed(0)
    first, second = (function(size, dtype=dtype).get() for _ in range(2))
    same = len(np.intersect1d(first, second))
    assert same < (0.03 * size if dtype is np.float32 else 1)  # by chance, of 24 bits


def test_large_ranges_are_drawn_from_whole() -> None:
    """Source: test_cuda.py::test_randint_randomness_for_large_range"""
    size, high = 200_000, 6_000_000_000  # more than 32 bits
    random.manual_seed(0)
    first, second = (random.randint(0, high, (size,)).get() for _ in range(2))
    assert high - first.max() < high // 1000
    assert len(np.intersect1d(first, second)) < 100


def test_categories_with_weight_zero_never_come() -> None:
    """Source: test_cuda.py::test_multinomial_ext"""
    weights = cudatool.asarray(np.tile(np.array([0, 0.5, 0, 0.5, 0], np.float32), (50, 1)))
    with_replacement = random.multinomial(weights, 60, replacement=True).get()
    assert {1, 3} == set(with_replacement.ravel())
    without = random.multinomial(weights, 2).get()
    np.testing.assert_array_equal(np.tile([1, 3], (50, 1)), np.sort(without, 1))


@pytest.mark.parametrize(
    "draw_wrongly",
    [
        "random.multinomial(cudatool.asarray(np.array([1, np.nan, 1], np.float32)), 2)",
        "random.multinomial(cudatool.asarray(np.array([1, -1, 1], np.float32)), 2, True)",
        "random.multinomial(cudatool.zeros(3), 2, True)",
        "random.multinomial(cudatool.zeros(3), 1, True)",
        "random.multinomial(cudatool.asarray(np.array([[0, 0, 1], [0, 0, 0]], np.float16)), 3)",
        "random.bernoulli(cudatool.full(3, 2))",
    ],
)
def test_wrong_probabilities_stop_the_kernel(draw_wrongly: str) -> None:
    """Source: test_cuda.py::test_multinomial_invalid_probs_cuda"""
    program = f"""
import numpy as np, cudatool
from cudatool import random
try:
    {draw_wrongly}  # its later kernels may hear of the first one's end already
    cudatool.synchronize()
except cudatool.CudaError as error:
    print(error.name)
"""
    done = run_python(program)
    assert done.stdout.strip() in ("CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ILLEGAL_INSTRUCTION"), done.stderr


def captured(work: Callable[[], Any], *states: random.Generator) -> tuple[cudatool.CUDAGraph, Any]:
    """Return a graph of `work`, and what that returned."""
    graph = cudatool.CUDAGraph()
    for state in states:
        graph.register_generator_state(state)
    with cudatool.graph(graph):
        found = work()
    return graph, found


def test_replays_and_eager_calls_take_turns_with_one_generator() -> None:
    """Source: test_cuda.py::test_graph_rng_functional"""
    given = random.randn(10_000)

    def twice(array: cudatool.DeviceArray) -> cudatool.DeviceArray:
        return random.dropout(random.dropout(array, p=0.1), p=0.1)  # type: ignore[no-any-return]

    random.manual_seed(5)
    eager = twice(twice(twice(given)))
    random.manual_seed(5)
    graph_in = given.clone()
    graph, graph_out = captured(lambda: twice(graph_in))
    graph.replay()
    graph_in.copy_(twice(graph_out))
    graph.replay()
    np.testing.assert_array_equal(eager.get(), graph_out.get())

    for seed in (6, 128):
        random.manual_seed(seed)
        graph_in.copy_(given)
        for _ in range(3):
            graph.replay()
        assert not np.array_equal(eager.get(), graph_out.get())
        random.manual_seed(seed)
        for _ in range(3):
            eager = twice(given)
        np.testing.assert_array_equal(eager.get(), graph_out.get())


SIZE = 2000
DISTRIBUTIONS: dict[str, Callable[[], cudatool.DeviceArray]] = {
    "bernoulli": lambda: random.bernoulli(_weights()),
    "multinomial with replacement": lambda: random.multinomial(_weights(), SIZE, True),
    "multinomial": lambda: random.multinomial(_weights(), SIZE // 2),
    "rand": lambda: random.rand(SIZE),
    "randint": lambda: random.randint(0, 3, (SIZE,), dtype=np.float32),
    "randn": lambda: random.randn(SIZE),
    "randperm": lambda: random.randperm(SIZE),
    "dropout": lambda: random.dropout(_weights()),
    "bernoulli_": lambda: random.bernoulli_(cudatool.empty(SIZE), 0.5),
    "cauchy_": lambda: random.cauchy_(cudatool.empty(SIZE)),
    "exponential_": lambda: random.exponential_(cudatool.empty(SIZE)),
    "geometric_": lambda: random.geometric_(cudatool.empty(SIZE), 0.3),
    "log_normal_": lambda: random.log_normal_(cudatool.empty(SIZE)),
    "normal_": lambda: random.normal_(cudatool.empty(SIZE)),
    "random_": lambda: random.random_(cudatool.empty(SIZE)),
    "uniform_ with gaps": lambda: random.uniform_(cudatool.empty((SIZE, 2))[:, 1]),
}


def _weights() -> cudatool.DeviceArray:
    return cudatool.full(SIZE, 0.25)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_replays_draw_what_eager_calls_would_have_drawn(name: str) -> None:
    """Source: test_cuda.py::test_graph_rng_distributions"""
    function = DISTRIBUTIONS[name]
    function()  # so that nothing has to be compiled in the capture
    graph, found = captured(lambda: (function(), function()))
    for seed in (6, 314):
        random.manual_seed(seed)
        control = [function().get() for _ in range(5)]
        state = random.get_rng_state()
        random.manual_seed(seed)
        np.testing.assert_array_equal(control[0], function().get())
        for replay in range(2):
            graph.replay()
            np.testing.assert_array_equal(control[1 + 2 * replay], found[0].get())
            np.testing.assert_array_equal(control[2 + 2 * replay], found[1].get())
        np.testing.assert_array_equal(state, random.get_rng_state())


def test_states_are_switched_inside_a_capture() -> None:
    """Source: test_cuda.py::test_graphsafe_set_get_rng_state"""

    def states(generator: random.Generator) -> tuple[random.Generator, random.Generator, random.Generator]:
        generator.manual_seed(0)
        return generator, generator.graphsafe_get_state(), generator.clone_state()

    def work(generator: random.Generator, old: random.Generator, new: random.Generator) -> list[Any]:
        generator.graphsafe_set_state(new)
        found = [random.rand(5, generator=generator)]
        generator.graphsafe_set_state(old)
        return [*found, *(random.rand(5, generator=generator) for _ in range(2))]

    eager = states(random.Generator())
    graphed = states(random.default_generators[0])
    graph, found = captured(lambda: work(*graphed), *graphed[1:])
    for _ in range(3):
        expected = work(*eager)
        graph.replay()
        assert [state.get_offset() for state in eager[1:]] == [state.get_offset() for state in graphed[1:]]
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one.get(), other.get())


def test_another_seed_cannot_be_set_in_a_capture() -> None:
    """Source: test_cuda.py::test_graph_manual_seed_mismatch_raises"""
    random.manual_seed(1)

    def work() -> None:
        random.manual_seed(1)  # the one it has
        random.rand(3)
        with pytest.raises(UsageError, match="cannot be set while a graph is captured"):
            random.manual_seed(2)

    graph, _ = captured(work)
    assert 1 == random.initial_seed()
    del graph


@pytest.mark.parametrize(("graphs", "generators"), [(1, 1), (3, 2), (4, 8)])
def test_generators_of_a_graph_hold_one_block_each(graphs: int, generators: int) -> None:
    """Source: test_cuda.py::test_memory_stats_of_multiple_generators_and_graphs

    PyTorch has two blocks for each generator, which all graphs share; ours has one for each generator of each graph,
    so that two graphs can be replayed at once. The default generator is in every graph, and one that shares its state
    takes no second block.
    """
    random.rand(1)
    before = cudatool.memory_stats()["active.all.current"]
    default = random.default_generators[0]
    states = [default.graphsafe_get_state(), *(default.clone_state() for _ in range(1, generators))]
    made = [captured(lambda: [random.rand(1)].clear(), *states)[0] for _ in range(graphs)]
    for one in made:
        one.replay()
    del one
    assert graphs * generators == cudatool.memory_stats()["active.all.current"] - before
    while made:
        made.pop()
    gc.collect()
    cudatool.synchronize()
    cudatool.empty_cache()
    assert before == cudatool.memory_stats()["active.all.current"]


# What they do not ask.


def test_a_generator_that_the_graph_does_not_know_is_refused() -> None:
    source = random.Generator()
    message = "register_generator_state"

    def work() -> npt.NDArray[Any] | None:
        random.rand(3)
        with pytest.raises(UsageError, match=message):
            random.rand(3, generator=source)
        return None

    captured(work)
    graph, found = captured(lambda: random.rand(3, generator=source), source)
    source.manual_seed(9)
    graph.replay()
    first = found.get()
    source.manual_seed(9)
    np.testing.assert_array_equal(random.rand(3, generator=source).get(), first)


def test_replays_on_other_streams_have_their_own_numbers() -> None:
    graph, found = captured(lambda: random.rand(1000))
    streams = [cudatool.Stream() for _ in range(4)]
    copies = [cudatool.empty(1000) for _ in streams]
    random.manual_seed(3)
    for stream, copy in zip(streams, copies, strict=True):
        with stream:
            graph.replay()
            copy.copy_(found)
    random.manual_seed(3)
    expected = [random.rand(1000).get() for _ in streams]
    cudatool.synchronize()
    np.testing.assert_array_equal(expected, [copy.get() for copy in copies])


def test_a_failed_capture_draws_nothing() -> None:
    before = random.get_rng_state()
    with pytest.raises(KeyError):
        captured(lambda: (random.rand(10), {}["no such key"]))
    np.testing.assert_array_equal(before, random.get_rng_state())
    random.rand(3)
    assert not np.array_equal(before, random.get_rng_state())
