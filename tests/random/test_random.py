"""Random numbers: what is drawn, by which generator, and that it is random."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from warm_process import run_python

import cudatool
from cudatool import random
from cudatool.errors import UsageError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
REALS = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16]


@pytest.fixture(autouse=True)
def same_generators() -> Any:
    with random.fork_rng():
        yield


def generator(seed: int = 1234, offset: int = 0) -> random.Generator:
    found = random.Generator().manual_seed(seed)
    found.set_offset(offset)
    return found


def drawn(method: str, size: int = 20_000, dtype: Any = np.float32, *args: Any) -> npt.NDArray[Any]:
    """Return a sample of one of the functions that fill, as float64."""
    array = getattr(random, method)(cudatool.empty(size, dtype), *args, generator=generator())
    return array.get().astype(np.float64)


def distance(sample: npt.NDArray[Any], distribution: Any) -> float:
    """Return Kolmogorov's distance from a cumulative distribution, times the root of the size; rarely above 1.95."""
    ordered = np.sort(sample)
    expected = np.vectorize(distribution)(ordered)
    steps = np.arange(len(sample) + 1) / len(sample)
    return float(max(np.max(steps[1:] - expected), np.max(expected - steps[:-1])) * math.sqrt(len(sample)))


# Distributions.


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("method", "args", "distribution"),
    [
        ("uniform_", (), lambda x: x),
        ("uniform_", (-2.0, 6.0), lambda x: (x + 2) / 8),
        ("normal_", (), lambda x: 0.5 * math.erfc(-x / math.sqrt(2))),
        ("normal_", (5.0, 0.5), lambda x: 0.5 * math.erfc(-(x - 5) / 0.5 / math.sqrt(2))),
        ("exponential_", (3.0,), lambda x: 1 - math.exp(-3 * x)),
        ("log_normal_", (0.5, 0.25), lambda x: 0.5 * math.erfc(-(math.log(x) - 0.5) / 0.25 / math.sqrt(2))),
        ("cauchy_", (1.0, 2.0), lambda x: 0.5 + math.atan((x - 1) / 2) / math.pi),
    ],
)
def test_samples_follow_their_distribution(dtype: Any, method: str, args: Any, distribution: Any) -> None:
    assert distance(drawn(method, 20_000, dtype, *args), distribution) < 1.95  # by chance once in a thousand


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_uniform_numbers_include_the_low_end_and_not_the_high_one(dtype: Any) -> None:
    sample = drawn("uniform_", 100_000, dtype, 0.0, 1.0)
    assert 0 <= sample.min() < sample.max() < 1
    assert abs(sample.mean() - 0.5) < 0.01


def test_half_precision_rounds_to_the_high_end_which_becomes_the_low_end() -> None:
    assert 0 == drawn("uniform_", 200_000, BFLOAT16).min()
    assert 100.0 == drawn("uniform_", 200_000, np.float16, 100.0, 101.0).min()
    assert 101.0 > drawn("uniform_", 200_000, np.float16, 100.0, 101.0).max()


def test_exponential_numbers_are_never_zero() -> None:
    for dtype in REALS:
        assert drawn("exponential_", 100_000, dtype).min() > 0


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_normal_numbers_share_their_deviation_between_two_parts(dtype: Any) -> None:
    sample = random.randn(20_000, dtype=dtype, generator=generator()).get()
    assert abs(sample.real.std() - math.sqrt(0.5)) < 0.02
    assert abs(sample.imag.std() - math.sqrt(0.5)) < 0.02
    assert abs(np.mean(sample.real * sample.imag)) < 0.02


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.float32, np.float16])
def test_whole_numbers_are_equally_likely(dtype: Any) -> None:
    found = random.randint(-2 if np.dtype(dtype).kind != "u" else 0, 7, (20_000,), dtype=dtype, generator=generator())
    values, counts = np.unique(found.get(), return_counts=True)
    assert list(values) == list(range(0 if np.dtype(dtype).kind == "u" else -2, 7))
    expected = 20_000 / len(values)
    assert np.sum((counts - expected) ** 2 / expected) < 30  # chi-square of at most 8 degrees: once in 5000


