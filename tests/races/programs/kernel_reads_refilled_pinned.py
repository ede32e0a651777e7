# race corpus
# rule = "Pinned memory that a kernel reads in place may be filled again when the kernel is done"
# source = "CUDA Programming Guide, Page-Locked Host Memory, Mapped Memory (synchronize using streams or events)"
# cuda = "what the host does through a plain view is seen on the software device alone"
# [expect]
# racy = [["race-host", "read", "wait"]]
# fixed = []
# ---
import sys

import numpy as np
from cuda.core import Device, LegacyPinnedMemoryResource
from race_kernels import N, copy

device = Device()
device.set_current()
stream = device.create_stream()
staging = LegacyPinnedMemoryResource().allocate(4 * N)
view = np.from_dlpack(staging).view(np.float32)
target = device.memory_resource.allocate(4 * N, stream=stream)
view[:] = 1.0
copy(stream, target, staging)  # @read
if sys.argv[1] == "fixed":
    stream.sync()
view[:] = 2.0
stream.sync()  # @wait
