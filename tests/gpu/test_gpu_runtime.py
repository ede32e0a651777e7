"""What only a GPU can show of the runtime: cuBLAS, other libraries' arrays, and time that passes."""

from __future__ import annotations

import numpy as np
import pytest

import cudatool

pytestmark = pytest.mark.gpu

SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@pytest.fixture(autouse=True)
def gpu():
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")


@pytest.mark.parametrize(("dtype", "tolerance"), [("f4", 1e-4), ("f8", 1e-12)])
def test_large_product_is_numpys(dtype, tolerance):
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(1031, 517)).astype(dtype), rng.normal(size=(517, 769)).astype(dtype)
    found = cudatool.matmul(cudatool.asarray(a), cudatool.asarray(np.ascontiguousarray(b.T)).T)
    np.testing.assert_allclose(found.get(), a @ b, atol=tolerance * 100, rtol=tolerance)


def test_work_goes_on_while_the_program_does_not_wait():
    kernel, stream = cudatool.compile(SPIN, "spin"), cudatool.Stream()
    start, end = cudatool.Event(enable_timing=True), cudatool.Event(enable_timing=True)
    with cudatool.stream(stream):
        start.record()
        kernel[1, 1](200_000_000)
        end.record()
    assert not stream.query()
    assert not end.query()
    with pytest.raises(cudatool.CudaError) as caught:
        start.elapsed_time(end)
    assert caught.value.name == "CUDA_ERROR_NOT_READY"
    stream.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 10  # ms, at any clock this side of 20 GHz


def test_block_is_not_reused_before_the_recorded_stream_is_done():
    kernel, stream = cudatool.compile(SPIN, "spin"), cudatool.Stream()
    array = cudatool.empty(1000)
    address = array.data_ptr()
    with cudatool.stream(stream):
        kernel[1, 1](200_000_000)
    array.record_stream(stream)
    del array
    other = cudatool.empty(1000)
    assert other.data_ptr() != address
    stream.synchronize()
    assert cudatool.empty(1000).data_ptr() == address


def test_failed_kernel_is_an_error_that_says_so(tmp_path):
    import subprocess
    import sys

    program = tmp_path / "bad.py"  # of its own: the context cannot be used any more
    program.write_text(
        "import cudatool as ct\n"
        "ct.compile('extern \"C\" __global__ void f(int *p) { *p = 1; }', 'f')[1, 1](ct.empty(0, 'i4'))\n"
        "try: ct.synchronize()\n"
        "except ct.CudaError as error: print(error.name)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS"], done.stderr


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "bool"])
def test_arrays_go_to_torch_and_back(name):
    torch = pytest.importorskip("torch")
    array = cudatool.asarray((np.arange(24) % 2).reshape(4, 6).astype(name))[:, ::2]
    tensor = torch.from_dlpack(array)
    assert tensor.data_ptr() == array.data_ptr()
    assert tensor.cpu().numpy().tolist() == array.get().tolist()
    back = cudatool.from_dlpack(tensor.T)
    assert back.data_ptr() == array.data_ptr()
    np.testing.assert_array_equal(back.get(), array.get().T)


def test_torch_stream_can_be_used():
    torch = pytest.importorskip("torch")
    theirs = torch.cuda.Stream()
    with cudatool.stream(cudatool.ExternalStream(theirs.cuda_stream)):
        array = cudatool.full(1000, 3)
    with torch.cuda.stream(theirs):
        assert torch.as_tensor(array, device="cuda").sum().item() == 3000


def test_arrays_go_to_cupy_and_back():
    cupy = pytest.importorskip("cupy")
    array = cudatool.asarray(np.arange(24.0).reshape(4, 6))[::2]
    theirs = cupy.asarray(array)
    assert theirs.data.ptr == array.data_ptr()
    theirs *= 2
    cupy.cuda.get_current_stream().synchronize()
    np.testing.assert_array_equal(array.get(), 2 * np.arange(24.0).reshape(4, 6)[::2])
    assert cudatool.asarray(theirs).data_ptr() == array.data_ptr()
