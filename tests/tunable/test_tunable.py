"""Products by the fastest candidate."""

from __future__ import annotations

import os

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool import blas, tunable
from cudatool.blas import _gemm
from cudatool.errors import ConfigError, FileFormatError, UsageError
from cudatool.graphs import CUDAGraph, graph
from cudatool.trace.events import Kind
from cudatool.tunable import _candidates, _context, _triton, _tune
from cudatool.tunable._problem import example, problem_of
from cudatool.tunable._results import Result

KERNEL = "Kernel_16x16"


@pytest.fixture(autouse=True)
def tuning(monkeypatch, tmp_path):
    """Nothing is set, files are in a directory of the test's own, and of Triton's kernels only the smallest is tried.

    Triton compiles each for seconds; test_tunable_triton.py computes products by all of them.
    """
    monkeypatch.setattr(_triton, "TILES", dict([*_triton.TILES.items()][:1]))
    for name in list(os.environ):
        if "_TUNABLEOP_" in name:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    _context.reset()
    yield
    tunable.write_file_on_exit(False)
    _context.reset()


def quick():
    """Tuning that is short."""
    tunable.enable()
    tunable.set_max_tuning_iterations(2)
    tunable.set_rotating_buffer_size(0)


def arrays():
    """Return two matrices on the host, and the same on the device."""
    rng = np.random.default_rng(2)
    hosts = rng.normal(size=(20, 24)).astype("f4"), rng.normal(size=(24, 36)).astype("f4")
    return *hosts, *(cudatool.asarray(host) for host in hosts)


def kinds(events):
    return [event.kind for event in events if event.kind in (Kind.GEMM, Kind.KERNEL_LAUNCH)]


def test_a_product_is_tuned_when_it_is_first_called():
    a, b, x, y = arrays()
    quick()
    np.testing.assert_allclose(blas.mm(x, y).get(), a @ b, rtol=1e-4, atol=1e-5)
    ((operator, parameters, solution, milliseconds),) = tunable.get_results()
    assert ("GemmTunableOp_float_NN", "nn_36_20_24_ld_36_24_36") == (operator, parameters)
    assert solution in ("Default", KERNEL) or solution.startswith(("Cublaslt_", "Triton_"))
    assert milliseconds > 0
    np.testing.assert_allclose(blas.mm(x, y).get(), a @ b, rtol=1e-4, atol=1e-5)
    assert 1 == len(tunable.get_results())


def test_nothing_is_tuned_unless_it_is_enabled():
    _, _, x, y = arrays()
    blas.mm(x, y)
    quick()
    tunable.tuning_enable(False)
    blas.mm(x, y)
    assert (True, False) == (tunable.is_enabled(), tunable.tuning_is_enabled())
    assert () == tunable.get_results()
    tunable.enable(False)
    assert _gemm.tuner is None


def test_the_names_tell_operations_batch_and_leading_dimensions():
    quick()
    tunable.tuning_enable(False)
    seen = []
    _gemm.tuner = lambda gemm, stream: seen.append(problem_of(gemm))
    a, b = cudatool.zeros((3, 20, 30), "f8")[:, :, :24], cudatool.zeros((3, 36, 24), "f8")
    blas.bmm(a, b.transpose(0, 2, 1))
    blas.mm(blas.conj(cudatool.zeros((4, 4), "c8")).T, cudatool.zeros((4, 4), "c8"))
    blas.linear(a, b[0], b[0, :, 0])
    _gemm.tuner = None
    assert [
        ("GemmStridedBatchedTunableOp_double_TN", "tn_36_20_24_B_3_ld_24_30_36"),
        ("GemmTunableOp_ComplexFloat_NC", "nc_4_4_4_ld_4_4_4"),
        None,
    ] == seen


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("beta", [0, 0.5])
def test_our_own_kernel_computes_products(dtype, transposed, beta):
    rng = np.random.default_rng(7)
    shapes = ((2, 30, 20), (2, 25, 30)) if transposed else ((2, 20, 30), (2, 30, 25))
    a, b = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    c = rng.normal(size=(2, 20, 25)).astype(dtype)
    x, y = cudatool.asarray(a), cudatool.asarray(b)
    if transposed:
        a, b, x, y = a.swapaxes(1, 2), b.swapaxes(1, 2), x.transpose(0, 2, 1), y.transpose(0, 2, 1)
    used = []

    def by_kernel(gemm, stream):
        used.append(gemm)
        _candidates.candidate(KERNEL, gemm)(gemm, stream)
        return True

    _gemm.tuner = by_kernel
    found = blas.baddbmm(cudatool.asarray(c), x, y, beta=beta, alpha=2)
    assert 1 == len(used)
    np.testing.assert_allclose(found.get(), beta * c + 2 * (a @ b), rtol=1e-4, atol=1e-4)


