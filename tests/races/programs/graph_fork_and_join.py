# race corpus
# rule = "In a capture, events order nodes as they order work: a branch comes behind what its fork event captured"
# source = "CUDA Programming Guide, CUDA Graphs, Cross-stream Dependencies and Events"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

Device().set_current()
x, y, z = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(3))
stream, branch = (ok(driver.cuStreamCreate(1)) for _ in range(2))
fork, join = (ok(driver.cuEventCreate(2)) for _ in range(2))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
fill(stream, z)
if sys.argv[1] == "racy":
    ok(driver.cuEventRecord(fork, stream))
fill(stream, x)  # @write
if sys.argv[1] == "fixed":
    ok(driver.cuEventRecord(fork, stream))
ok(driver.cuStreamWaitEvent(branch, fork, 0))
copy(branch, y, x)  # @read
ok(driver.cuEventRecord(join, branch))
ok(driver.cuStreamWaitEvent(stream, join, 0))
graph = ok(driver.cuStreamEndCapture(stream))
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuCtxSynchronize())
ok(driver.cuGraphExecDestroy(executable))
ok(driver.cuGraphDestroy(graph))
