# race corpus
# rule = "Before its first record an event is an empty set of work: waiting for it does nothing"
# source = "Driver API, Event Management, cuEventRecord (before the first call)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "write", "read"], ["wait-unrecorded", "wait", "wait"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

Device().set_current()
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
producer, consumer = (ok(driver.cuStreamCreate(1)) for _ in range(2))
event = ok(driver.cuEventCreate(2))
fill(producer, x)  # @write
if sys.argv[1] == "fixed":
    ok(driver.cuEventRecord(event, producer))
ok(driver.cuStreamWaitEvent(consumer, event, 0))  # @wait
copy(consumer, y, x)  # @read
ok(driver.cuCtxSynchronize())
