# race corpus
# rule = "A kernel that updates in place reads and writes, and conflicts with every access of another stream"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-war", "read", "update"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_one, copy

import cudatool as ct

x, y = ct.ones(N), ct.zeros(N)
ct.synchronize()
reader, writer = ct.Stream(), ct.Stream()
copy(reader, y, x)  # @read
if sys.argv[1] == "fixed":
    writer.wait_stream(reader)
add_one(writer, x)  # @update
