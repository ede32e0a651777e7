# race corpus
# rule = "A cooperative launch is a kernel of its stream like any other"
# source = "Driver API, Execution Control, cuLaunchCooperativeKernel"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-waw", "first", "second"]]
# fixed = []
# ---
import ctypes
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, ok

import cudatool as ct

Device().set_current()
SOURCE = 'extern "C" __global__ void fill(float *x, float value) { x[blockIdx.x * blockDim.x + threadIdx.x] = value; }'
kernel = ct.compile(SOURCE, "fill")
function = ok(driver.cuKernelGetFunction(kernel.handle))
x = int(ok(driver.cuMemAlloc(BYTES)))
one, two, done = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1)), ok(driver.cuEventCreate(0))


def launch(stream, value):
    arguments = ((x, value), (ctypes.c_void_p, ctypes.c_float))
    return driver.cuLaunchCooperativeKernel(function, N // 128, 1, 1, 128, 1, 1, 0, stream, arguments)


ok(launch(one, 1.0))  # @first
ok(driver.cuEventRecord(done, one))
if sys.argv[1] == "fixed":
    ok(driver.cuStreamWaitEvent(two, done, 0))
ok(launch(two, 2.0))  # @second
ok(driver.cuCtxSynchronize())
