# race corpus
# rule = "A stream-ordered free must come behind every use, also those of other streams"
# source = "Driver API, Stream Ordered Memory Allocator, overview (use after free)"
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
user.wait(owner)
fill(user, buffer)  # @use
if sys.argv[1] == "fixed":
    owner.wait(user)
buffer.close(owner)  # @free
device.sync()
