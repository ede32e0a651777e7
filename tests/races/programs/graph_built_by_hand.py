# race corpus
# rule = "Nodes added by hand have the dependencies that they were given, whatever order they were added in"
# source = "Driver API, Graph Management, cuGraphAddMemsetNode, cuGraphAddMemcpyNode (dependencies)"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "memset", "memcpy"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, ok

device = Device()
device.set_current()
context = ok(driver.cuCtxGetCurrent())
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
stream, graph = ok(driver.cuStreamCreate(1)), ok(driver.cuGraphCreate(0))
memset = driver.CUDA_MEMSET_NODE_PARAMS()
memset.dst, memset.elementSize, memset.width, memset.height, memset.value = x, 4, N, 1, 7
first = ok(driver.cuGraphAddMemsetNode(graph, None, 0, memset, context))  # @memset
memcpy = driver.CUDA_MEMCPY3D()
memcpy.srcMemoryType = memcpy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
memcpy.srcDevice, memcpy.dstDevice = x, y
memcpy.WidthInBytes, memcpy.Height, memcpy.Depth = BYTES, 1, 1
before = [first] if sys.argv[1] == "fixed" else []
ok(driver.cuGraphAddMemcpyNode(graph, before, len(before), memcpy, context))  # @memcpy
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuCtxSynchronize())
