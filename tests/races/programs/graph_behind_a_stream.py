# race corpus
# rule = "A graph launch comes behind the earlier work of its stream, not of others"
# source = "Driver API, Graph Management, cuGraphLaunch (ordered behind any previous work in hStream)"
# cuda = "graphs of cuda.core are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "write", "node"]]
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
copy(builder, y, x)  # @node
graph = builder.end_building().complete()
fill(stream if sys.argv[1] == "fixed" else other, x)  # @write
graph.launch(stream)  # @launch
device.sync()
