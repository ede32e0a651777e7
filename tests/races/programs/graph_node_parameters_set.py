# race corpus
# rule = "New parameters of a node of an executable graph hold from the next launch on"
# source = "Driver API, Graph Management, cuGraphExecMemcpyNodeSetParams1D / cuGraphExecMemsetNodeSetParams"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "memset", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, copy, ok

Device().set_current()
context = ok(driver.cuCtxGetCurrent())
old, new, result = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(3))
stream, other = (ok(driver.cuStreamCreate(1)) for _ in range(2))
parameters = driver.CUDA_MEMSET_NODE_PARAMS()
parameters.dst, parameters.elementSize, parameters.width, parameters.height = driver.CUdeviceptr(old), 4, N, 1
graph = ok(driver.cuGraphCreate(0))
node = ok(driver.cuGraphAddMemsetNode(graph, None, 0, parameters, context))  # @memset
executable = ok(driver.cuGraphInstantiate(graph, 0))
parameters.dst = driver.CUdeviceptr(new)
ok(driver.cuGraphExecMemsetNodeSetParams(executable, node, parameters, context))
ok(driver.cuGraphLaunch(executable, stream))
copy(other, result, new if sys.argv[1] == "racy" else old)  # @read
ok(driver.cuCtxSynchronize())