def test_the_kernel_tells_of_itself_alone(events):
    _, _, x, y = arrays()
    quick()
    blas.mm(x, y)
    (problem,) = _context._state.results
    _context._state.results[problem] = Result(KERNEL, 1)
    cudatool.synchronize()
    events.clear()
    blas.mm(x, y)
    assert [Kind.KERNEL_LAUNCH] == kinds(events)
    _context._state.results[problem] = Result("Default", 1)
    events.clear()
    blas.mm(x, y)
    assert [Kind.GEMM] == kinds(events)


def test_what_a_file_says_of_another_kind_of_product_is_the_default():
    a, b = (host.astype("f2") for host in arrays()[:2])
    x, y = cudatool.asarray(a), cudatool.asarray(b)
    quick()
    blas.mm(x, y)
    (problem,) = _context._state.results
    for name in (KERNEL, "Cublaslt_none", "Triton_3"):
        _context._state.results[problem] = Result(name, 1)
        np.testing.assert_allclose(
            blas.mm(x, y).get().astype("f8"), a.astype("f8") @ b.astype("f8"), rtol=0.01, atol=0.01
        )


def fakes(monkeypatch, **milliseconds):
    """Candidates that compute what the default does, and take so long; `wrong` computes something else."""

    def enqueue(name, gemm, stream):
        _candidates._default(gemm, stream)
        if name == "wrong":
            gemm.out.fill_(3)

    def listed(gemm, stream):
        for name in milliseconds:
            yield name, lambda gemm, stream, name=name: calls.append(name) or enqueue(name, gemm, stream)

    calls = []
    monkeypatch.setattr(_tune, "candidates", listed)

    def measured(enqueue, turns, stream, count):
        before = len(calls)
        for index in range(count):
            enqueue(turns[index % len(turns)], stream)
        return milliseconds[calls[before]]

    monkeypatch.setattr(_tune, "_milliseconds", measured)
    return calls


def test_the_fastest_candidate_is_found(monkeypatch):
    _, _, x, y = arrays()
    calls = fakes(monkeypatch, Default=2, slow=3, fast=1, slower=2.5)
    quick()
    blas.mm(x, y)
    assert ("fast", 1) == tunable.get_results()[0][2:]
    # Each is checked, tried once, and timed with two; but the hopeless one is only tried.
    assert {"Default": 4, "slow": 4, "fast": 4, "slower": 2} == {name: calls.count(name) for name in calls}


def test_a_candidate_with_another_result_is_none(monkeypatch):
    a, b, x, y = arrays()
    fakes(monkeypatch, Default=2, wrong=1)
    quick()
    np.testing.assert_allclose(blas.mm(x, y).get(), a @ b, rtol=1e-4, atol=1e-5)
    assert "Default" == tunable.get_results()[0][2]


@pytest.mark.parametrize(
    ("tolerances", "expected"), [((True, 100, 0), "wrong"), ((True,), "Default"), ((False,), "wrong")]
)
def test_a_program_may_say_what_is_close(monkeypatch, tolerances, expected):
    _, _, x, y = arrays()
    fakes(monkeypatch, Default=2, wrong=1)
    quick()
    tunable.set_numerical_check_tolerances(*tolerances)
    blas.mm(x, y)
    assert expected == tunable.get_results()[0][2]


@pytest.mark.parametrize(
    ("iterations", "duration", "expected"), [(5, 100, 5), (100, 20, 10), (0, 20, 10), (7, 0, 7), (100, 1, 1)]
)
def test_the_smaller_limit_counts(monkeypatch, iterations, duration, expected):
    _, _, x, y = arrays()
    calls = fakes(monkeypatch, Default=2)
    quick()
    tunable.set_max_tuning_iterations(iterations)
    tunable.set_max_tuning_duration(duration)
    blas.mm(x, y)
    assert 2 + expected == len(calls)


