# Look for: at the end far more is reserved than allocated, and the large request needs a new segment, because
# the free memory is in holes between the remaining blocks.
"""Free every other block, then ask for one that fits in none of the holes."""

import numpy as np

import cudatool as ct

MIB = 1 << 20
blocks = [ct.empty(3 * MIB, np.uint8) for _ in range(40)]
for index in range(0, len(blocks), 2):
    blocks[index] = None
large = ct.empty(60 * MIB, np.uint8)

allocated, reserved = ct.memory_allocated(), ct.memory_reserved()
print(f"{allocated / MIB:.0f} MiB allocated, {reserved / MIB:.0f} MiB reserved")
assert reserved - allocated >= 50 * MIB
