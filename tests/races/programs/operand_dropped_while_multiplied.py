# race corpus
# rule = "A product on a side stream still reads its operand when the last array of it is dropped and its block goes on"
# source = "PyTorch, torch.Tensor.record_stream"
# memcheck = ["use-after-free"]
# [expect]
# racy = [["reuse", "product", "new-owner"]]
# fixed = []
# ---
import sys

import cudatool as ct
from cudatool import blas

side, other = ct.Stream(), ct.ones((16, 16))
x = other + 1
side.wait_stream(ct.current_stream())
with ct.stream(side):
    y = blas.mm(x, other)  # @product
if sys.argv[1] == "fixed":
    x.record_stream(side)
del x
z = other + 2  # @new-owner
ct.synchronize()
