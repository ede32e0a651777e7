# race corpus
# rule = "Memory from a stream-ordered allocation is there for other streams once they are ordered behind it"
# source = "Driver API, Stream Ordered Memory Allocator, overview (use before allocation)"
# cuda = "calls of cuda.core are not recorded on a GPU"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["use-before-alloc", "alloc", "use"]]
# fixed = []
# synchronized = []
# ---
import sys

from cuda.core import Device
from race_kernels import BYTES, fill

device = Device()
device.set_current()
owner, user = device.create_stream(), device.create_stream()
buffer = device.allocate(BYTES, stream=owner)  # @alloc
if sys.argv[1] == "fixed":
    user.wait(owner)
elif sys.argv[1] == "synchronized":
    owner.sync()
fill(user, buffer)  # @use
user.sync()
buffer.close(owner)
owner.sync()
