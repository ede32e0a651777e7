# race corpus
# rule = "What is captured has not run when the capture ends: other work must not count on its results yet"
# source = "CUDA Programming Guide, CUDA Graphs, Creating a Graph Using Stream Capture"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["capture-missed", "captured", "use"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

Device().set_current()
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
stream, other = (ok(driver.cuStreamCreate(1)) for _ in range(2))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
fill(stream, x)  # @captured
if sys.argv[1] == "racy":
    copy(other, y, x)  # @use
    ok(driver.cuStreamSynchronize(other))
graph = ok(driver.cuStreamEndCapture(stream))
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuStreamSynchronize(stream))
if sys.argv[1] == "fixed":
    copy(other, y, x)  # @use
ok(driver.cuCtxSynchronize())
