# race corpus
# rule = "Managed memory that a kernel uses is the host's again when the kernel is done, also through a plain view"
# source = "CUDA Programming Guide, Unified Memory, Coherency and Concurrency"
# cuda = "what the host does through a plain view is seen on the software device alone"
# [expect]
# racy = [["race-host", "use", "wait"], ["race-host", "copy", "wait"]]
# other_half = []
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, array_at, copy, ok

Device().set_current()
address = int(ok(driver.cuMemAllocManaged(BYTES, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
result, other = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
first, second = (ok(driver.cuStreamCreate(1)) for _ in range(2))
view = array_at(address)
view[:] = 1.0
copy(first, result, address, n=N // 2)  # @use
ok(driver.cuMemcpyAsync(other, address, BYTES // 2, second))  # @copy
if sys.argv[1] == "fixed":
    ok(driver.cuCtxSynchronize())
view[N // 2 if sys.argv[1] == "other_half" else 0 :] = 2.0
ok(driver.cuCtxSynchronize())  # @wait
