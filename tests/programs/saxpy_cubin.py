"""cuda.core only: compile for the device's own machine code ("cubin"), time it with events, two instantiations."""

import numpy as np
from cuda.core import Device, EventOptions, LaunchConfig, Program, ProgramOptions, launch

SOURCE = """
template <typename T>
__global__ void saxpy(const T a, const T *x, const T *y, T *out, size_t n) {
    for (size_t i = threadIdx.x + blockIdx.x * blockDim.x; i < n; i += gridDim.x * blockDim.x)
        out[i] = a * x[i] + y[i];
}
"""

device = Device()
device.set_current()
stream = device.create_stream()
options = ProgramOptions(std="c++11", arch=f"sm_{device.arch}")
module = Program(SOURCE, code_type="c++", options=options).compile(
    "cubin", name_expressions=("saxpy<float>", "saxpy<double>")
)

for dtype, name in ((np.float32, "saxpy<float>"), (np.float64, "saxpy<double>")):
    kernel = module.get_kernel(name)
    n = 4096
    x = np.arange(n, dtype=dtype)
    y = np.ones(n, dtype=dtype)
    from cuda.bindings import driver

    def ok(result):
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result
        return result[1] if len(result) == 2 else None

    dx, dy, out = (int(ok(driver.cuMemAlloc(x.nbytes))) for _ in range(3))
    # In the stream: a synchronous copy from pageable memory may return before the data has arrived.
    ok(driver.cuMemcpyHtoDAsync(dx, x.ctypes.data, x.nbytes, stream.handle))
    ok(driver.cuMemcpyHtoDAsync(dy, y.ctypes.data, y.nbytes, stream.handle))
    start = stream.record(options=EventOptions(timing_enabled=True))
    launch(stream, LaunchConfig(grid=32, block=128), kernel, dtype(2), dx, dy, out, np.uint64(n))
    end = stream.record(options=EventOptions(timing_enabled=True))
    end.sync()
    assert end - start > 0
    result = np.empty_like(x)
    ok(driver.cuMemcpyDtoH(result.ctypes.data, out, x.nbytes))
    assert np.array_equal(result, 2 * x + 1)
    for address in (dx, dy, out):
        ok(driver.cuMemFree(address))
print("saxpy: right")
