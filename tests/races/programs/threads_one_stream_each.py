# race corpus
# rule = "Host threads that enqueue on one stream share its order; streams of their own have none"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-waw", "write", "write"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N, fill

import cudatool as ct

x = ct.zeros(N)
ct.synchronize()
shared = ct.Stream()
streams = [shared if sys.argv[1] == "fixed" else ct.Stream() for _ in range(2)]


def work(stream):
    fill(stream, x)  # @write


threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
