# race corpus
# rule = "A block that a graph uses and that is dropped belongs to the next owner, while the graph still writes it"
# source = "PyTorch, CUDA semantics, CUDA Graphs (memory management, private pools)"
# cuda = "graphs of cuda.core are not recorded on a GPU"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["use-after-free", "free", "node"]]
# fixed = []
# ---
import sys

from cuda.core import Device
from race_kernels import N, fill

import cudatool as ct

x = ct.zeros(N)
ct.synchronize()
stream = Device().create_stream()
builder = stream.create_graph_builder().begin_building()
fill(builder, x)  # @node
graph = builder.end_building().complete()
if sys.argv[1] == "racy":
    del x  # @free
graph.launch(stream)  # @node
stream.sync()
