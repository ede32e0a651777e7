# race corpus
# rule = "Memory that a graph allocates and does not free is there for work ordered behind the launch"
# source = "CUDA Programming Guide, CUDA Graphs, Graph Memory Nodes; Driver API, cuGraphAddMemAllocNode"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["use-before-alloc", "launch", "use"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
stream, other = (ok(driver.cuStreamCreate(1)) for _ in range(2))
launched = ok(driver.cuEventCreate(2))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
x = ok(driver.cuMemAllocAsync(BYTES, stream))
graph = ok(driver.cuStreamEndCapture(stream))
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))  # @launch
ok(driver.cuEventRecord(launched, stream))
if sys.argv[1] == "fixed":
    ok(driver.cuStreamWaitEvent(other, launched, 0))
fill(other, int(x))  # @use
ok(driver.cuStreamSynchronize(other))
ok(driver.cuMemFreeAsync(x, stream))
ok(driver.cuCtxSynchronize())
