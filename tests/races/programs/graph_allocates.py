# race corpus
# rule = "Memory that a graph allocates is there from its alloc node to its free node"
# source = "CUDA Programming Guide, CUDA Graphs, Graph Memory Nodes"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["use-after-free", "use", "free"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
stream, branch = (ok(driver.cuStreamCreate(1)) for _ in range(2))
fork, join = (ok(driver.cuEventCreate(2)) for _ in range(2))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
x = ok(driver.cuMemAllocAsync(BYTES, stream))
ok(driver.cuEventRecord(fork, stream))
ok(driver.cuStreamWaitEvent(branch, fork, 0))
fill(branch, int(x))  # @use
ok(driver.cuEventRecord(join, branch))
if sys.argv[1] == "fixed":
    ok(driver.cuStreamWaitEvent(stream, join, 0))
ok(driver.cuMemFreeAsync(x, stream))  # @free
if sys.argv[1] == "racy":
    ok(driver.cuStreamWaitEvent(stream, join, 0))
graph = ok(driver.cuStreamEndCapture(stream))
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))  # @use
driver.cuCtxSynchronize()
