# race corpus
# rule = "A buffer of a caching memory resource is free for its stream's next request as soon as it is closed"
# source = "cuda.core, Buffer.close(stream); Driver API, Stream Management, cuStreamWaitEvent"
# cuda = "launches of cuda.core are not recorded on a GPU"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["reuse", "use", "new-owner"]]
# fixed = []
# ---
import sys

from cuda.core import Device
from race_kernels import BYTES, add_one, fill

from cudatool.cuda_core import CachingMemoryResource

device = Device()
device.set_current()
memory = CachingMemoryResource(device)
main, side = device.create_stream(), device.create_stream()
x = memory.allocate(BYTES, stream=main)
fill(main, x)
side.wait(main)
add_one(side, x)  # @use
if sys.argv[1] == "fixed":
    main.wait(side)
x.close(main)
y = memory.allocate(BYTES, stream=main)
fill(main, y, 2.0)  # @new-owner
device.sync()
y.close(main)
