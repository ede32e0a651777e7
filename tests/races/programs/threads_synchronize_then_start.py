# race corpus
# rule = "What a thread enqueues after another thread synchronized and started it comes after that work"
# source = "Driver API, Stream Management, cuStreamSynchronize"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, consumer = ct.Stream(), ct.Stream()
fill(producer, x)  # @write
if sys.argv[1] == "fixed":
    producer.synchronize()


def consume():
    copy(consumer, y, x)  # @read


thread = threading.Thread(target=consume)
thread.start()
thread.join()
