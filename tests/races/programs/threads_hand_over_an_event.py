# race corpus
# rule = "An event that one host thread records may be waited for by another"
# source = "Driver API, Event Management, cuEventRecord; Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import queue
import sys
import threading

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, consumer, events = ct.Stream(), ct.Stream(), queue.Queue()


def produce():
    fill(producer, x)  # @write
    events.put(producer.record_event())


def consume():
    event = events.get()
    if sys.argv[1] == "fixed":
        consumer.wait_event(event)
    copy(consumer, y, x)  # @read


threads = [threading.Thread(target=produce), threading.Thread(target=consume)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
