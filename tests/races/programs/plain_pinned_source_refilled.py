# race corpus
# rule = "A pinned source may be filled again when the copy out of it is done, also through a plain NumPy view"
# source = "Driver API, API synchronization behavior, Memcpy, Asynchronous"
# cuda = "what the host does through a plain view is seen on the software device alone"
# [expect]
# racy = [["race-host", "upload", "upload"]]
# fixed = []
# event = []
# polled = []
# ---
import sys

import numpy as np
from cuda.core import Device, LegacyPinnedMemoryResource
from race_kernels import BYTES, add_one

device = Device()
device.set_current()
stream = device.create_stream()
staging = LegacyPinnedMemoryResource().allocate(BYTES)
target = device.memory_resource.allocate(BYTES, stream=stream)
view = np.from_dlpack(staging).view(np.float32)
for batch in range(4):
    view[:] = batch + 1.0
    target.copy_from(staging, stream=stream)  # @upload
    copied = stream.record()
    add_one(stream, target)
    if sys.argv[1] == "fixed":
        stream.sync()
    elif sys.argv[1] == "event":
        copied.sync()
    elif sys.argv[1] == "polled":
        while not copied.is_done:
            pass
stream.sync()
