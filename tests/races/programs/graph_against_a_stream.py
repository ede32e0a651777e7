# race corpus
# rule = "A graph launch is work on its stream; other streams must wait for it"
# source = "Driver API, Graph Management, cuGraphLaunch"
# cuda = "graphs of cuda.core are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "node", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

device = Device()
device.set_current()
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
stream, other = device.create_stream(), device.create_stream()
builder = stream.create_graph_builder().begin_building()
fill(builder, x)  # @node
graph = builder.end_building().complete()
graph.launch(stream)  # @launch
if sys.argv[1] == "fixed":
    other.wait(stream)
copy(other, y, x)  # @read
device.sync()
