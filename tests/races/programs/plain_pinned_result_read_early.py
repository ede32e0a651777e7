# race corpus
# rule = "What a copy writes to pinned memory may be read by the host when the copy is done, also through a plain view"
# source = "Driver API, API synchronization behavior, Memcpy, Asynchronous"
# cuda = "what the host does through a plain view is seen on the software device alone"
# [expect]
# racy = [["race-host", "download", "wait"]]
# other = [["race-host", "download", "wait"]]
# written = [["race-host", "download", "wait"]]
# fixed = []
# event = []
# polled = []
# ---
import os
import sys

import numpy as np
from cuda.core import Device, LegacyPinnedMemoryResource
from race_kernels import N, fill

variant = sys.argv[1]
device = Device()
device.set_current()
stream, other = device.create_stream(), device.create_stream()
result = LegacyPinnedMemoryResource().allocate(4 * N)
view = np.from_dlpack(result).view(np.float32)
source = device.memory_resource.allocate(4 * N, stream=stream)
pipe = os.pipe()
for step in range(3):
    fill(stream, source, float(step))
    result.copy_from(source, stream=stream)  # @download
    done = stream.record()
    if variant == "fixed":
        stream.sync()
    elif variant == "event":
        done.sync()
    elif variant == "polled":
        while not done.is_done:
            pass
    elif variant == "other":
        other.sync()
    if variant == "written":
        view[:16] = 0  # the bytes that were there already
    elif variant == "other":
        os.write(pipe[1], view[:1])  # read by the system
    else:
        view.sum()
    stream.sync()  # @wait
