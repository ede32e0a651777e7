"""What PyTorch's own tests ask of products, sums and sensors, asked of ours. docs/torch-tests.md has the table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool import ops
from cudatool.errors import CudaError, DeviceUnavailableError, UsageError

matmul = cudatool.backends.cuda.matmul


@pytest.fixture(autouse=True)
def default_switches() -> Iterator[None]:
    from cudatool.backends._settings import Settings, settings

    before = {name: getattr(settings, name) for name in Settings.__slots__}
    yield
    for name, value in before.items():
        setattr(settings, name, value)


def output(program: str, **environment: str) -> str:
    done = run_python(program, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Switches of products.


def test_the_preferred_library_is_what_was_set() -> None:
    """Source: test_cuda.py::test_preferred_blas_library_settings"""
    prefer = cudatool.backends.cuda.preferred_blas_library
    assert "default" == prefer()
    for name in ("cublaslt", "cublas", "default"):
        assert name == prefer(name) == prefer()
    for wrong in ("unknown", 1.0):
        with pytest.raises(UsageError, match="the libraries are default, cublas, cublaslt"):
            prefer(wrong)  # type: ignore[arg-type]
    assert "default" == prefer()


@pytest.mark.parametrize(
    "name", ["allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"]
)
def test_a_switch_is_what_was_set(name: str) -> None:
    """
    Source: test_cuda.py::test_cublas_allow_tf32_get_set
    Source: test_cuda.py::test_cublas_allow_fp16_reduced_precision_reduction_get_set
    Source: test_cuda.py::test_cublas_allow_bf16_reduced_precision_reduction_get_set
    """
    before = getattr(matmul, name)
    setattr(matmul, name, not before)
    assert before is not getattr(matmul, name)
    with pytest.raises(UsageError, match="a switch is True or False"):
        setattr(matmul, name, (True, False))
    assert before is not getattr(matmul, name)


def test_the_precision_of_float32_products_has_three_names_and_one_meaning() -> None:
    """There is one switch, so that the ways to set it never contradict each other, as PyTorch's can.

    Source: test_cuda.py::test_float32_matmul_precision_get_set
    Source: test_cuda.py::test_fp32_precision_with_float32_matmul_precision
    Source: test_cuda.py::test_invalid_status_for_legacy_api
    """
    found = []
    for precision in ("highest", "medium", "high"):
        cudatool.set_float32_matmul_precision(precision)
        found.append((cudatool.get_float32_matmul_precision(), matmul.allow_tf32, matmul.fp32_precision))
    assert [("highest", False, "ieee"), ("medium", True, "tf32"), ("high", True, "tf32")] == found
    matmul.fp32_precision = "ieee"
    assert ("highest", False) == (cudatool.get_float32_matmul_precision(), matmul.allow_tf32)
    with pytest.raises(UsageError, match="the precisions are highest, high, medium"):
        cudatool.set_float32_matmul_precision("none")


@pytest.mark.parametrize(
    ("config", "capability", "expected"),
    [
        (None, 8, 8320 << 10),
        (None, 9, 32 << 20),
        (":128:8:64:16:32:32", 9, 3 << 20),
        (":4096:8", 8, 32 << 20),
    ],
)
def test_workspaces_have_the_size_asked_for(config: str | None, capability: int, expected: int) -> None:
    """Source: test_cuda.py::test_cublas_workspace_explicit_allocation"""
    from cudatool.blas._workspace import workspace_size

    assert expected == workspace_size(config, capability)


def test_a_bad_size_of_workspaces_is_told_and_the_default_taken() -> None:
    """Source: test_cuda.py::test_cublas_workspace_explicit_allocation"""
    from cudatool.blas._workspace import workspace_size

    with pytest.warns(UserWarning, match="CUBLAS_WORKSPACE_CONFIG=-1 is not"):
        assert 32 << 20 == workspace_size("-1", 9)


def test_operands_must_be_on_one_device() -> None:
    """Source: test_cuda.py::test_matmul_device_mismatch"""
    there, here = cudatool.ones((10, 10)), np.ones((10, 10), np.float32)
    for a, b in ((there, here), (here, there)):
        with pytest.raises((UsageError, TypeError)):
            cudatool.blas.mm(a, b)  # type: ignore[arg-type]
    with pytest.raises((UsageError, TypeError)):
        cudatool.blas.addmm(here, there, there)  # type: ignore[arg-type]
    assert 30 == cudatool.blas.addmm(there, there, there, beta=20).get()[0, 0]


def test_captured_products_do_not_use_up_memory() -> None:
    """Source: test_cuda.py::test_repeat_graph_capture_cublas_workspace_memory"""
    a, b = cudatool.ones((64, 32)), cudatool.ones((32, 16))
    cudatool.blas.mm(a, b)
    reserved = []
    for _ in range(8):
        graph = cudatool.CUDAGraph()
        with cudatool.graph(graph):
            product = cudatool.blas.mm(a, b)
        graph.replay()
        assert (product.get() == 32).all()
        del graph, product
        cudatool.empty_cache()
        reserved.append(cudatool.memory_reserved())
    assert reserved[1] == reserved[-1]


# Sums, and the largest and the smallest.


def test_sums_of_float16_are_exact_where_the_result_is() -> None:
    """Source: test_cuda.py::test_sum_fp16"""
    assert 0 == ops.sum(cudatool.zeros(10, np.float16)).get()
    ones = cudatool.ones(65504, np.float16)
    assert (65504, np.float16) == (ops.sum(ones).get(), ops.sum(ones).dtype)
    assert 65536 == ops.sum(cudatool.ones(65536, np.float16), dtype=np.float32).get()
    sparse = np.random.default_rng(0).random((20, 121, 80)) < 0.0005
    array = cudatool.asarray(sparse, np.float16)
    assert sparse.sum() == ops.sum(array).get()
    np.testing.assert_array_equal(sparse.sum((0, 2)), ops.sum(array, (0, 2)).get())


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_means_of_float16_do_not_overflow(dtype: Any) -> None:
    """Source: test_cuda.py::test_mean_fp16"""
    assert 1 == ops.mean(cudatool.ones(65536, np.float16), dtype=dtype).get()


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, 1), (np.complex64, 1j), (np.complex128, 1j)])
def test_products_of_many_factors_begin_with_one(dtype: Any, value: complex) -> None:
    """Source: test_cuda.py::test_prod_large"""
    assert 1 == ops.prod(cudatool.full(24_000, value, dtype)).get()


def test_sums_of_columns_read_nothing_else() -> None:
    """Source: test_cuda.py::test_reduction_gpu_memory_accessing"""
    assert [512.0] * 8 == ops.sum(cudatool.ones((512, 8)), 0).get().tolist()


def test_the_largest_and_the_smallest_number_of_a_dtype_are_found() -> None:
    """Source: test_cuda.py::test_min_max_inits"""
    assert (0, 0) == tuple(part.get() for part in ops.max(cudatool.zeros(1, np.uint8), 0))
    assert (255, 0) == tuple(part.get() for part in ops.min(cudatool.full(1, 255, np.uint8), 0))


def test_norms_of_tiny_numbers_do_not_vanish() -> None:
    """Source: test_cuda.py::test_tiny_half_norm_, test_norm_type_conversion"""
    tiny = cudatool.asarray(np.arange(25) / 1e8, np.float16)
    assert ops.norm(tiny).get() > 0
    assert 65536 == ops.norm(cudatool.ones(65536, np.float16), 0, dtype=np.float32).get()


def test_an_index_out_of_bounds_is_an_error_of_the_device() -> None:
    """Source: test_cuda.py::test_index_out_of_bounds_exception_cuda"""
    program = """
