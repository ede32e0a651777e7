# race corpus
# rule = "A cuBLAS routine is work on the stream of its handle: it reads A and B and writes C there"
# source = "cuBLAS, Using the cuBLAS API, cublasSetStream; Driver API, cuStreamWaitEvent"
# [expect]
# racy = [["race-raw", "product", "read"]]
# fixed = []
# ---
import sys

from race_kernels import copy

import cudatool as ct

a, b, c, y = (ct.ones((32, 32)) for _ in range(4))
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
with ct.stream(first):
    ct.matmul(a, b, out=c)  # @product
if sys.argv[1] == "fixed":
    second.wait_stream(first)
copy(second, y, c)  # @read
ct.synchronize()
