# race corpus
# rule = "A copy reads or writes the elements of a CUDA array that it names, and is ordered as any other copy"
# source = "Driver API, Memory Management, cuMemcpyHtoAAsync, cuMemcpyAtoHAsync, cuMemcpyAtoD, cuMemcpy2DAsync"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "upload", "download"]]
# other_half = []
# fixed = []
# racy_2d = [["race-raw", "rows", "download"]]
# racy_to_device = [["race-raw", "upload", "to_device"]]
# fixed_to_device = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, ok

HALF = BYTES // 2
Device().set_current()
description = driver.CUDA_ARRAY_DESCRIPTOR()
description.Width, description.Height = N, 0
description.Format, description.NumChannels = driver.CUarray_format.CU_AD_FORMAT_FLOAT, 1
array = ok(driver.cuArrayCreate(description))
x = ok(driver.cuMemAlloc(BYTES))
source, result = (ok(driver.cuMemAllocHost(BYTES)) for _ in range(2))
one, two = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
variant = sys.argv[1]
if variant == "racy_2d":
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType, copy.srcDevice = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE, x
    copy.dstMemoryType, copy.dstArray = driver.CUmemorytype.CU_MEMORYTYPE_ARRAY, array
    copy.WidthInBytes, copy.Height = HALF, 1
    ok(driver.cuMemcpy2DAsync(copy, one))  # @rows
else:
    ok(driver.cuMemcpyHtoAAsync(array, 0, source, HALF, one))  # @upload
if variant.startswith("fixed"):
    ok(driver.cuStreamSynchronize(one))
if variant.endswith("to_device"):
    ok(driver.cuMemcpyAtoD(x, array, 0, HALF))  # @to_device
else:
    ok(driver.cuMemcpyAtoHAsync(result, array, HALF if variant == "other_half" else 0, HALF, two))  # @download
ok(driver.cuCtxSynchronize())
ok(driver.cuArrayDestroy(array))
