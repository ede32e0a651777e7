# race corpus
# rule = "The copies of one batch come in no order, those of two batches in stream order"
# source = "Driver API, Memory Management, cuMemcpyBatchAsync"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# chained = [["race-raw", "batch", "batch"]]
# overlapping = [["race-waw", "batch", "batch"]]
# overwritten = [["race-war", "batch", "batch"]]
# apart = []
# two_batches = []
# ---
import sys

from cuda.bindings import driver
from race_kernels import BYTES, N, ok

import cudatool as ct

x = ct.zeros(4 * N)
ct.synchronize()
stream, how = ct.Stream(), driver.CUmemcpyAttributes()
how.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
parts = {  # of each copy: the target and the source, in units of BYTES
    "chained": [(1, 0), (2, 1)],
    "overlapping": [(1, 0), (1.5, 3)],
    "overwritten": [(1, 0), (0, 3)],
    "apart": [(1, 0), (2, 0)],
    "two_batches": [(1, 0), (2, 1)],
}[sys.argv[1]]
batches = [[part] for part in parts] if sys.argv[1] == "two_batches" else [parts]
for batch in batches:
    targets, sources = (
        [driver.CUdeviceptr(x.data_ptr() + int(at * BYTES)) for at in side] for side in zip(*batch, strict=True)
    )
    size = [BYTES // 2 if sys.argv[1] == "overlapping" and target == 1.5 else BYTES for target, _ in batch]
    ok(driver.cuMemcpyBatchAsync(targets, sources, size, len(batch), [how], [0], 1, stream.cuda_stream))  # @batch
ct.synchronize()
