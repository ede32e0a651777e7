# race corpus
# rule = "What a copy writes to pinned memory may be overwritten by the host when the copy is done"
# source = "Driver API, API synchronization behavior, Memcpy, Asynchronous"
# cuda = "what the host does through a plain view is seen on the software device alone"
# [expect]
# racy = [["race-host", "download", "wait"]]
# fixed = []
# ---
import ctypes
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, array_at, fill, ok

Device().set_current()
address = int(ok(driver.cuMemHostAlloc(BYTES, 0)))
x, stream = int(ok(driver.cuMemAlloc(BYTES))), ok(driver.cuStreamCreate(1))
fill(stream, x)
ok(driver.cuMemcpyDtoHAsync(address, x, BYTES, stream))  # @download
if sys.argv[1] == "fixed":
    ok(driver.cuStreamSynchronize(stream))
ctypes.memset(address, 7, BYTES // 2)
array_at(address)[N // 2 :] = 3.0
ok(driver.cuStreamSynchronize(stream))  # @wait
