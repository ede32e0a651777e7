# race corpus
# rule = "A stream that waits for a value in memory comes after what its writer's stream did before, and not after"
# source = "CUDA Driver API, Stream Memory Operations, cuStreamWriteValue32 and cuStreamWaitValue32"
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


def tell():
    driver.cuStreamWriteValue32(writer.cuda_stream, flag.data_ptr(), 1, 0)


if sys.argv[1] == "racy":
    tell()
fill(writer, x)  # @write
if sys.argv[1] == "fixed":
    tell()
driver.cuStreamWaitValue32(
    reader.cuda_stream, flag.data_ptr(), 1, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
)
copy(reader, y, x)  # @read
ct.synchronize()
