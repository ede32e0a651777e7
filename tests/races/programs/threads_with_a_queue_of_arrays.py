# race corpus
# rule = "A queue hands an array to another thread, not the work that fills it: the thread's stream must wait"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams, Default Stream; Driver API, cuStreamWaitEvent"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import queue
import sys
import threading

from race_kernels import N, copy, fill

import cudatool as ct

tasks, arrays, out = queue.Queue(), [ct.zeros(N) for _ in range(3)], ct.zeros(N)
ct.synchronize()


def produce():
    own = ct.ExternalStream(2)  # the per-thread default stream
    for number, x in enumerate(arrays):
        fill(own, x, number)  # @write
        tasks.put((x, own.record_event()))
    tasks.put(None)


def consume():
    own = ct.ExternalStream(2)
    while (task := tasks.get()) is not None:
        x, ready = task
        if sys.argv[1] == "fixed":
            own.wait_event(ready)
        copy(own, out, x)  # @read


threads = [threading.Thread(target=produce), threading.Thread(target=consume)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ct.synchronize()
