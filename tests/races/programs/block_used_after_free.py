# race corpus
# rule = "An address that is kept longer than its array is used after its block was given back"
# source = "PyTorch, torch.Tensor.data_ptr (the memory is the tensor's)"
# cuda = "an address is no array: what the kernel accesses is not inferred"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["use-after-free", "free", "use"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x = ct.zeros(N)
address = x.data_ptr()
if sys.argv[1] == "racy":
    del x  # @free
fill(ct.current_stream(), address)  # @use
ct.synchronize()
