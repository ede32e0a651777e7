# race corpus
# rule = "A block that another host thread uses on its own stream needs record_stream as well"
# source = "PyTorch, torch.Tensor.record_stream"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["reuse", "use", "new-owner"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N, add_one, fill

import cudatool as ct

main, side = ct.Stream(), ct.Stream()
with ct.stream(main):
    x = ct.zeros(N)
side.wait_stream(main)


def work(array):
    add_one(side, array)  # @use
    if sys.argv[1] == "fixed":
        array.record_stream(side)


thread = threading.Thread(target=work, args=(x,))
del x
thread.start()
thread.join()
del thread
with ct.stream(main):
    x = ct.empty(N)
    fill(main, x)  # @new-owner
ct.synchronize()