def test_whole_numbers_without_bounds_use_all_of_the_dtype() -> None:
    assert {0, 1} == set(drawn("random_", 100, np.bool))
    assert set(range(256)) == set(drawn("random_", 20_000, np.uint8))
    assert set(range(128)) == set(drawn("random_", 20_000, np.int8))
    assert drawn("random_", 20_000, np.int64).max() > 2**62.9
    assert 2**11 == drawn("random_", 60_000, np.float16).max()
    assert drawn("random_", 20_000, np.uint32).max() > 2**31.9
    everything = drawn("random_", 20_000, np.int64, -(2**63), None)
    assert everything.min() < -(2**62.9)
    assert everything.max() > 2**62.9


@pytest.mark.parametrize("dtype", [np.bool, np.int32, np.float64, BFLOAT16], ids=str)
def test_events_happen_as_often_as_they_should(dtype: Any) -> None:
    sample = drawn("bernoulli_", 20_000, dtype, 0.3)
    assert {0, 1} == set(sample)
    assert abs(sample.mean() - 0.3) < 0.015
    assert 1 == drawn("bernoulli_", 1000, dtype, 1.0).min()
    assert 0 == drawn("bernoulli_", 1000, dtype, 0.0).max()


def test_events_with_probabilities_of_their_own() -> None:
    p = cudatool.asarray(np.repeat(np.array([0, 0.25, 0.75, 1], np.float32), 5000))
    happened = random.bernoulli(p, generator=generator()).get().reshape(4, 5000).mean(1)
    assert (0, 1) == (happened[0], happened[3])
    np.testing.assert_allclose(happened[1:3], [0.25, 0.75], atol=0.025)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_probabilities_are_broadcast_and_cast(dtype: Any) -> None:
    p = cudatool.asarray(np.array([[0], [1]]).astype(dtype))
    array = random.bernoulli_(cudatool.empty((2, 50), np.int32), p)
    np.testing.assert_array_equal(np.repeat([[0], [1]], 50, axis=1), array.get())


def test_trials_until_one_succeeds() -> None:
    sample = drawn("geometric_", 20_000, np.int64, 0.2)
    assert 1 == sample.min()
    assert abs(sample.mean() - 5) < 0.15


# Permutations and categories.


@pytest.mark.parametrize("n", [0, 1, 2, 2047, 2048, 2049, 40_000])
def test_permutations_have_every_number_once(n: int) -> None:
    found = random.randperm(n, generator=generator()).get()
    np.testing.assert_array_equal(np.sort(found), np.arange(n))
    assert n < 3 or not np.array_equal(found, np.arange(n))


def test_all_permutations_are_equally_likely() -> None:
    source = generator()
    found = [tuple(random.randperm(3, generator=source).get()) for _ in range(600)]
    counts = [found.count(order) for order in itertools.permutations(range(3))]
    assert 600 == sum(counts)
    assert sum((count - 100) ** 2 / 100 for count in counts) < 20.5  # chi-square of 5 degrees: once in a thousand


def test_permutations_in_another_dtype_and_in_place() -> None:
    expected = random.randperm(50, generator=generator()).get()
    halves = random.randperm(50, dtype=np.float16, generator=generator())
    spread = cudatool.zeros((50, 2), np.int32)
    assert spread[:, 1].data_ptr() == random.randperm(50, out=spread[:, 1], generator=generator()).data_ptr()
    np.testing.assert_array_equal(expected, halves.get())
    np.testing.assert_array_equal(np.stack([np.zeros(50), expected], 1), spread.get())


