# race corpus
# rule = "Work that is captured does not run; its accesses happen at each launch of the graph"
# source = "CUDA Programming Guide, CUDA Graphs, Creating a Graph Using Stream Capture"
# cuda = "graphs of cuda.core are not recorded on a GPU"
# [expect]
# racy = [["race-war", "read", "node"]]
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
copy(other, y, x)  # @read
if sys.argv[1] == "racy":
    graph.launch(stream)  # @launch
device.sync()
