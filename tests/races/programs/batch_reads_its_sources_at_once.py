# race corpus
# rule = "A batch of copies reads host memory in stream order, or before the call returns, as it is told"
# source = "Driver API, Memory Management, cuMemcpyBatchAsync, CUmemcpySrcAccessOrder"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "copies", "write"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from race_kernels import BYTES, N, ok

import cudatool as ct

x, y, pinned = ct.zeros(N), ct.zeros(N), ct.host_view(ct.empty_pinned(2 * N))
pinned[:] = 1.0
ct.synchronize()
stream, how = ct.Stream(), driver.CUmemcpyAttributes()
if sys.argv[1] == "racy":
    how.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
else:
    how.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL
targets = [driver.CUdeviceptr(array.data_ptr()) for array in (x, y)]
sources = [driver.CUdeviceptr(pinned.ctypes.data + offset) for offset in (0, BYTES)]
ok(driver.cuMemcpyBatchAsync(targets, sources, [BYTES, BYTES], 2, [how], [0], 1, stream.cuda_stream))  # @copies
pinned[N:] = 2.0  # @write
ct.synchronize()
