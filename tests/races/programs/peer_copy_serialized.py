# race corpus
# rule = "The synchronous copy between contexts is serialized with all work of both; its asynchronous form is not"
# source = "Driver API, Memory Management, cuMemcpyPeer; Runtime API, cudaMemcpyPeer (pending and future work)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# devices = 2
# [expect]
# racy = [["race-raw", "write", "copy"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from race_kernels import BYTES, N, fill, ok

import cudatool as ct

x, y = ct.zeros(N, device=0), ct.zeros(N, device=1)
ct.synchronize(0), ct.synchronize(1)
contexts = [ok(driver.cuDevicePrimaryCtxRetain(device)) for device in range(2)]
side = ct.Stream(0)
fill(side, x)  # @write
if sys.argv[1] == "fixed":
    ok(driver.cuMemcpyPeer(y.data_ptr(), contexts[1], x.data_ptr(), contexts[0], BYTES))
else:
    ok(driver.cuMemcpyPeerAsync(y.data_ptr(), contexts[1], x.data_ptr(), contexts[0], BYTES, 0))  # @copy
ct.synchronize(0), ct.synchronize(1)
for device in range(2):
    ok(driver.cuDevicePrimaryCtxRelease(device))
