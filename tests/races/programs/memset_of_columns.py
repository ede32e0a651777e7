# race corpus
# rule = "A 2-D memset touches its rows and nothing between them"
# source = "Driver API, Memory Management, cuMemsetD2D32Async"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-waw", "left", "right"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, ok

ROWS, PITCH = 16, BYTES // 16
Device().set_current()
x = int(ok(driver.cuMemAlloc(BYTES)))
first, second = (ok(driver.cuStreamCreate(1)) for _ in range(2))
half = PITCH // 2
width = half // 4 if sys.argv[1] == "fixed" else half // 4 + 1
ok(driver.cuMemsetD2D32Async(x, PITCH, 1, width, ROWS, first))  # @left
ok(driver.cuMemsetD2D32Async(x + half, PITCH, 2, half // 4, ROWS, second))  # @right
ok(driver.cuCtxSynchronize())
