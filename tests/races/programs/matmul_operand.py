# race corpus
# rule = "An operand of a cuBLAS routine must not be written before the routine has read it"
# source = "cuBLAS, Using the cuBLAS API, cublasSetStream; Driver API, cuStreamWaitEvent"
# [expect]
# racy = [["race-war", "product", "write"]]
# fixed = []
# ---
import sys

from race_kernels import fill

import cudatool as ct

a, b, c = (ct.ones((32, 32)) for _ in range(3))
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
with ct.stream(first):
    ct.matmul(a, b, out=c)  # @product
if sys.argv[1] == "fixed":
    second.wait_stream(first)
fill(second, b, 0.0)  # @write
ct.synchronize()
