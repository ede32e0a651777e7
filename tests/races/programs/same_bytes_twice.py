# race corpus
# rule = "One missing order is one defect, however often it strikes"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, consumer = ct.Stream(), ct.Stream()
for step in range(5):
    producer.wait_stream(consumer)
    fill(producer, x, float(step))  # @write
    if sys.argv[1] == "fixed":
        consumer.wait_stream(producer)
    copy(consumer, y, x)  # @read