def test_categories_come_as_often_as_they_weigh() -> None:
    weights = np.array([[1, 2, 0, 5], [0, 0, 3, 1]], np.float32)
    found = random.multinomial(cudatool.asarray(weights), 8000, True, generator=generator()).get()
    for row, share in zip(found, weights / weights.sum(1, keepdims=True), strict=True):
        np.testing.assert_allclose(np.bincount(row, minlength=4) / 8000, share, atol=0.02)


def test_categories_without_replacement_come_once_and_heavy_ones_first() -> None:
    weights = cudatool.asarray(np.tile(np.array([1, 1, 8], np.float64), (2000, 1)))
    found = random.multinomial(weights, 3, generator=generator()).get()
    np.testing.assert_array_equal(np.sort(found, 1), np.tile(np.arange(3), (2000, 1)))
    assert abs(np.mean(found[:, 0] == 2) - 0.8) < 0.03
    one = random.multinomial(weights, 1, generator=generator()).get()
    np.testing.assert_array_equal(found[:, :1], one)


# Dropout.


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("size", [4096, 4098, 4099])
def test_dropout_keeps_its_share_and_scales_it(dtype: Any, size: int) -> None:
    given = cudatool.asarray(np.linspace(1, 2, size).astype(dtype))
    out, mask = random.native_dropout(given, 0.25, generator=generator())
    kept = mask.get()
    assert abs(kept.mean() - 0.75) < 0.03
    scaled = (given.get().astype(np.float64) * kept / 0.75).astype(dtype)
    np.testing.assert_allclose(
        scaled.astype(np.float64), out.get().astype(np.float64), rtol=1e-2 if dtype.itemsize == 2 else 1e-6
    )


def test_the_gradient_of_dropout_goes_through_its_mask() -> None:
    given = cudatool.ones((30, 7))
    out, mask = random.native_dropout(given, 0.5, generator=generator())
    np.testing.assert_array_equal(out.get(), random.native_dropout_backward(given, mask, 2.0).get())


def test_dropout_at_its_limits() -> None:
    given = cudatool.asarray(np.arange(6, dtype=np.float32))
    before = random.get_rng_state()
    assert given is random.dropout(given, 0.0)
    assert given is random.dropout(given, 0.5, training=False)
    np.testing.assert_array_equal(np.zeros(6), random.dropout(given, 1.0).get())
    out, mask = random.native_dropout(given, 0.5, train=False)
    np.testing.assert_array_equal(given.get(), out.get())
    assert mask.get().all()
    np.testing.assert_array_equal(before, random.get_rng_state())


def test_dropout_of_a_transposed_array_lies_as_it_does() -> None:
    given = cudatool.ones((40, 8)).T
    out, mask = random.native_dropout(given, 0.5, generator=generator())
    assert (given.strides, (1, 8)) == (out.strides, mask.strides)
    expected, _ = random.native_dropout(cudatool.ones((40, 8)), 0.5, generator=generator())
    np.testing.assert_array_equal(expected.get().T, out.get())


# Shapes, dtypes, places.


def test_shapes_are_numbers_or_one_tuple() -> None:
    assert (2, 3) == random.rand(2, 3).shape == random.rand((2, 3)).shape == random.randn([2, 3]).shape
    assert () == random.rand().shape == random.rand(()).shape
    assert (0,) == random.rand(0).shape
    assert (5,) == random.randint(3, (5,)).shape == random.randint(0, 3, (5,)).shape == random.randint(3, size=5).shape
    assert np.int64 == random.randint(3, (5,)).dtype == random.randperm(3).dtype
    assert np.float32 == random.rand(1).dtype == random.normal(0, 1, (2,)).dtype


