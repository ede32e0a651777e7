# race corpus
# rule = "Destroying an event does not undo a wait for it; a wait that comes later is for another event"
# source = "Driver API, Event Management, cuEventDestroy; Stream Management, cuStreamWaitEvent"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

Device().set_current()
x, y, z = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(3))
producer, other, consumer = (ok(driver.cuStreamCreate(1)) for _ in range(3))
event = ok(driver.cuEventCreate(2))
fill(producer, x)  # @write
ok(driver.cuEventRecord(event, producer))
if sys.argv[1] == "fixed":
    ok(driver.cuStreamWaitEvent(consumer, event, 0))
ok(driver.cuEventDestroy(event))
event = ok(driver.cuEventCreate(2))  # it may well have the same handle
fill(other, z)
ok(driver.cuEventRecord(event, other))
ok(driver.cuStreamWaitEvent(consumer, event, 0))
copy(consumer, y, x)  # @read
ok(driver.cuCtxSynchronize())
