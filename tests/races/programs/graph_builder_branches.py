# race corpus
# rule = "Branches of a graph run in no order until they are joined"
# source = "CUDA Programming Guide, CUDA Graphs, Graph Structure (any node may run once its dependencies are complete)"
# cuda = "graphs of cuda.core are not recorded on a GPU"
# [expect]
# racy = [["race-waw", "left", "right"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

device = Device()
device.set_current()
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
stream = device.create_stream()
left = stream.create_graph_builder().begin_building()
left, right = left.split(2)
fill(left, x, 1.0)  # @left
fill(right, x if sys.argv[1] == "racy" else y, 2.0)  # @right
whole = left.join(left, right)
graph = whole.end_building().complete()
graph.launch(stream)
stream.sync()
