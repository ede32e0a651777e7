# race corpus
# rule = "Kernels may write pinned memory through its address; the host reads it after a synchronization"
# source = "CUDA Programming Guide, Page-Locked Host Memory, Mapped Memory (synchronize using streams or events)"
# cuda = "an address is no array: what the kernel accesses is not inferred"
# [expect]
# racy = [["race-host", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

stream, pinned = ct.Stream(), ct.empty_pinned(N)
fill(stream, pinned.ctypes.data, 3.0)  # @write
if sys.argv[1] == "fixed":
    stream.synchronize()
float(ct.host_view(pinned)[0])  # @read
ct.synchronize()
