# race corpus
# rule = "A host function in a graph comes before the nodes that depend on it, and in no order with the others"
# source = "Programming Guide, CUDA Graphs, Graph Structure; Driver API, Graph Management, cuGraphAddHostNode"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "node", "copy"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from race_kernels import BYTES, N, host_function, ok

import cudatool as ct

x = ct.zeros(N)
pinned = ct.host_view(ct.empty_pinned(N))
ct.synchronize()
stream, side = (ok(driver.cuStreamCreate(1)) for _ in range(2))
forked, joined = (ok(driver.cuEventCreate(0)) for _ in range(2))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
if sys.argv[1] == "racy":
    ok(driver.cuEventRecord(forked, stream))
host_function(stream, lambda: pinned.fill(1))  # @node
if sys.argv[1] == "fixed":
    ok(driver.cuEventRecord(forked, stream))
ok(driver.cuStreamWaitEvent(side, forked, 0))
ok(driver.cuMemcpyHtoDAsync(x.data_ptr(), pinned.ctypes.data, BYTES, side))  # @copy
ok(driver.cuEventRecord(joined, side))
ok(driver.cuStreamWaitEvent(stream, joined, 0))
executable = ok(driver.cuGraphInstantiate(ok(driver.cuStreamEndCapture(stream)), 0))
ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuCtxSynchronize())
