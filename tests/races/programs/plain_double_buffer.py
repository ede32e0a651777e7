# race corpus
# rule = "Of two pinned buffers each is filled again when its own copy is done, also through plain NumPy views"
# source = "Driver API, Event Management, cuEventSynchronize; API synchronization behavior, Memcpy"
# cuda = "what the host does through a plain view is seen on the software device alone"
# [expect]
# racy = [["race-host", "upload", "upload"], ["race-host", "upload", "wait"]]
# fixed = []
# ---
import sys

import numpy as np
from cuda.core import Device, LegacyPinnedMemoryResource
from race_kernels import BYTES, add_one

device = Device()
device.set_current()
stream = device.create_stream()
staging = [LegacyPinnedMemoryResource().allocate(BYTES) for _ in range(2)]
views = [np.from_dlpack(buffer).view(np.float32) for buffer in staging]
target = device.memory_resource.allocate(BYTES, stream=stream)
copied = [None, None]
for batch in range(6):
    slot = batch % 2
    if batch >= 2 and sys.argv[1] == "fixed":
        copied[slot].sync()
    views[slot][:] = batch + 1.0
    target.copy_from(staging[slot], stream=stream)  # @upload
    add_one(stream, target)
    if sys.argv[1] == "racy" and batch % 2:
        copied[0].sync()  # @wait
        views[1][:] = 0.0
    copied[slot] = stream.record()
stream.sync()  # @wait
