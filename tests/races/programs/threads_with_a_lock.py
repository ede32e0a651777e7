# race corpus
# rule = "A lock orders the calls of two threads, and with them the work of one stream, but not that of two"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-raw", "update", "update"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N, add_one

import cudatool as ct

x, shared, lock = ct.zeros(N), ct.Stream(), threading.Lock()
ct.synchronize()


def work():
    stream = shared if sys.argv[1] == "fixed" else ct.Stream()
    for _ in range(3):
        with lock:
            add_one(stream, x)  # @update


threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ct.synchronize()
