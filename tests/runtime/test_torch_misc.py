"""What PyTorch's own tests ask of pinned memory and of user kernels, asked of ours. docs/torch-tests.md has the table."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool.errors import CompileError, CudaError, UsageError

Delay = Callable[[], None]


# Pinned memory.


@pytest.fixture
def no_pinned_memory() -> Iterator[None]:
    cudatool.synchronize()
    gc.collect()
    cudatool.empty_host_cache()
    cudatool.reset_accumulated_host_memory_stats()
    cudatool.reset_peak_host_memory_stats()
    yield
    cudatool.empty_host_cache()


def test_statistics_of_pinned_memory_count_whole_blocks(no_pinned_memory: None) -> None:
    """Source: test_cuda.py::test_host_memory_stats"""
    kinds = ("active_requests", "allocations", "active_bytes", "allocated_bytes")
    levels = ("allocated", "current", "peak")

    def counted() -> list[int]:
        stats = cudatool.host_memory_stats()
        assert all(stats[f"{kind}.freed"] == 0 for kind in kinds)
        assert all(stats[f"{kind}.{level}"] == stats[f"{kind}.current"] for kind in kinds for level in levels)
        assert stats["host_alloc_time.count"] == stats["num_host_alloc"]
        assert (0, 0) == (stats["num_host_free"], stats["host_free_time.count"])
        return [stats[f"{kind}.current"] for kind in kinds]

    assert [0, 0, 0, 0] == counted()
    first = cudatool.empty_pinned(10 * 1024)
    assert [1, 1, 64 << 10, 64 << 10] == counted()
    second = cudatool.empty_pinned(20 * 1024)
    assert [2, 2, 192 << 10, 192 << 10] == counted()
    cudatool.empty_host_cache()  # both are in use
    assert [2, 2, 192 << 10, 192 << 10] == counted()
    del first, second


def test_pinning_keeps_the_values_of_any_layout() -> None:
    """Source: test_cuda.py::test_noncontiguous_pinned_memory"""
    values = np.arange(10).reshape(2, 5).T
    np.testing.assert_array_equal(values, cudatool.pin_memory(values))


def test_pinned_memory_is_used_again_but_not_while_a_copy_reads_it(delay: Delay) -> None:
    """Source: test_cuda.py::test_caching_pinned_memory"""
    pinned = cudatool.pin_memory(np.ones(1, np.float32))
    address = pinned.ctypes.data
    del pinned
    pinned = cudatool.pin_memory(np.ones(1, np.float32))
    assert address == pinned.ctypes.data
    array = cudatool.zeros(1)
    delay()
    array.copy_(pinned, non_blocking=True)
    del pinned
    other = cudatool.pin_memory(np.zeros(1, np.float32))
    assert address != other.ctypes.data
    assert [1] == array.get().tolist()


# Pinned memory and graphs.


def captured(program: Callable[[], object], **options: object) -> cudatool.CUDAGraph:
    graph = cudatool.CUDAGraph()
    work = cudatool.empty(1)
    with cudatool.graph(graph, **options):  # type: ignore[arg-type]
        work.fill_(1)  # a graph of nothing is warned of
        program()
    return graph


def pinned(value: float = 0) -> np.ndarray:
    return cudatool.pin_memory(np.full(8, value, np.float32))


def test_pinned_memory_that_is_kept_is_not_used_again_in_a_capture(no_pinned_memory: None) -> None:
    """Source: test_cuda.py::test_pin_memory_no_use"""
    kept: list[np.ndarray] = []
    captured(lambda: kept.extend((pinned(), pinned())))
    assert kept[0].ctypes.data != kept[1].ctypes.data


def test_pinned_memory_that_no_copy_used_is_used_again_in_a_capture(no_pinned_memory: None) -> None:
    """Source: test_cuda.py::test_pin_memory_no_use2"""
    addresses: list[int] = []
    captured(lambda: addresses.extend(pinned().ctypes.data for _ in range(2)))
    assert addresses[0] == addresses[1]


def test_pinned_memory_that_a_graph_copies_from_lives_with_the_graph(no_pinned_memory: None) -> None:
    """Source: test_cuda.py::test_pin_memory_use"""
    array = cudatool.zeros(8)
    addresses: list[int] = []

    def program() -> None:
        memory = pinned(3)
        array.copy_(memory, non_blocking=True)
        addresses.append(memory.ctypes.data)

    graph = captured(program)
    others = [pinned(value) for value in range(4)]
    assert addresses[0] not in [other.ctypes.data for other in others]
    graph.replay()
    assert [3.0] * 8 == array.get().tolist()
    del graph
    gc.collect()
    assert addresses[0] == pinned().ctypes.data


@pytest.mark.parametrize("use", [False, True])
@pytest.mark.parametrize("delete", [False, True])
def test_graphs_that_share_a_pool_use_pinned_memory_again_unless_one_copies_from_it(
    no_pinned_memory: None, use: bool, delete: bool
) -> None:
    """Source: test_cuda.py::test_two_graphs"""
    array, pool = cudatool.zeros(8), cudatool.graph_pool_handle()
    kept: list[np.ndarray] = []
    addresses: list[int] = []

    def program() -> None:
        memory = pinned()
        if use:
            array.copy_(memory, non_blocking=True)
        if not delete:
            kept.append(memory)
        addresses.append(memory.ctypes.data)

    graphs = [captured(program, pool=pool) for _ in range(2)]
    assert (delete and not use) == (addresses[0] == addresses[1])
    del graphs


@pytest.mark.parametrize(
    "copy",
    [
        lambda array: array.copy_(np.ones(8, np.float32), non_blocking=True),
        lambda array: array.get(np.empty(8, np.float32), blocking=False),
    ],
)
def test_ordinary_memory_is_not_copied_in_a_capture(copy: Callable[[cudatool.DeviceArray], object]) -> None:
    """Source: test_cuda.py::test_unpinned_memory_use, test_unpinned_memory_use_device_to_host"""
    array = cudatool.zeros(8)
    with pytest.raises(UsageError, match="cannot copy pageable host memory while the stream is captured"):
        captured(lambda: copy(array))
    assert [0.0] * 8 == array.get().tolist()


_THREADS = """
import threading, numpy as np, cudatool as ct
from cuda.bindings import driver
ct.init()
kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
found = []
def program():
    ct.current_device()  # from here on the thread has a context
    for size in (1 << 18, 1 << 20):
        array = ct.pin_memory(np.ones(size, np.float32))
        found.append(driver.cuPointerGetAttribute(kind, array.ctypes.data)[0].name)
