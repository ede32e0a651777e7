# race corpus
# rule = "Device work, host functions and waits in order leave nothing to report, on whichever side the bytes change"
# source = "Driver API, Stream Management; Execution Control, cuLaunchHostFunc"
# cuda = "what the host does through a plain view is seen on the software device alone"
# [expect]
# copied_into = []
# kernel_writes = []
# callback_writes = []
# two_copies = []
# registered = []
# pageable = []
# value = []
# late = [["race-host", "upload", "wait"]]
# ---
import ctypes
import sys

import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, array_at, fill, host_function, ok

Device().set_current()
variant = sys.argv[1]
stream, x, y = ok(driver.cuStreamCreate(1)), int(ok(driver.cuMemAlloc(BYTES))), int(ok(driver.cuMemAlloc(BYTES)))
own = np.zeros(BYTES + 8192, np.uint8)
if variant == "registered":
    address = -(-own.ctypes.data // 4096) * 4096
    ok(driver.cuMemHostRegister(address, BYTES, 0))
elif variant == "pageable":
    address = own.ctypes.data
else:
    address = int(ok(driver.cuMemHostAlloc(BYTES, 0)))
view = array_at(address)
view[:] = 5.0
fill(stream, x)
for step in range(3):
    if variant == "copied_into":
        ok(driver.cuMemcpyDtoHAsync(address, x, BYTES, stream))
    elif variant == "kernel_writes":
        fill(stream, address, float(step))
    elif variant == "callback_writes":
        host_function(stream, lambda: ctypes.memset(address, 9, BYTES))
    elif variant == "value":
        ok(driver.cuStreamWriteValue32(stream, address, step + 1, 0))
    ok(driver.cuMemcpyHtoDAsync(y, address, BYTES, stream))  # @upload
    if variant == "two_copies":
        ok(driver.cuMemcpyHtoDAsync(x, address, BYTES, stream))
    if variant == "pageable":
        view[:] = step  # was staged before the call returned
    if variant in ("registered", "late", "callback_writes"):
        ok(driver.cuStreamSynchronize(stream))
        view[:] = step
if variant == "late":
    ok(driver.cuMemcpyHtoDAsync(y, address, BYTES, stream))  # @upload
    view[:] = 8.0
ok(driver.cuStreamSynchronize(stream))  # @wait
if variant == "registered":
    view[:] = 8.0
    ok(driver.cuMemHostUnregister(address))
