# race corpus
# rule = "Memory may be freed on another stream than it was allocated on, behind its uses"
# source = "Driver API, Stream Ordered Memory Allocator, cuMemFreeAsync (stream establishing the ordering contract)"
# cuda = "calls of cuda.core are not recorded on a GPU"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["use-after-free", "use", "free"]]
# fixed = []
# ---
import sys

from cuda.core import Device
from race_kernels import BYTES, fill

device = Device()
device.set_current()
owner, user = device.create_stream(), device.create_stream()
buffer = device.allocate(BYTES, stream=owner)
fill(owner, buffer)  # @use
if sys.argv[1] == "fixed":
    user.wait(owner)
buffer.close(user)  # @free
device.sync()
