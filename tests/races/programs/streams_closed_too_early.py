# race corpus
# rule = "Destroying a stream returns at once; its work still runs, and nothing waits for it"
# source = "Driver API, Stream Management, cuStreamDestroy"
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
x, y = ok(driver.cuMemAlloc(BYTES)), ok(driver.cuMemAlloc(BYTES))
producer, consumer = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
fill(producer, int(x))  # @write
if sys.argv[1] == "fixed":
    ok(driver.cuStreamSynchronize(producer))
ok(driver.cuStreamDestroy(producer))
copy(consumer, int(y), int(x))  # @read
ok(driver.cuCtxSynchronize())
ok(driver.cuMemFree(x))
ok(driver.cuMemFree(y))
