# race corpus
# rule = "A 2-D copy touches its rows and nothing between them"
# source = "Driver API, Memory Management, cuMemcpy2DAsync"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-waw", "left", "right"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, ok

ROWS, PITCH = 16, BYTES // 16
Device().set_current()
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
first, second = (ok(driver.cuStreamCreate(1)) for _ in range(2))


def columns(begin, width):
    """Return the copy of `width` bytes of each row from y to x."""
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = y, x
    copy.srcXInBytes = copy.dstXInBytes = begin
    copy.srcPitch = copy.dstPitch = PITCH
    copy.WidthInBytes, copy.Height = width, ROWS
    return copy


half = PITCH // 2
ok(driver.cuMemsetD8(y, 0, BYTES))
ok(driver.cuCtxSynchronize())
ok(driver.cuMemcpy2DAsync(columns(0, half if sys.argv[1] == "fixed" else half + 4), first))  # @left
ok(driver.cuMemcpy2DAsync(columns(half, half), second))  # @right
ok(driver.cuCtxSynchronize())
