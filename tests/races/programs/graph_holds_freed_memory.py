# race corpus
# rule = "A graph keeps the addresses that it was captured with; their memory must outlive its launches"
# source = "CUDA Programming Guide, CUDA Graphs, Creating a Graph Using Stream Capture; PyTorch, CUDA semantics, CUDA Graphs"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["use-after-free", "free", "node"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
x = ok(driver.cuMemAlloc(BYTES))
stream = ok(driver.cuStreamCreate(1))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
fill(stream, int(x))  # @node
graph = ok(driver.cuStreamEndCapture(stream))
executable = ok(driver.cuGraphInstantiate(graph, 0))
if sys.argv[1] == "racy":
    ok(driver.cuMemFree(x))  # @free
ok(driver.cuGraphLaunch(executable, stream))  # @node
driver.cuCtxSynchronize()