def test_like_functions_keep_shape_dtype_and_order() -> None:
    like = cudatool.empty((3, 5), np.float16).T
    for made in (random.rand_like(like), random.randn_like(like), random.randint_like(like, 9)):
        assert (like.shape, like.strides, like.dtype) == (made.shape, made.strides, made.dtype)
    assert np.float64 == random.rand_like(like, dtype=np.float64).dtype
    np.testing.assert_array_equal(
        random.rand(3, 5, dtype=np.float16, generator=generator()).get().T,
        random.rand_like(like, generator=generator()).get(),
    )


def test_arrays_have_the_functions_as_methods() -> None:
    array = cudatool.empty(64)
    for name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_"):
        assert array is getattr(array, name)(generator=generator())
        expected = getattr(random, name)(cudatool.empty(64), generator=generator())
        np.testing.assert_array_equal(expected.get(), array.get())
    array.fill_(1)
    assert (64,) == array.bernoulli().shape
    assert (5,) == array.multinomial(5).shape
    assert array is array.geometric_(0.5)


def test_out_is_filled_and_returned() -> None:
    out = cudatool.zeros((4, 4))
    assert out is random.rand(4, 4, out=out, generator=generator())
    np.testing.assert_array_equal(random.rand(4, 4, generator=generator()).get(), out.get())
    assert out is random.normal(2, 3, (4, 4), out=out)
    assert out is random.bernoulli(cudatool.zeros((4, 4)), out=out)


def test_arrays_with_gaps_are_filled_and_nothing_between() -> None:
    array = cudatool.zeros((10, 10))
    random.uniform_(array[::2, 1::3], 1, 2)
    filled = np.zeros((10, 10), bool)
    filled[::2, 1::3] = True
    np.testing.assert_array_equal(filled, array.get() != 0)


def test_normal_numbers_with_means_and_deviations_of_their_own() -> None:
    mean = cudatool.asarray(np.array([[-5], [5]], np.float32))
    std = cudatool.asarray(np.full(5000, 0.5, np.float32))
    both = random.normal(mean, std, generator=generator()).get()
    np.testing.assert_allclose([-5, 5], both.mean(1), atol=0.05)
    np.testing.assert_allclose([0.5, 0.5], both.std(1), atol=0.03)
    assert (2, 1) == random.normal(mean, 2.0).shape
    assert (5000,) == random.normal(1.0, std).shape


# Generators.


def test_the_same_seed_gives_the_same_numbers_again() -> None:
    random.manual_seed(7)
    first, second = random.rand(100).get(), random.rand(100).get()
    assert not np.array_equal(first, second)
    random.manual_seed(7)
    np.testing.assert_array_equal(first, random.rand(100).get())
    np.testing.assert_array_equal(second, random.rand(100).get())


def test_a_generator_of_its_own_leaves_the_default_one_alone() -> None:
    before = random.get_rng_state()
    random.randn(100, generator=generator())
    np.testing.assert_array_equal(before, random.get_rng_state())


def test_a_state_brings_the_numbers_back() -> None:
    source = generator(99)
    random.rand(10, generator=source)
    state = source.get_state()
    expected = random.randn(10, generator=source).get()
    other = random.Generator()
    other.set_state(state)
    np.testing.assert_array_equal(expected, random.randn(10, generator=other).get())
    other.set_state(state[:8])
    assert (99, 0) == (other.initial_seed(), other.get_offset())


def test_the_state_is_seed_and_offset_in_sixteen_bytes() -> None:
    state = generator(2**64 - 3, 2**40).get_state()
    assert (np.uint8, (16,)) == (state.dtype, state.shape)
    assert [2**64 - 3, 2**40] == state.view("<u8").tolist()


def test_a_clone_goes_on_by_itself_and_a_shared_state_together() -> None:
    source = generator()
    clone, shared = source.clone_state(), source.graphsafe_get_state()
    random.rand(5, generator=source)
    assert (0, 4, 4) == (clone.get_offset(), shared.get_offset(), source.get_offset())
    source.graphsafe_set_state(clone)
    assert (0, 4) == (source.get_offset(), shared.get_offset())


