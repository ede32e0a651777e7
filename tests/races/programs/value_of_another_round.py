# race corpus
# rule = "A wait is over with the first value that meets its condition, also one of an earlier round"
# source = "CUDA Driver API, Stream Memory Operations, CUstreamWaitValue_flags: GEQ"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from race_kernels import N, copy, fill

import cudatool as ct

x, y, flag = ct.zeros(N), ct.zeros(N), ct.zeros(1, "u4")
writer, reader = ct.Stream(), ct.Stream()
ct.synchronize()
for round_ in (1, 2):
    fill(writer, x)  # @write
    driver.cuStreamWriteValue32(writer.cuda_stream, flag.data_ptr(), round_, 0)
    awaited = 1 if sys.argv[1] == "racy" else round_
    driver.cuStreamWaitValue32(reader.cuda_stream, flag.data_ptr(), awaited, 0)
    copy(reader, y, x)  # @read
    writer.wait_stream(reader)
ct.synchronize()
