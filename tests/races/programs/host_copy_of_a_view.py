# race corpus
# rule = "A strided part of pinned memory is written row by row: the host may use the other rows"
# source = "Driver API, Memory Management, cuMemcpy2DAsync; API synchronization behavior, Memcpy"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "rows", "write"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from race_kernels import ok

import cudatool as ct

x, pinned, stream = ct.ones((64, 8)), ct.host_view(ct.empty_pinned((64, 32))), ct.Stream()
ct.synchronize()
copy = driver.CUDA_MEMCPY2D()
copy.srcMemoryType, copy.srcDevice, copy.srcPitch = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE, x.data_ptr(), 32
copy.dstMemoryType, copy.dstHost, copy.dstPitch = driver.CUmemorytype.CU_MEMORYTYPE_HOST, pinned.ctypes.data, 128
copy.WidthInBytes, copy.Height = 32, 64
ok(driver.cuMemcpy2DAsync(copy, stream.cuda_stream))  # @rows
pinned[:, 8:] = 2.0
pinned[5, 7 if sys.argv[1] == "racy" else 9] = 3.0  # @write
ct.synchronize()
