"""cuda.core only: compile a template to PTX with NVRTC, add two vectors, check the sum."""

import numpy as np
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = """
template <typename T>
__global__ void vector_add(const T *a, const T *b, T *c, size_t n) {
    const unsigned int start = threadIdx.x + blockIdx.x * blockDim.x;
    for (size_t i = start; i < n; i += gridDim.x * blockDim.x) c[i] = a[i] + b[i];
}
"""

device = Device()
device.set_current()
stream = device.create_stream()
program = Program(SOURCE, code_type="c++", options=ProgramOptions(std="c++17", arch=f"sm_{device.arch}"))
kernel = program.compile("ptx", name_expressions=("vector_add<float>",)).get_kernel("vector_add<float>")

n = 50_000
rng = np.random.default_rng(0)
a, b, c = rng.random(n, np.float32), rng.random(n, np.float32), np.zeros(n, np.float32)
memory = device.memory_resource
buffers = [memory.allocate(x.nbytes, stream=stream) for x in (a, b, c)]
from cuda.bindings import driver  # noqa: E402


def ok(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result


for buffer, host in zip(buffers, (a, b), strict=False):
    ok(driver.cuMemcpyHtoDAsync(buffer.handle, host.ctypes.data, host.nbytes, stream.handle))
launch(stream, LaunchConfig(grid=(n + 255) // 256, block=256), kernel, *buffers, np.uint64(n))
stream.sync()
ok(driver.cuMemcpyDtoH(c.ctypes.data, buffers[2].handle, c.nbytes))
assert np.array_equal(c, a + b)
print("vector_add: right")
for buffer in buffers:
    buffer.close(stream)
stream.close()
