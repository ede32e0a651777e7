# race corpus
# rule = "A thread that waits for work and is then joined hands that order to who joins it"
# source = "Driver API, Event Management, cuEventSynchronize"
# [expect]
# racy = [["race-host", "copy", "read"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N

import cudatool as ct

x, pinned, stream = ct.ones(N), ct.empty_pinned(N), ct.Stream()
ct.synchronize()
early = stream.record_event()
with ct.stream(stream):
    x.get(pinned, blocking=False)  # @copy
late = stream.record_event()
waiter = threading.Thread(target=(late if sys.argv[1] == "fixed" else early).synchronize)
waiter.start()
waiter.join()
pinned.tolist()  # @read
ct.synchronize()
