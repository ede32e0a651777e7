# race corpus
# rule = "Products that write different rows of one matrix may run at the same time"
# source = "cuBLAS Library, Using the cuBLAS API, Parallelism with Streams"
# [expect]
# racy = [["race-waw", "upper", "lower"]]
# fixed = []
# ---
import sys

import cudatool as ct

a, b, c = ct.ones((64, 32)), ct.ones((32, 48)), ct.zeros((64, 48))
ct.synchronize()
upper, lower = ct.Stream(), ct.Stream()
with ct.stream(upper):
    ct.matmul(a[:32], b, out=c[:32])  # @upper
start = 32 if sys.argv[1] == "fixed" else 31
with ct.stream(lower):
    ct.matmul(a[start:], b, out=c[start:])  # @lower
ct.synchronize()
