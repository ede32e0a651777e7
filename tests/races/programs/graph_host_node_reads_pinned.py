# race corpus
# rule = "A host function in a graph runs in its place at each launch; the host waits before it writes what that reads"
# source = "Driver API, Execution Control, cuLaunchHostFunc; Graph Management, cuGraphLaunch"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "node", "write"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from race_kernels import BYTES, N, host_function, ok

import cudatool as ct

x, seen = ct.ones(N), []
pinned = ct.host_view(ct.empty_pinned(N))
ct.synchronize()
stream = ok(driver.cuStreamCreate(1))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
ok(driver.cuMemcpyDtoHAsync(pinned.ctypes.data, x.data_ptr(), BYTES // 2, stream))
host_function(stream, lambda: seen.append(float(pinned[N - 1])))  # @node
graph = ok(driver.cuStreamEndCapture(stream))
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))
if sys.argv[1] == "fixed":
    ok(driver.cuStreamSynchronize(stream))
pinned[N // 2 :] = 2.0  # @write
ok(driver.cuCtxSynchronize())