threads = [threading.Thread(target=program) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found == ["CUDA_SUCCESS"] * 8)
"""


def test_threads_can_register_pinned_memory_at_the_same_time() -> None:
    """Source: test_cuda.py::test_pinned_memory_with_cudaregister_multithread"""
    conf = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    done = run_python(_THREADS, environment={"CUDATOOL_ALLOC_CONF": conf})
    assert "True" == done.stdout.strip(), done.stderr


# Kernels.


_ADD = """
template <typename T>
__global__ void add_arrays(const T *a, const T *b, T *sum, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}
"""


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_template_is_compiled_for_each_type(dtype: type) -> None:
    """
    Source: test_cuda.py::test_compile_kernel
    Source: test_cuda.py::test_compile_kernel_template
    """
    kernel = cudatool.compile(_ADD, f"add_arrays<{ {np.float32: 'float', np.int32: 'int'}[dtype] }>")
    a, b = np.arange(1000, dtype=dtype), np.arange(1000, dtype=dtype)[::-1] * 3
    total = cudatool.empty(1000, dtype)
    kernel[4, 256](cudatool.asarray(a), cudatool.asarray(b), total, 1000)
    np.testing.assert_array_equal(a + b, total.get())


def test_a_kernel_may_call_functions_and_use_macros() -> None:
    """Source: test_cuda.py::test_compile_kernel"""
    source = """
    #define FACTOR 2.0f
    __device__ float scaled(float value) { return value * FACTOR; }
    __global__ void scale(const float *source, float *target, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) target[i] = scaled(source[i]);
    }
    """
    target = cudatool.empty(100)
    cudatool.compile(source, "scale")[1, 128](cudatool.full(100, 1.5), target, 100)
    assert (target.get() == 3).all()


def test_a_kernel_that_does_not_compile_says_why() -> None:
    """Source: test_cuda.py::test_compile_kernel"""
    with pytest.raises(CompileError, match='identifier "no_such_name" is undefined'):
        cudatool.compile("__global__ void broken(float *a) { *a = no_such_name; }", "broken")


_SUM_OF_BLOCK = """
__global__ void sum_of_block(const float *values, float *sums, int n) {
    extern __shared__ float part[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = i < n ? values[i] : 0.0f;
    __syncthreads();
    for (int step = blockDim.x / 2; step; step /= 2) {
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}
"""


def test_a_kernel_may_have_much_shared_memory_but_not_too_much() -> None:
    """Source: test_cuda.py::test_compile_kernel_large_shared_memory"""
    from cuda.core import LaunchConfig

    kernel = cudatool.compile(_SUM_OF_BLOCK, "sum_of_block")
    sums = cudatool.zeros(4)
    config = LaunchConfig(grid=4, block=256, shmem_size=64 << 10)
    kernel.set_shared_memory_config(64 << 10)
    kernel[config](cudatool.ones(1024), sums, 1024)
    assert [256, 256, 256, 256] == sums.get().tolist()
    too_much = 2 * cudatool.get_device_properties().shared_memory_per_block_optin
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel.set_shared_memory_config(too_much)


def test_a_kernel_in_two_dimensions_for_the_devices_own_architecture() -> None:
    """Source: test_cuda.py::test_compile_kernel_advanced"""
    source = """
    __global__ void product(const float *a, const float *b, float *c, int m, int n, int k) {
        int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
        if (row >= m || column >= n) return;
        float sum = 0;
        for (int i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + column];
        c[row * n + column] = sum;
    }
    """
    major, minor = cudatool.get_device_capability()
    m, n, k = 40, 24, 16
    generator = np.random.default_rng(0)
    a, b = generator.random((m, k), np.float32), generator.random((k, n), np.float32)
    for options in (None, cudatool.ProgramOptions(arch=f"sm_{major}{minor}")):
        c = cudatool.zeros((m, n))
        kernel = cudatool.compile(source, "product", options=options)
        kernel[(2, 3), (16, 16)](cudatool.asarray(a), cudatool.asarray(b), c, m, n, k)
        np.testing.assert_allclose(c.get(), a @ b, rtol=1e-5)


def test_a_float_is_passed_in_full_to_a_double() -> None:
    """Source: test_cuda.py::test_compile_kernel_double_precision"""
    kernel = cudatool.compile("__global__ void put(double *out, double value) { *out = value; }", "put")
    out = cudatool.zeros(1, np.float64)
    kernel[1, 1](out, 1.23456789012345)
    assert [1.23456789012345] == out.get().tolist()


def test_a_kernel_may_include_cudas_headers() -> None:
    """Source: test_cuda.py::test_compile_kernel_cuda_headers"""
    source = """
    #include <cuda_fp16.h>
    __global__ void put(__half *out, double value, int n) {
        if (threadIdx.x < n) out[threadIdx.x] = __float2half((float)value);
    }
    """
    out = cudatool.zeros(100, np.float16)
    cudatool.compile(source, "put")[1, 128](out, 3.14159, 100)
    assert (out.get() == np.float16(3.14159)).all()


def test_arrays_through_dlpack_share_their_memory_with_a_kernel() -> None:
    """Source: test_cuda.py::test_compile_kernel_dlpack"""
    a, b = cudatool.ones(64), cudatool.full(64, 2)
    total = cudatool.empty(64)
    shared = cudatool.from_dlpack(a)
    cudatool.compile(_ADD, "add_arrays<float>")[1, 64](shared, cudatool.from_dlpack(b), total, 64)
    assert (total.get() == 3).all()
    shared[0] = 42
    assert 42 == a.get()[0]


def test_threads_can_multiply_at_the_same_time_on_streams_of_their_own() -> None:
    """Source: test_cuda.py::test_cublas_multiple_threads_same_device"""
    size, weight = 64, cudatool.ones((64, 64))
    cudatool.synchronize()
    results: dict[int, float] = {}
    together = threading.Barrier(2)

    def work(number: int) -> None:
        together.wait(60)
        with cudatool.stream(cudatool.Stream()):
            value = cudatool.full((size, size), number + 1)
            scale = cudatool.full((size, size), 1 / size)
            for _ in range(10):
                value = cudatool.matmul(cudatool.matmul(value, weight), scale)
            results[number] = float(value.get().sum())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {number: (number + 1) * float(size) ** 12 for number in range(2)}
    assert results == pytest.approx(expected, rel=1e-4)
