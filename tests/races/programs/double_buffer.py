# race corpus
# rule = "A buffer that is filled again needs an order behind its last reader, not only before the next one"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-war", "read", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

buffers, results = [ct.zeros(N), ct.zeros(N)], [ct.zeros(N) for _ in range(6)]
ct.synchronize()
producer, consumer = ct.Stream(), ct.Stream()
read = [ct.Event(), ct.Event()]
for step, result in enumerate(results):
    buffer = buffers[step % 2]
    if sys.argv[1] == "fixed" and step >= 2:
        producer.wait_event(read[step % 2])
    fill(producer, buffer, float(step))  # @write
    consumer.wait_stream(producer)
    copy(consumer, result, buffer)  # @read
    read[step % 2].record(consumer)