import cudatool
x = cudatool.ops.arange(10)
for index in (1, 11):
    try: print(cudatool.ops.index_select(x, 0, cudatool.asarray([index])).get())
    except cudatool.CudaError as error: print(type(error).__name__)
"""
    assert ["[1]", "CudaError"] == output(program).splitlines()


@pytest.mark.usefixtures("second")
def test_parts_of_two_devices_do_not_make_one_array() -> None:
    """PyTorch joins them on the first one's device; ours says what to do.

    Source: test_cuda_multigpu.py::test_cat_autogpu
    """
    x, y = cudatool.ones((4, 4), device=1), cudatool.ones((4, 4))
    with pytest.raises(UsageError, match="device"):
        ops.cat([x, y])
    assert 1 == ops.cat([x, cudatool.asarray(y, device=1)]).device


# Low-level functions and sensors.


def test_error_codes_become_errors() -> None:
    """Source: test_cuda.py::test_check_error"""
    cudatool.check_error(0)
    with pytest.raises(CudaError, match="out of memory"):
        cudatool.check_error(2)


def test_cudart_pins_memory_where_it_lies() -> None:
    """Source: test_cuda.py::test_cudart_register"""
    array, cudart = np.ones(2000), cudatool.cudart()
    assert not cudatool.is_pinned(array)
    assert 0 == cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0)
    assert cudatool.is_pinned(array)
    assert 0 == cudart.cudaHostUnregister(array.ctypes.data)
    assert not cudatool.is_pinned(array)


def test_a_process_can_fork_after_it_has_asked_for_devices() -> None:
    """Source: test_cuda.py::test_is_pinned_no_context"""
    program = """
import os, cudatool
assert cudatool.is_available() and cudatool.device_count()
child = os.fork()
if not child:
    print(cudatool.ones(10).get()[0])
    raise SystemExit
assert not os.waitpid(child, 0)[1]
"""
    assert "1.0" == output(program)


def test_ranges_and_marks_are_there_without_a_profiler() -> None:
    """Source: test_cuda.py::test_nvtx"""
    nvtx = cudatool.nvtx
    assert (0, 1, 1, 0) == (nvtx.range_push("a"), nvtx.range_push("b"), nvtx.range_pop(), nvtx.range_pop())
    nvtx.mark("bar")
    nvtx.range_end(nvtx.range_start("range_start"))


@pytest.mark.parametrize(("sensor", "most"), [("temperature", 150), ("power_draw", 10**7), ("clock_rate", 10**5)])
def test_sensors_tell_of_a_gpu_and_refuse_of_the_software_device(device: str, sensor: str, most: int) -> None:
    """
    Source: test_cuda.py::test_nvml_get_handler, test_temperature, test_power_draw, test_clock_speed
    """
    if device == "cuda":
        assert 0 <= getattr(cudatool, sensor)() <= most
    else:
        with pytest.raises(UsageError, match="its time is virtual"):
            getattr(cudatool, sensor)()


def test_memory_of_the_device_in_use_includes_ours() -> None:
    """Source: test_cuda.py::test_device_memory_used"""
    array = cudatool.empty(256 << 20, np.uint8)
    assert cudatool.device_memory_used() >= cudatool.memory_reserved() >= array.nbytes
    del array
    cudatool.empty_cache()


def test_storage_without_a_driver_for_it_is_a_typed_error(device: str, tmp_path: Any) -> None:
    """Source: test_cuda.py::test_gds_fails_in_ci"""
    if device == "cuda":
        pytest.skip("the machine may have GPUDirect Storage")
    with pytest.raises(DeviceUnavailableError, match="GPUDirect Storage needs an NVIDIA GPU"):
        cudatool.gds.GdsFile(str(tmp_path / "file"), os.O_CREAT | os.O_RDWR)