def test_operands_take_turns_while_they_are_timed():
    _, _, x, y = arrays()
    seen = []
    _gemm.tuner = lambda gemm, stream: seen.append(gemm)
    blas.mm(x, y)
    turns = _tune._turns(seen[0], cudatool.current_stream(), 1)
    size = sum(array.nbytes for array in (seen[0].a, seen[0].b, seen[0].out))
    assert min(-(-(1 << 20) // size), 64) == len(turns)
    assert len(turns) == len({gemm.a.data_ptr() for gemm in turns})
    assert 1 == len(_tune._turns(seen[0], cudatool.current_stream(), 0))


def test_tuning_does_not_write_the_result_twice():
    """What is added to is read by every candidate, but changed once."""
    quick()
    c = cudatool.ones((8, 8))
    blas.addmm(c, cudatool.ones((8, 4)), cudatool.ones((4, 8)), out=c)
    assert {5.0} == set(c.get().ravel().tolist())
    assert 1 == len(tunable.get_results())


def test_what_is_captured_is_not_tuned():
    a, b, x, y = arrays()
    quick()
    captured = CUDAGraph()
    with graph(captured):
        found = blas.mm(x, y)
    assert () == tunable.get_results()
    captured.replay()
    np.testing.assert_allclose(found.get(), a @ b, rtol=1e-4, atol=1e-5)


# Files.


def test_results_are_written_and_read_again(tmp_path):
    _, _, x, y = arrays()
    quick()
    blas.mm(x, y)
    before = tunable.get_results()
    assert "tunableop_results0.csv" == tunable.get_filename()
    assert tunable.write_file()
    lines = (tmp_path / "tunableop_results0.csv").read_text().splitlines()
    validators = dict(tunable.get_validators())
    assert [f"Validator,{name},{value}" for name, value in validators.items()] == lines[: len(validators)]
    assert {"CUDATOOL_VERSION", "DRIVER_VERSION", "DEVICE"} < validators.keys()
    assert lines[-1].startswith("GemmTunableOp_float_NN,nn_36_20_24_ld_36_24_36,")
    _context.reset()
    assert tunable.read_file()
    assert [before[0][:3]] == [found[:3] for found in tunable.get_results()]
    assert before[0][3] == pytest.approx(tunable.get_results()[0][3], rel=1e-5)


def test_a_file_is_read_before_anything_is_tuned(tmp_path):
    _, _, x, y = arrays()
    header = "".join(f"Validator,{name},{value}\n" for name, value in tunable.get_validators())
    tunable.set_filename("mine.csv")
    (tmp_path / "mine.csv").write_text(header + "GemmTunableOp_float_NN,nn_36_20_24_ld_36_24_36,Default,0.5\n")
    quick()
    tunable.tuning_enable(False)
    blas.mm(x, y)
    assert (("GemmTunableOp_float_NN", "nn_36_20_24_ld_36_24_36", "Default", 0.5),) == tunable.get_results()


@pytest.mark.parametrize("change", ["other", "missing", "unknown"])
def test_results_of_another_driver_or_device_are_rejected(tmp_path, change):
    stated = dict(tunable.get_validators())
    if change == "other":
        stated["DRIVER_VERSION"] = "1"
    elif change == "missing":
        del stated["DRIVER_VERSION"]
    else:
        stated["DRIVER_VERSION "] = "2"
    rows = [f"Validator,{name},{value}\n" for name, value in stated.items()]
    (tmp_path / "old.csv").write_text("".join(rows) + "GemmTunableOp_float_NN,nn_1_1_1_ld_1_1_1,Default,1\n")
    with pytest.warns(UserWarning, match="not used, because DRIVER_VERSION"):
        assert not tunable.read_file("old.csv")
    assert () == tunable.get_results()


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "bad.csv").write_text("Validator,DEVICE\n")
    with pytest.raises(FileFormatError, match="line 1"):
        tunable.read_file("bad.csv")
    with pytest.raises(FileNotFoundError):
        tunable.read_file("none.csv")
    assert not tunable.write_file()


def test_products_are_recorded_and_tuned_later(tmp_path):
    _, _, x, y = arrays()
    quick()
    tunable.tuning_enable(False)
    tunable.record_untuned_enable()
    assert tunable.record_untuned_is_enabled()
    for _ in range(2):
        blas.mm(x, y)
        blas.mm(x.T[:, 2:], x[2:])
    path = tmp_path / "tunableop_untuned0.csv"
    assert [
        "GemmTunableOp_float_NN,nn_36_20_24_ld_36_24_36",
    ] == path.read_text().splitlines()[:1]
    assert 2 == len(path.read_text().splitlines())
    with pytest.raises(UsageError, match="tuning_enable"):
        tunable.tune_gemm_in_file(str(path))
    tunable.tuning_enable()
    tunable.tune_gemm_in_file(str(path))
    assert path.read_text().splitlines() == [f"{found[0]},{found[1]}" for found in tunable.get_results()]


@pytest.mark.parametrize(
    "line",
    [
        "GemmTunableOp_float_NT,nt_8_6_4_ld_8_7_9",
        "GemmTunableOp_ComplexDouble_CN,cn_8_6_4_ld_4_4_8",
        "GemmStridedBatchedTunableOp_BFloat16_TT,tt_8_6_4_B_3_ld_4_6_8",
    ],
)
def test_a_name_says_enough_to_make_such_a_product(line):
    problem = _context.Problem(*line.split(","))
    assert problem == problem_of(example(problem, cudatool.current_stream(), "test"))


@pytest.mark.parametrize(
    "line", ["GemmTunableOp_quad_NN,nn_1_1_1_ld_1_1_1", "GemmTunableOp_float_NN,nn_1_1_ld_1", "one"]
)
def test_a_file_of_what_is_no_product_is_refused(tmp_path, line):
    quick()
    (tmp_path / "untuned.csv").write_text(f"{line}\n")
    with pytest.raises(FileFormatError, match="product"):
        tunable.tune_gemm_in_file("untuned.csv")


# Settings.


def test_the_environment_counts_more_than_the_program(monkeypatch):
    monkeypatch.setenv("PYTORCH_TUNABLEOP_MAX_TUNING_ITERATIONS", "7")
    monkeypatch.setenv("CUDATOOL_TUNABLEOP_MAX_TUNING_DURATION_MS", "8")
    monkeypatch.setenv("PYTORCH_TUNABLEOP_MAX_TUNING_DURATION_MS", "9")
    monkeypatch.setenv("CUDATOOL_TUNABLEOP_FILENAME", "other.csv")
    tunable.set_max_tuning_iterations(1)
    tunable.set_max_tuning_duration(1)
    tunable.set_filename("mine.csv")
    assert (7, 8) == (tunable.get_max_tuning_iterations(), tunable.get_max_tuning_duration())
    assert "other0.csv" == tunable.get_filename()


def test_a_setting_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("CUDATOOL_TUNABLEOP_ENABLED", "yes")
    with pytest.raises(ConfigError, match="CUDATOOL_TUNABLEOP_ENABLED must be a whole number, not 'yes'"):
        tunable.is_enabled()
    with pytest.raises(UsageError, match="0 or more"):
        tunable.set_max_tuning_duration(-1)


def test_defaults_are_pytorchs():
    assert (False, True, False) == (
        tunable.is_enabled(),
        tunable.tuning_is_enabled(),
        tunable.record_untuned_is_enabled(),
    )
    assert (30, 100, -1) == (
        tunable.get_max_tuning_duration(),
        tunable.get_max_tuning_iterations(),
        tunable.get_rotating_buffer_size(),
    )


def test_a_program_is_tuned_by_the_environment_alone(tmp_path):
    program = """
import cudatool
from cudatool import blas
from cudatool.tunable import _triton
_triton.TILES.clear()
a = cudatool.ones((4, 4))
for _ in range(2):
    b = blas.mm(a, a)
"""
    environment = {
        **os.environ,
        "PYTORCH_TUNABLEOP_ENABLED": "1",
        "PYTORCH_TUNABLEOP_MAX_TUNING_ITERATIONS": "1",
        "PYTORCH_TUNABLEOP_FILENAME": str(tmp_path / "found.csv"),
    }
    done = run_python(program, environment=environment)
    assert done.returncode == 0, done.stderr
    assert (
        (tmp_path / "found0.csv").read_text().splitlines()[-1].startswith("GemmTunableOp_float_NN,nn_4_4_4_ld_4_4_4,")
    )
