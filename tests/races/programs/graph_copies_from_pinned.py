# race corpus
# rule = "A copy node reads pinned memory at each launch; the host may write it again when the launch is done"
# source = "Driver API, Graph Management, cuGraphLaunch; 2. API synchronization behavior, Memcpy, Asynchronous"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "node", "write"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, array_at, ok

import cudatool as ct

Device().set_current()
x = int(ok(driver.cuMemAlloc(BYTES)))
pinned = array_at(ok(driver.cuMemAllocHost(BYTES)))
pinned[:] = 1.0
stream = ok(driver.cuStreamCreate(1))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
ok(driver.cuMemcpyHtoDAsync(x, pinned.ctypes.data, BYTES, stream))  # @node
graph = ok(driver.cuStreamEndCapture(stream))
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))  # @launch
if sys.argv[1] == "fixed":
    ok(driver.cuStreamSynchronize(stream))
ct.host_view(pinned)[:] = 2.0  # @write
ok(driver.cuCtxSynchronize())
