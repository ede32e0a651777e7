# race corpus
# rule = "Between two launches a graph's input may be filled again, behind the first launch"
# source = "Driver API, Graph Management, cuGraphLaunch; Stream Management, cuStreamWaitEvent"
# cuda = "graphs of cuda.core are not recorded on a GPU"
# [expect]
# racy = [["race-war", "node", "refill"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

device = Device()
device.set_current()
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
stream, loader = device.create_stream(), device.create_stream()
builder = stream.create_graph_builder().begin_building()
copy(builder, y, x)  # @node
graph = builder.end_building().complete()
for step in range(3):
    if sys.argv[1] == "fixed":
        loader.wait(stream)
    fill(loader, x, float(step))  # @refill
    stream.wait(loader)
    graph.launch(stream)  # @launch
device.sync()
