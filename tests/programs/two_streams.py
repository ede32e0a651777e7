"""cuda.core only: one stream fills a buffer, another reads it. Say `racy` to forget the wait, `halves` for two writers
of disjoint halves, `overlap` for two writers that share one element."""

import sys

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

mode = sys.argv[1]
SOURCE = r"""
extern "C" __global__ void fill(float *x, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = value;
}
extern "C" __global__ void twice(const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}
"""
device = Device()
device.set_current()
module = Program(SOURCE, code_type="c++", options=ProgramOptions(arch=f"sm_{device.arch}")).compile("cubin")
fill, twice = module.get_kernel("fill"), module.get_kernel("twice")
producer, consumer = device.create_stream(), device.create_stream()
n = 1 << 16


def ok(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) == 2 else None


x, y = (int(ok(driver.cuMemAlloc(4 * n))) for _ in range(2))
config = LaunchConfig(grid=n // 256, block=256)
if mode in ("halves", "overlap"):
    half = n // 2
    first = half + (mode == "overlap")
    launch(producer, config, fill, x, np.float32(1), np.int32(first))
    launch(consumer, config, fill, x + 4 * half, np.float32(2), np.int32(half))
else:
    launch(producer, config, fill, x, np.float32(3), np.int32(n))
    if mode != "racy":
        consumer.wait(producer.record())
    launch(consumer, config, twice, x, y, np.int32(n))
device.sync()
out = np.empty(n, np.float32)
ok(driver.cuMemcpyDtoH(out.ctypes.data, x if mode in ("halves", "overlap") else y, 4 * n))
print(float(out[0]), float(out[-1]))
for address in (x, y):
    ok(driver.cuMemFree(address))