def test_negative_seeds_count_from_the_end_of_64_bits() -> None:
    assert 2**64 - 1 == generator(-1).initial_seed()
    assert 2**63 == generator(-(2**63)).initial_seed()


def test_new_generators_begin_with_the_same_seed_and_processes_with_different_ones() -> None:
    assert random.Generator().initial_seed() == random.Generator().initial_seed() == 67280421310721
    program = "from cudatool import random; print(random.initial_seed())"
    seeds = {subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout for _ in range(2)}
    assert 2 == len(seeds)


def test_seeds_can_be_set_before_there_is_a_device() -> None:
    program = (
        "import cudatool; from cudatool import random\n"
        "random.manual_seed_all(5); random.manual_seed(6)\n"
        "assert not cudatool.is_initialized()\n"
        "print([g.initial_seed() for g in random.default_generators])"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    first, *rest = eval(done.stdout)
    assert (6, {5} if rest else set()) == (first, set(rest))


def test_seed_sets_an_unpredictable_seed() -> None:
    random.manual_seed(3)
    random.seed()
    assert 3 != random.initial_seed()
    seeds = []
    for _ in range(2):
        random.seed_all()
        seeds.append(random.initial_seed())
    assert seeds[0] != seeds[1]
    source = random.Generator()
    assert source.seed() == source.initial_seed() != random.Generator().initial_seed()


def test_fork_rng_restores_what_was_drawn_inside() -> None:
    before = random.get_rng_state_all()
    with pytest.raises(KeyError), random.fork_rng():
        random.manual_seed_all(1)
        random.rand(10)
        raise KeyError
    np.testing.assert_array_equal(before, random.get_rng_state_all())
    with random.fork_rng(devices=[0]):
        random.rand(10)
    np.testing.assert_array_equal(before, random.get_rng_state_all())
    with random.fork_rng(enabled=False):
        random.rand(10)
    assert not np.array_equal(before, random.get_rng_state_all())


def test_all_states_can_be_set_at_once() -> None:
    states = random.get_rng_state_all()
    assert len(states) == cudatool.device_count() == len(random.default_generators)
    random.seed_all()
    random.set_rng_state_all(states)
    np.testing.assert_array_equal(states, random.get_rng_state_all())


def test_threads_never_draw_the_same_numbers() -> None:
    source = generator()
    found: list[npt.NDArray[Any]] = []

    def work() -> None:
        arrays = [random.rand(50, dtype=np.float64, generator=source) for _ in range(20)]
        found.extend(array.get() for array in arrays)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 80 * 50 == len(np.unique(np.concatenate(found)))


def test_streams_do_not_change_the_numbers() -> None:
    expected = random.rand(1000, generator=generator()).get()
    with cudatool.Stream():
        np.testing.assert_array_equal(expected, random.rand(1000, generator=generator()).get())


def test_the_order_of_execution_does_not_change_the_numbers(device: str) -> None:
    if device != "sim":
        pytest.skip("chooses among the schedules of the software device")
    program = """
import cudatool
from cudatool import random
random.manual_seed(8)
found = []
for stream in [cudatool.Stream() for _ in range(3)]:
    with stream:
        found += [random.rand(500), random.randperm(100), random.dropout(cudatool.ones(64))]
graph = cudatool.CUDAGraph()
with cudatool.graph(graph):
    found.append(random.randn(100))
copies = [cudatool.empty(100) for _ in range(4)]
for copy in copies:
    with cudatool.Stream():
        graph.replay()
        copy.copy_(found[-1])
cudatool.synchronize()
found += copies
print([array.get().tobytes() for array in found])
"""
    outputs = {
        run_python(program, environment={"CUDATOOL_DEVICE": f"sim:schedule={one}"}).stdout
        for one in ("fifo", "lifo", "random")
    }
    assert 1 == len(outputs) and outputs != {""}


# Errors.


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("multiple of 4", lambda: generator(0, 2)),
        ("multiple of 4", lambda: generator(0, -4)),
        ("a seed is in", lambda: generator(2**64)),
        ("a seed is in", lambda: generator(-(2**63) - 1)),
        ("a seed is in", lambda: random.manual_seed_all(2**64)),
        ("16 bytes", lambda: random.set_rng_state(np.zeros(15, np.uint8))),
        ("16 bytes", lambda: random.set_rng_state(np.zeros(16, np.float32))),
        ("expected a Generator", lambda: generator().graphsafe_set_state(5)),
        ("takes a cudatool.Generator", lambda: random.rand(3, generator=np.random.default_rng())),
        ("low <= high", lambda: random.uniform_(cudatool.empty(3), 2, 1)),
        ("low <= high", lambda: random.uniform_(cudatool.empty(3), -3e38, 3e38)),
        ("low <= high", lambda: random.uniform_(cudatool.empty(3, np.float16), 0, 1e5)),
        ("not int32", lambda: random.rand(3, dtype=np.int32)),
        ("std >= 0", lambda: random.normal(0, -1, (3,))),
        ("lambd > 0", lambda: random.exponential_(cudatool.empty(3), 0)),
        ("std > 0", lambda: random.log_normal_(cudatool.empty(3), 0, 0)),
        ("sigma > 0", lambda: random.cauchy_(cudatool.empty(3), 0, 0)),
        (r"p to be in \(0, 1\)", lambda: random.geometric_(cudatool.empty(3), 1.0)),
        (r"p to be in \[0, 1\]", lambda: random.bernoulli_(cudatool.empty(3), 1.5)),
        ("not int32", lambda: random.bernoulli_(cudatool.empty(3), cudatool.zeros(3, np.int32))),
        (r"p to be in \[0, 1\]", lambda: random.dropout(cudatool.empty(3), -0.1)),
        ("not int64", lambda: random.dropout(cudatool.zeros(3, np.int64))),
        ("mask is bool", lambda: random.native_dropout_backward(cudatool.ones(3), cudatool.ones(3), 2.0)),
        ("low < high", lambda: random.randint(5, 5, (2,))),
        ("cannot hold", lambda: random.randint(300, (2,), dtype=np.uint8)),
        ("cannot hold", lambda: random.randint(-1, 5, (2,), dtype=np.uint32)),
        ("cannot hold", lambda: random.randint(70_000, (2,), dtype=np.float16)),
        ("takes .high, size.", lambda: random.randint(5)),
        ("not complex64", lambda: random.randint(5, (2,), dtype=np.complex64)),
        ("n from 0", lambda: random.randperm(-1)),
        ("cannot hold", lambda: random.randperm(300, dtype=np.uint8)),
        ("cannot hold", lambda: random.randperm(2050, dtype=np.float16)),
        ("cannot hold", lambda: random.randperm(2, dtype=np.bool)),
        ("out has shape", lambda: random.rand(3, out=cudatool.empty(4))),
        ("out has shape", lambda: random.rand(3, out=cudatool.empty(3), dtype=np.float64)),
        ("num_samples", lambda: random.multinomial(cudatool.ones(3), 0)),
        ("num_samples", lambda: random.multinomial(cudatool.ones(3), 4)),
        ("not shape", lambda: random.multinomial(cudatool.ones((2, 2, 2)), 1)),
        ("takes the size", lambda: random.normal(0.0, 1.0)),
        ("size from the arrays", lambda: random.normal(cudatool.ones(3), 1.0, (3,))),
    ],
)
def test_wrong_arguments_are_refused(message: str, call: Any) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_every_draw_is_one_call_in_traces(calls: list[Any]) -> None:
    random.rand(3)
    random.dropout(cudatool.ones(3))
    names = [event.name for event in calls if not event.aux1]
    assert ["cudatool.random.rand", "cudatool.ones", "cudatool.random.dropout"] == names
